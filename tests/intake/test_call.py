"""The sequences of a call go to the engine in slices, and its log-probabilities are bounded."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.sequences import STARTS_PER_TURN, check_sequences, paced
from radixlm.hidden_outputs.checks import add_logprobs
from radixlm.intake.call import Call


async def _settled(turns: int = 50) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_slice_of_a_call_runs_at_a_time_in_order() -> None:
    call, started = Call("ann"), []
    ends = [asyncio.Event() for _ in range(10)]

    async def one(index: int) -> None:
        async with call.turn(2, 6):
            started.append(index)
            await ends[index].wait()

    tasks = [asyncio.create_task(one(index)) for index in range(10)]
    await _settled()
    assert started == [0, 1, 2]
    ends[1].set()
    await _settled()
    assert started == [0, 1, 2, 3]
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert started == list(range(10))


async def test_waiting_requests_go_one_a_turn_of_the_loop() -> None:
    call, started = Call(), []

    async def one(index: int) -> None:
        async with call.turn(1, 4):
            started.append(index)

    first = call.turn(4, 4)
    await first.__aenter__()
    tasks = [asyncio.create_task(one(index)) for index in range(20)]
    await _settled(2)
    await first.__aexit__(None, None, None)
    counts = []
    for _ in range(12):
        await asyncio.sleep(0)
        counts.append(len(started))
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 1
    await asyncio.gather(*tasks)


async def test_many_requests_of_a_call_begin_over_many_turns_of_the_loop() -> None:
    call, started = Call(), []

    async def one(index: int) -> None:
        async with call.turn(1, 128):
            started.append(index)

    async def start() -> None:
        made = (asyncio.create_task(one(index)) for index in range(500))
        await asyncio.gather(*[task async for task in paced(made)])

    starting, counts = asyncio.create_task(start()), [0]
    while not starting.done():
        await asyncio.sleep(0)
        counts.append(len(started))
    assert started == list(range(500))
    assert max(b - a for a, b in itertools.pairwise(counts)) <= STARTS_PER_TURN + 1


async def test_who_leaves_while_it_waits_takes_no_turn() -> None:
    call, started = Call(), []

    async def one(index: int) -> None:
        async with call.turn(3, 4):
            started.append(index)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(index)) for index in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert started == [0, 2, 3]


async def test_one_request_of_more_samples_than_a_slice_runs_alone() -> None:
    call = Call()
    async with call.turn(256, 64):
        waiting = asyncio.create_task(call.turn(1, 64).__aenter__())
        await _settled()
        assert not waiting.done()
    await waiting


def test_sequences_and_logprobs_of_a_call_are_bounded() -> None:
    check_sequences(4, 4, 16, "text")
    with pytest.raises(InvalidRequest, match=r"--max-sequences-per-call.*at most 4 prompts"):
        check_sequences(5, 4, 16, "text")
    call = Call()
    add_logprobs(call, 60, 100)
    with pytest.raises(InvalidRequest, match=r"120 log-probabilities.*100 \(--max-logprobs\)"):
        add_logprobs(call, 60, 100)
