"""Which requests with adapters may run: places are bounded, and nobody starves."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.engine.features.lora import DRAIN_S, LoraFeature
from radixlm.scheduler.request import Request
from radixlm.wire.requests import AdapterRef


class Adapters:
    """Numbers from ``first_unknown`` on are not loaded, those in ``loading`` not yet."""

    def __init__(self) -> None:
        self.loading: set[int] = set()
        self.first_unknown = 1000

    def is_ready(self, number: int) -> bool:
        if number >= self.first_unknown:
            raise InvalidRequest("lora_path: it is not loaded")
        return number not in self.loading


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(rid: str, number: int | None) -> Request:
    ref = None if number is None else AdapterRef(f"a{number}", number, f"{number:032x}")
    made: Any = SimpleNamespace(rid=rid, wire=SimpleNamespace(adapter=ref))
    return cast(Request, made)


def test_requests_of_adapters_that_load_wait_alone() -> None:
    adapters = Adapters()
    feature = LoraFeature(adapters)
    adapters.loading.add(1)
    assert not feature.ready(request("x", 1))
    assert feature.ready(request("y", 2)) and feature.ready(request("z", None))
    adapters.loading.clear()
    assert feature.ready(request("x", 1))


def test_adapters_that_are_unknown_or_off_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="it is not loaded"):
        LoraFeature(Adapters()).arrive(request("x", 1000))
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        LoraFeature(None).arrive(request("x", 1))
    assert LoraFeature(None).ready(request("x", None))


def test_a_full_batch_takes_further_requests_of_its_adapters() -> None:
    feature = LoraFeature(Adapters(), 2, clock=Clock())
    assert feature.ready(request("a", 1)) and feature.ready(request("b", 2))
    assert not feature.ready(request("c", 3))
    assert feature.ready(request("d", 1)) and feature.ready(request("e", None))
    feature.release(request("b", 2))
    assert feature.ready(request("c", 3))


def test_an_adapter_that_waits_too_long_is_next() -> None:
    clock = Clock()
    feature = LoraFeature(Adapters(), 2, clock=clock)
    for rid, number in (("a", 1), ("b", 1), ("c", 2)):
        assert feature.ready(request(rid, number))
    assert not feature.ready(request("late", 3))
    clock.now_s = DRAIN_S
    assert not feature.ready(request("d", 2)), "the smaller adapter makes room"
    assert feature.ready(request("e", 1))
    feature.release(request("c", 2))
    assert not feature.ready(request("other", 4)) and feature.ready(request("late", 3))
    for rid, number in (("a", 1), ("b", 1), ("e", 1), ("late", 3), ("d", 2), ("other", 4)):
        feature.release(request(rid, number))
    assert all(feature.ready(request(f"n{n}", n)) for n in (5, 6))


@pytest.mark.parametrize("seed", range(5))
def test_no_request_waits_beyond_a_bound(seed: int) -> None:
    """Zipf's mix of 50 adapters on 4 places: one of a few requests a step, each runs 5 steps."""
    draw, clock = random.Random(seed), Clock()
    feature = LoraFeature(Adapters(), 4, clock=clock)
    waiting: list[tuple[Request, float]] = []
    running: list[tuple[Request, int]] = []
    weights, longest_s = [1 / (n + 1) for n in range(50)], 0.0
    for step in range(3000):
        clock.now_s = step * 0.02
        if len(waiting) < 20:
            (number,) = draw.choices(range(50), weights)
            waiting.append((request(f"{step}", number), clock.now_s))
        left = []
        for one, since_s in waiting:
            if feature.ready(one):
                running.append((one, step + 5))
            else:
                left.append((one, since_s))
                longest_s = max(longest_s, clock.now_s - since_s)
        waiting = left
        for one, until in [pair for pair in running if pair[1] <= step]:
            running.remove((one, until))
            feature.release(one)
        assert len({cast(AdapterRef, one.wire.adapter).number for one, _ in running}) <= 4
    assert longest_s < 5 * DRAIN_S
