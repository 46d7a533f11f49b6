"""The order of KV messages: what a lossy stream gives beside the publisher's own cache."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from radixlm.router.kv_index import KvIndex
from radixlm.router.kv_stream import KvStream, Message, read_message
from radixlm.router.prefix_hashes import PLAIN, PrefixHashes
from tests.fakes.quick import first
from tests.router.test_kv_index import ids_of

HASHES = PrefixHashes(b"k" * 32)
SIZE = 4


class Publisher:
    """A cache of prompts' blocks, and the messages of its changes."""

    def __init__(self, rng: random.Random, form: str) -> None:
        self._rng, self._form = rng, form
        self.number, self.clock = 0, 0.0
        self.held: set[tuple[int, ...]] = set()
        self.names: dict[tuple[int, ...], int] = {}
        self.kept: list[Message] = []

    def _pack(self, kind: str, **fields: Any) -> Any:
        if self._form == "map":
            return {"type": kind} | fields
        return [kind, *fields.values()]

    def message(self, *events: Any) -> Message:
        self.clock += 1
        payload = msgspec.msgpack.encode([self.clock, events, 0])
        message = read_message(self.number, payload)
        self.number += 1
        self.kept.append(message)
        return message

    def restart(self) -> None:
        self.number, self.held, self.kept = 0, set(), []

    def stored(self, path: tuple[int, ...], first: int) -> Any:
        for end in range(SIZE, len(path) + 1, SIZE):
            self.names.setdefault(path[:end], len(self.names) * 97 - 500)
        hashes = [self.names[path[:end]] for end in range((first + 1) * SIZE, len(path) + 1, SIZE)]
        parent = self.names[path[: first * SIZE]] if first else None
        tokens = list(path[first * SIZE :])
        names = "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"
        values = hashes, parent, tokens, SIZE, None
        return self._pack("BlockStored", **dict(zip(names, values, strict=True)))

    def act(self) -> Message:
        kind, rng = self._rng.random(), self._rng
        if kind < 0.05:
            self.held.clear()
            return self.message(self._pack("AllBlocksCleared"))
        if kind < 0.35 and self.held:
            parents = {path[:-SIZE] for path in self.held}
            gone = rng.choice(sorted(self.held - parents))
            self.held.discard(gone)
            return self.message(self._pack("BlockRemoved", block_hashes=[self.names[gone]]))
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 6) * SIZE))
        first = 0
        while first * SIZE < len(path) and path[: (first + 1) * SIZE] in self.held:
            first += 1
        if first * SIZE >= len(path):
            return self.message()
        self.held |= {path[:end] for end in range(SIZE, len(path) + 1, SIZE)}
        event = self.stored(path, first)
        if self._form == "map" and rng.random() < 0.5:  # a block an event, as SGLang may send
            each = [self.stored(path[: (i + 1) * SIZE], i) for i in range(first, len(path) // SIZE)]
            return self.message(*each)
        return self.message(event)

    def snapshot(self) -> Message:
        events = [self.stored(path, len(path) // SIZE - 1) for path in sorted(self.held, key=len)]
        return self.message(self._pack("AllBlocksCleared"), *events)


def depth(held: set[tuple[int, ...]], asked: list[int]) -> int:
    end = 0
    while tuple(asked[: end + SIZE]) in held and end + SIZE < len(asked):
        end += SIZE
    return end


def check(publisher: Publisher, stream: KvStream, rng: random.Random) -> None:
    asked = [rng.randrange(2) for _ in range(6 * SIZE + 1)]
    found = stream.index.matched(ids_of(asked)).get("w")
    tokens, true = found.device if found else 0, depth(publisher.held, asked)
    if not stream.is_waiting:
        assert tokens == true if stream.is_complete else tokens <= true


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("recovery", ["replay", "short replay", "snapshot", "none"])
@pytest.mark.parametrize("seed", first(2, range(4)))
def test_a_lossy_stream_never_claims_what_the_worker_does_not_hold(
    seed: int, recovery: str, form: str
) -> None:
    rng = random.Random(seed)
    publisher, stream = Publisher(rng, form), KvStream(KvIndex(hashes=HASHES), "w")
    num_complete = 0
    for _ in range(1500):
        is_new = rng.random() < 0.01 and stream.next_number > 0
        if is_new:
            publisher.restart()
        message = publisher.act()
        fate = rng.random() if not is_new else 1.0
        if fate < 0.05:
            continue  # lost
        needs_replay = stream.take(message)
        if fate < 0.15:
            assert not stream.take(message)  # twice
        if needs_replay:
            for _ in range(rng.randrange(3)):  # live messages meanwhile
                assert not stream.take(publisher.act())
                check(publisher, stream, rng)
            kept = publisher.kept[-3:] if recovery == "short replay" else publisher.kept
            first = stream.next_number
            is_there = recovery in ("replay", "short replay")
            for each in kept if is_there else ():
                if each.number >= first:
                    stream.go_on(each)
            stream.replayed()
            if recovery == "snapshot" and stream.has_lost:
                stream.take(publisher.snapshot())
                assert stream.is_complete
        if stream.next_number == publisher.number:  # else the last message was lost
            check(publisher, stream, rng)
            num_complete += stream.is_complete
    assert stream.num_gaps > 10 and stream.num_resets > 2
    assert num_complete > (1000 if recovery in ("replay", "snapshot") else 10)


def test_forms_of_events_and_their_namespaces() -> None:
    index = KvIndex(hashes=HASHES)
    stream = KvStream(index, "w")
    ids = list(range(8))
    base = {"type": "BlockStored", "parent_block_hash": None, "token_ids": ids, "block_size": 4}
    events = [
        base | {"block_hashes": [1, 2], "lora_id": None, "cache_salt": "s"},
        base | {"block_hashes": [3, 4], "lora_id": 5, "lora_name": "poet", "extra_key": "x"},
        ["BlockStored", [5, 6], None, ids, 4, 7],  # SGLang's old form
        ["BlockStored", [b"a" * 32, b"b" * 32], None, ids, 4, 5, "GPU", "poet", [("poet",)] * 2],
        ["BlockStored", [9, 10], None, ids, 4, None, "GPU", None, [("salty",), None]],
        ["BlockStored", [11, 12], None, ids, 4, None, "GPU", None, [("image", 0)] * 2],
        {"type": "BlockStored", "block_hashes": [20], "parent_block_hash": None, "medium": "CPU"}
        | {"token_ids": [9, 9, 9, 9], "block_size": 4},
    ]
    stream.take(read_message(0, msgspec.msgpack.encode([1.0, events, 0])))
    asked = np.arange(9, dtype=np.int32)
    spaces = [(None, "s", None), ("poet", None, "x"), ("lora_id 7", None, None)]
    for space in (*spaces, ("poet", None, None), (None, "salty", None)):
        assert index.matched(asked, space)["w"].device == 8, space
    assert not index.matched(asked, PLAIN)
    assert index.matched(ids_of([9, 9, 9, 9, 9]))["w"] == (0, 4)
    gone = ["BlockRemoved", [b"b" * 32], "GPU"]
    stream.take(read_message(1, msgspec.msgpack.encode([2.0, [gone], 0])))
    assert index.matched(asked, ("poet", None, None))["w"].device == 4


@pytest.mark.parametrize("payload", [b"", b"\xc1", [1.0], [1.0, [["Other", 1]], 0], [1.0, [3], 0]])
def test_what_is_no_message_is_refused(payload: Any) -> None:
    data = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    with pytest.raises((msgspec.MsgspecError, ValueError, TypeError)):
        read_message(0, data)


def test_numbers_that_cannot_be_asked_for_are_refused() -> None:
    data = msgspec.msgpack.encode([1.0, [], 0])
    stream = KvStream(KvIndex(hashes=HASHES), "w")
    stream.take(read_message((1 << 63) - 1, data))
    stream.replayed()
    stream.next_number.to_bytes(8, "big")
    with pytest.raises(ValueError, match="the number 9223372036854775808"):
        read_message(1 << 63, data)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored"},
        ["BlockStored", [1], None, "text", 4, None],
        ["BlockStored", [1], None, [1 << 40] * 4, 4, None],
        ["BlockRemoved", 5],
        ["BlockRemoved", [1], 7],
    ],
)
def test_events_that_cannot_be_read_end_all_trust(event: Any) -> None:
    stream = KvStream(KvIndex(hashes=HASHES), "w")
    good = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None]
    for number, each in enumerate((good, event)):
        stream.take(read_message(number, msgspec.msgpack.encode([1.0 + number, [each], 0])))
    assert stream.num_faulty == 1 and not stream.is_complete and not len(stream.index)
    assert stream.next_number == 2
