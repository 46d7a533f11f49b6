"""KvStream: the numbered messages of one publisher of KV events, brought into the index in order.

    message of the expected number -> taken
    gap -> the worker's blocks are not trusted -> replay -> what still misses: all is forgotten
    number that goes back, of a later time -> the publisher is another one -> all is forgotten

What the index holds of a stream in order is true. It is also complete if the stream was followed
from its start or from AllBlocksCleared, which the worker can be asked for (POST /kv_snapshot).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from radixlm.base.record import Record
from radixlm.router.kv_index import KvIndex
from radixlm.router.prefix_hashes import Namespace

log = logging.getLogger(__name__)

MAX_HELD: Final = 20_000  # messages that wait for a replay
MAX_NUMBER: Final = (1 << 63) - 1
_UNKNOWN: Final = "\0unknown"  # a salt that no request has
_EVENTS: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_STORED: Final = (  # fields of the array form, in order: SGLang's first five, then vLLM's
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)


class Message(Record):
    """One message: its number, the publisher's time and the events as maps."""

    number: int
    time_s: float
    events: tuple[dict[str, Any], ...]


def read_message(number: int, payload: bytes) -> Message:
    """Decode a payload of SGLang's or vLLM's form. msgspec.MsgspecError, ValueError, TypeError or
    RecursionError where it is none."""
    if number > MAX_NUMBER:
        raise ValueError(f"the number {number}")
    time_s, events, *_ = msgspec.msgpack.decode(payload)
    if not isinstance(time_s, float | int) or not isinstance(events, list):
        raise ValueError("not [time, events, rank]")
    return Message(number, time_s, tuple(_as_map(event) for event in events))


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        kind, fields = event.get("type"), event
    else:
        kind, *values = event
        names = _STORED if kind == "BlockStored" else ("block_hashes", "medium")
        fields = {"type": kind} | dict(zip(names, values, strict=False))
    if kind not in _EVENTS:
        raise ValueError(f"unknown event {kind!r:.40}")
    return fields


class KvStream:
    """``name``: of the worker in the index."""

    def __init__(self, index: KvIndex, name: str) -> None:
        self.index, self.name = index, name
        self.next_number = 0
        self.is_complete = False
        self.is_waiting = False  # for a replay
        self.num_gaps = self.num_resets = self.num_faulty = 0
        self.has_lost = False  # since the last AllBlocksCleared
        self._held: list[Message] = []
        self._last_time_s = 0.0

    @property
    def is_complete_now(self) -> bool:
        """Whether the index holds just what the worker does."""
        return self.is_complete and not self.is_waiting

    def take(self, message: Message) -> bool:
        """A live message. True if a replay from ``next_number`` on is needed, which ends with
        ``replayed``."""
        if self.is_waiting:
            self._held.append(message)
            if len(self._held) > MAX_HELD:
                self.replayed()
            return False
        if message.number < self.next_number:
            if message.time_s <= self._last_time_s:
                return False  # a duplicate
            self.num_resets += 1
            self._forget(0)
        if message.number == self.next_number:
            self._apply(message)
            return False
        self.num_gaps += 1
        self.is_waiting = True
        self._held = [message]
        return True

    def faulty(self) -> None:
        """A message could not be read: its events are lost."""
        self.num_faulty += 1
        self._forget(self.next_number)

    def replayed(self) -> None:
        """The replay has ended, or none can be had."""
        self.is_waiting = False
        held, self._held = self._held, []
        for message in held:
            self.go_on(message)

    def restart(self) -> None:
        """The worker was away, and may be another one now: live messages wait for a replay."""
        self._forget(0)
        self.is_complete, self.is_waiting, self._held = False, True, []

    def go_on(self, message: Message) -> None:
        """Take a message of a replay, or after it; what misses before it is lost."""
        if message.number < self.next_number:
            if message.time_s <= self._last_time_s:
                return
            self.num_resets += 1
            self._forget(message.number)
        elif message.number > self.next_number:
            self._forget(message.number)
        self._apply(message)

    def _forget(self, number: int) -> None:
        """What the worker holds is unknown; go on with ``number``."""
        self.index.cleared(self.name)
        self.is_complete, self.has_lost = number == 0, number != 0
        self.next_number = number

    def _apply(self, message: Message) -> None:
        self.next_number, self._last_time_s = message.number + 1, message.time_s
        if message.number == 0:
            self.is_complete, self.has_lost = True, False
        self._apply_events(message.events)

    def _apply_events(self, events: Sequence[dict[str, Any]]) -> None:
        try:
            for event in _joined(events):
                self._apply_event(event)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            log.warning("KV event of %s cannot be read: %r", self.name, error)
            self.faulty()

    def _apply_event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.index.cleared(self.name)
            self.is_complete, self.has_lost = True, False
            return
        names, medium = [_number(own) for own in event["block_hashes"]], event.get("medium")
        if kind == "BlockRemoved":
            self.index.removed(self.name, names, medium or "GPU")
            return
        parent = event.get("parent_block_hash")
        self.index.stored(
            self.name,
            names,
            None if parent is None else _number(parent),
            np.asarray(event["token_ids"], np.int32),
            event["block_size"],
            _namespace(event),
            medium or "GPU",
        )


def _joined(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events, with a store that goes on where the last one ended joined to it: with pages of one
    token each is an event of its own."""
    last: dict[str, Any] | None = None
    for event in events:
        if last is not None and _goes_on(last, event):
            last["block_hashes"] += event["block_hashes"]
            last["token_ids"] += event["token_ids"]
            continue
        if last is not None:
            yield last
        last = dict(event)
        if last["type"] == "BlockStored":
            last["block_hashes"], last["token_ids"] = [*last["block_hashes"]], [*last["token_ids"]]
    if last is not None:
        yield last


def _goes_on(last: dict[str, Any], event: dict[str, Any]) -> bool:
    return (
        last["type"] == event["type"] == "BlockStored"
        and bool(last["block_hashes"])
        and event.get("parent_block_hash") == last["block_hashes"][-1]
        and event["block_size"] == last["block_size"]
        and event.get("medium") == last.get("medium")
    )


def _number(own: int | bytes) -> int:
    """A block's hash: a number, or (vLLM) the bytes of a digest."""
    return own if isinstance(own, int) else int.from_bytes(own[:8])


def _namespace(event: dict[str, Any]) -> Namespace:
    """What the blocks depend on besides tokens. vLLM names it in extra keys: the adapter, then the
    salt; other keys are of media, whose prompts the gateway does not know."""
    adapter, salt = event.get("lora_name"), event.get("cache_salt")
    if adapter is None and event.get("lora_id") is not None:
        adapter = f"lora_id {event['lora_id']}"
    extra = event.get("extra_key")
    keys = event.get("extra_keys")
    if keys and keys[0]:
        others = [key for key in keys[0] if key != event.get("lora_name")]
        if others:
            salt = others[0] if len(others) == 1 and isinstance(others[0], str) else _UNKNOWN
    return adapter, salt, extra
