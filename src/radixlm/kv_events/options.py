"""The options of --kv-events-config."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion

FLAG: Final = "--kv-events-config"


class KvEventsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of --kv-events-config. ``buffer_steps``: messages kept for replay; ``hwm``: messages
    that ZeroMQ queues for a slow subscriber; ``max_queue_size``: changes of the cache that may wait
    to be published. ``bind``: None binds endpoints with a wildcard, ipc and inproc."""

    publisher: Literal["null", "zmq"] = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    format: Literal["default", "legacy", "dynamo", "vllm"] = "default"

    def of_rank(self, rank: int) -> KvEventsOptions:
        """The endpoints of a data-parallel rank: ports + rank, other names with a suffix."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_endpoint_of(self.endpoint, rank),
            replay_endpoint=_endpoint_of(replay, rank) if replay else None,
        )


def read_options(text: str | None, num_ranks: int = 1) -> KvEventsOptions | None:
    """The checked options; None for no publisher. ConfigError with a value that works."""
    if not text:
        return None
    try:
        options = msgspec.json.decode(text, type=KvEventsOptions)
    except msgspec.MsgspecError as error:
        name = str(error).rpartition("`")[0].rpartition("`")[2]
        near = suggestion(name, KvEventsOptions.__struct_fields__)
        raise refused(f"{error}{near}") from error
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(options, name) < 1:
            raise refused(f"{name} is {getattr(options, name)}, needs at least 1")
    if options.publisher == "null":
        return None
    for endpoint in filter(None, (options.endpoint, options.replay_endpoint)):
        scheme, _, rest = endpoint.partition("://")
        port = rest.rpartition(":")[2]
        is_tcp = scheme == "tcp" and port.isdecimal() and int(port) + num_ranks <= 65536
        if not rest or not (is_tcp or scheme in ("ipc", "inproc")):
            raise refused(f"endpoint {endpoint!r} is no tcp://host:port, ipc://path, inproc://name")
    ranks = [options.of_rank(rank) for rank in range(num_ranks)]
    replays = {_port(rank.replay_endpoint) for rank in ranks} - {None}
    if replays & {_port(rank.endpoint) for rank in ranks}:
        raise refused(
            f"endpoint and replay_endpoint use ports in common, each one for each of {num_ranks} "
            "data-parallel ranks: put them further apart"
        )
    return options


def refused(problem: str) -> ConfigError:
    works = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'
    return ConfigError(f"{FLAG}: {problem}; a value that works: '{works}'")


def _port(endpoint: str | None) -> str | None:
    return endpoint.rpartition(":")[2] if endpoint and endpoint.startswith("tcp") else endpoint


def _endpoint_of(endpoint: str, rank: int) -> str:
    if rank and endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


def server_facts(text: str | None, num_ranks: int, page_size: int | None) -> dict[str, Any] | None:
    """The block ``kv_events`` of /server_info: where each data-parallel rank publishes."""
    options = read_options(text, num_ranks)
    if options is None:
        return None
    ranks = [options.of_rank(rank) for rank in range(num_ranks)]
    return msgspec.structs.asdict(options) | {
        "block_size": page_size,
        "has_snapshot": True,  # POST /kv_snapshot
        "endpoints": [rank.endpoint for rank in ranks],
        "replay_endpoints": [rank.replay_endpoint for rank in ranks if rank.replay_endpoint],
    }
