"""Where workers publish their KV events. The readers, which need numpy and ZeroMQ, are loaded when
the first such worker joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from radixlm.base.addresses import url_host
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway
    from radixlm.router.registry import Event

_ANY_HOSTS: Final = ("*", "0.0.0.0", "[::]", "::")


class Feed(Record):
    """Where one publisher is found."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def feeds_of(worker: Worker) -> list[Feed]:
    """The publishers of a worker, by its labels (kv_events_endpoint, kv_events_replay_endpoint,
    kv_events_topic), what a RadixLM server tells, or the flag --kv-events-config of SGLang and
    vLLM. Of a worker that is one data-parallel rank, that rank's."""
    labels, facts = worker.labels, worker.facts
    told, config = facts.get("kv_events"), facts.get("kv_events_config")
    if endpoint := labels.get("kv_events_endpoint"):
        feeds = [
            Feed(
                endpoint,
                labels.get("kv_events_replay_endpoint"),
                labels.get("kv_events_topic", ""),
            )
        ]
    elif isinstance(told, Mapping):
        replays = told.get("replay_endpoints") or [None] * len(told["endpoints"])
        topic = str(told.get("topic") or "")
        feeds = [Feed(e, r, topic) for e, r in zip(told["endpoints"], replays, strict=True)]
        feeds = feeds if worker.dp_rank is None else feeds[worker.dp_rank : worker.dp_rank + 1]
    else:
        feeds = list(_configured(config, int(facts.get("dp_size") or 1), worker.dp_rank))
    host = urlsplit(worker.url).hostname or "127.0.0.1"
    return [_reachable(feed, host) for feed in feeds if not feed.endpoint.startswith("inproc")]


def _configured(config: Any, num_ranks: int, rank: int | None) -> Iterator[Feed]:
    """SGLang's and vLLM's option: port + data-parallel rank."""
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError:
            return
    if not isinstance(config, Mapping) or config.get("publisher") != "zmq":
        return
    ends = [config.get("endpoint", "tcp://*:5557"), config.get("replay_endpoint")]
    for number in range(num_ranks) if rank is None else (rank,):
        endpoint, replay = (_port_plus(end, number) if end else None for end in ends)
        if endpoint:
            yield Feed(endpoint, replay, str(config.get("topic") or ""))


def _port_plus(endpoint: str, rank: int) -> str:
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp") and port.isdecimal():
        return f"{head}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


def _reachable(feed: Feed, host: str) -> Feed:
    """Wildcards replaced by the worker's host."""

    def of(endpoint: str | None) -> str | None:
        if not endpoint or not endpoint.startswith("tcp://"):
            return endpoint
        name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if name not in _ANY_HOSTS:
            return endpoint
        return f"tcp://{url_host(host)}:{port}"

    return Feed(of(feed.endpoint) or "", of(feed.replay_endpoint), feed.topic)


def attach(gateway: Gateway) -> None:
    """Read the events of every worker that publishes some: ``gateway.index``."""

    def on_change(event: Event, worker: Worker) -> None:
        if gateway.index is None and event != "left" and feeds_of(worker):
            gateway.index = load("radixlm.router.kv_readers:KvReaders")(gateway)
        if gateway.index is not None:
            gateway.index.on_change(event, worker)

    if not gateway.options.disable_kv_events:
        gateway.registry.listen(on_change)
