"""Messages that a broken or hostile peer might send: damaged copies of good messages, good ones
with impossible values, and random bytes."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import msgspec

from radixlm.wire.replies import (
    ControlReply,
    Finish,
    Heartbeat,
    LoadReport,
    Logprobs,
    Ready,
    StepReply,
    TokenDelta,
)
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    GrammarSpec,
    LogprobParams,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams

_SAMPLING = SamplingParams(max_new_tokens=3, temperature=0.5, top_k=4, stop=("x",), n=1)
TO_ENGINE: tuple[Any, ...] = (
    TokenizedRequest("a", pack_ids([3, 4, 5]), _SAMPLING, deadline_s=1.0, queue_deadline_s=2.0),
    TokenizedRequest(
        "b",
        pack_ids([3, 4, 5, 6]),
        SamplingParams(max_new_tokens=4, logit_bias={3: 1.0}, sampling_seed=5, regex="[ab]"),
        num_emitted=2,
        logprobs=LogprobParams(0, 2, (3,)),
        grammar=GrammarSpec("regex", "[ab]"),
        extra_key="k",
        priority=3,
        is_quarantined=True,
    ),
    AbortRequest(rids=("a", "b")),
    Control("c", "flush_cache"),
    Control("d", "pause", {"mode": "in_place"}),
    Control("e", "continue"),
    Control("f", "slow_down", {"forward_sleep_time": 0}),
    Control("g", "info"),
)
TO_INTAKE: tuple[Any, ...] = (
    StepReply([TokenDelta("live", [5, 6]), TokenDelta("x", [1], Finish("stop", matched=3))]),
    StepReply([], rids=("live", "x"), tokens=(5, 6)),
    StepReply(
        [
            TokenDelta(
                "live",
                [7],
                logprobs=Logprobs([(-0.5, 7)], [[(-0.5, 7)]], [None]),
                hidden_states=[b"\0" * 8],
                pooled=[0.5],
            )
        ],
        LoadReport(num_running=1),
    ),
    Heartbeat(LoadReport(num_waiting=2)),
    Ready({"max_total_num_tokens": 4096, "context_len": 64}),
    ControlReply("c", True, "fine", {"a": [1, 2]}),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, float("nan"), float("inf")),
    *("", "\0", "x" * 2000, b"", b"\xff" * 7, b"\xff" * 8, [], [[]] * 50, {}, {"": None}),
)


class Fuzzer:
    """Endless bad messages from one seed."""

    def __init__(self, good: tuple[Any, ...], seed: int) -> None:
        self._random = random.Random(seed)
        encode = msgspec.msgpack.Encoder().encode
        self._good = [encode(message) for message in good]
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            self._flip, self._flip, self._cut, self._insert, self._splice, self._noise,
            self._pickled, self._deep, self._revalue, self._revalue, self._revalue, self._revalue,
        )  # fmt: skip

    def make(self) -> bytes:
        return self._random.choice(self._ways)(self._random.choice(self._good))

    def _flip(self, data: bytes) -> bytes:
        spoiled = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            spoiled[self._random.randrange(len(spoiled))] ^= 1 << self._random.randrange(8)
        return bytes(spoiled)

    def _cut(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def _insert(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data))
        return data[:at] + self._random.randbytes(self._random.randint(1, 9)) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._good)
        return (
            data[: self._random.randrange(len(data))] + other[self._random.randrange(len(other)) :]
        )

    def _noise(self, data: bytes) -> bytes:
        return self._random.randbytes(self._random.randrange(300))

    def _pickled(self, data: bytes) -> bytes:
        return pickle.dumps(eval, self._random.randrange(5))  # must never be called or loaded

    def _deep(self, data: bytes) -> bytes:
        return self._random.choice((b"\x91", b"\x81\xa1x")) * self._random.choice((99, 50_000))

    def _revalue(self, data: bytes) -> bytes:
        """Change one value of a good message; the result often still fits its type."""
        tree = msgspec.msgpack.decode(data)
        places: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in list(items):
                if key != "type":
                    places.append((node, key))
                if isinstance(value, dict | list):
                    walk(value)

        walk(tree)
        for node, key in self._random.sample(
            places, min(len(places), self._random.choice((1, 1, 3)))
        ):
            node[key] = self._random.choice(VALUES)
        return msgspec.msgpack.encode(tree)
