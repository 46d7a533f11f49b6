"""Steps that launch before the last one is read: on a device that is as late as possible, every
request gets the tokens that it gets alone, one step at a time."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvariantError
from radixlm.base.lazy import load
from radixlm.cuda_graphs.graphs import GraphSizes
from radixlm.devices.copies import AsyncCopy, PinnedRing
from radixlm.devices.device import CpuDevice
from radixlm.sampling.cuda import GpuSampler, SamplerKernels
from radixlm.wire.requests import LogprobParams
from tests.executor.overlap_harness import OverlapHarness, workload
from tests.fakes.device import NONSENSE, SimulatedDevice
from tests.fakes.scheduler_harness import LIMITS


def _same(one: OverlapHarness, other: OverlapHarness, aborted: set[str]) -> None:
    for rid, tokens in one.out.items():
        if rid not in aborted:
            assert other.out[rid] == tokens, rid
        else:  # an abort may take effect a step sooner or later
            shorter = min(len(tokens), len(other.out[rid]))
            assert other.out[rid][:shorter] == tokens[:shorter], rid


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.2, 0.7]),
    st.sampled_from([GraphSizes(), GraphSizes((1, 2, 4, 8), (3, 9, 16, 64)), GraphSizes((3, 8))]),
    st.sampled_from([26, 90]),
)
def test_depth_one_gives_the_tokens_of_depth_zero(
    seed: int, eagerness: float, graphs: GraphSizes, num_pages: int
) -> None:
    plain = OverlapHarness(CpuDevice(), num_pages)
    aborted = workload(plain, seed)
    device = SimulatedDevice(seed, eagerness)
    sizes = {"graphs": graphs.decodes, "prompt_graphs": graphs.prompts}
    late = OverlapHarness(device, num_pages, depth=1, **sizes)
    aborted |= workload(late, seed)
    _same(plain, late, aborted)


def test_steps_with_prompts_take_the_next_size() -> None:
    """Alone, beside decodes, in chunks, and with as many sequences as there are slots."""
    bench = OverlapHarness(SimulatedDevice(2), 90, depth=1, graphs=(8,), prompt_graphs=(5, 20))
    replayed: list[int] = []
    graphs = bench.runner.recorded.plain.prompts
    replay = graphs.replay
    graphs.replay = lambda size: (replayed.append(size), replay(size))[1]  # type: ignore[method-assign]
    plain = OverlapHarness(CpuDevice(), 90)
    for one in (bench, plain):
        for index in range(LIMITS.max_running):
            prompt = [index + 1] * (3 if index else 30)
            one.submit(f"r{index}", prompt, False, max_new_tokens=9, ignore_eos=True, temperature=0)
            one.tick()
        one.run()
    assert bench.out == plain.out
    assert set(replayed) == {5, 20}


def test_two_steps_are_in_flight_at_once() -> None:
    device = SimulatedDevice(eagerness=0.0)
    bench = OverlapHarness(device, depth=1)
    bench.submit("r", [1, 2, 3], False, max_new_tokens=6, ignore_eos=True, temperature=0.0)
    for _ in range(3):
        bench.tick()
    done = device.num_done
    bench.tick()
    # one step was awaited, and a whole one is still queued
    assert done < device.num_done < device.num_launched
    assert len(bench.scheduler.inflight) == 1
    bench.run()


def test_pressure_retracts_and_changes_nothing() -> None:
    def run(bench: OverlapHarness) -> dict[str, list[int]]:
        for i in range(6):
            options = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.0}
            bench.submit(f"r{i}", [i + 1] * 9, False, **options)
        bench.run()
        return bench.out

    late = OverlapHarness(SimulatedDevice(3), 26, depth=1, reserve=0.0)
    assert run(late) == run(OverlapHarness(num_pages=200))
    assert late.scheduler.planner.num_retracted > 0


@pytest.mark.parametrize("options", [(1, 1), (2, 4096)])
def test_large_inputs_are_copied_separately(options: tuple[int, int]) -> None:
    runner = {"max_tokens": options[0], "max_updates": options[1]}
    late, plain = OverlapHarness(SimulatedDevice(5), depth=1, runner=runner), OverlapHarness()
    aborted = workload(plain, 11) | workload(late, 11)
    _same(plain, late, aborted)


def test_graphs_without_padding_take_exact_sizes_only() -> None:
    bench = OverlapHarness(SimulatedDevice(1), graphs=(2,))
    graphs = bench.runner.recorded.plain.decodes
    graphs._pads = False
    assert (graphs.size_for(1), graphs.size_for(2), graphs.size_for(3)) == (0, 2, 0)


def test_a_buffer_in_flight_is_waited_for() -> None:
    device = SimulatedDevice(eagerness=0.0)
    ring, target = PinnedRing(device, 4, 2), torch.zeros(4, dtype=torch.int32)
    for value in range(5):
        host = ring.take()
        host.fill_(value)
        device.upload(host, target)
        ring.mark(device.record())
    device.record().wait()
    assert target.tolist() == [4] * 4


def test_the_simulation_detects_a_buffer_written_too_early() -> None:
    device = SimulatedDevice(eagerness=0.0)
    host, target = device.pinned(4), torch.zeros(4, dtype=torch.int32)
    device.upload(host, target)
    host.fill_(1)
    with pytest.raises(AssertionError, match="under way"):
        device.record().wait()


def test_results_are_valid_after_their_event_only() -> None:
    device = SimulatedDevice(eagerness=0.0)
    copy = AsyncCopy(device, 2)
    copy.start(device, lambda: torch.tensor([5, 6], dtype=torch.int32), 2)
    assert copy._host.tolist() == [NONSENSE] * 2
    with pytest.raises(InvariantError):
        copy.start(device, lambda: torch.tensor([7, 8], dtype=torch.int32), 2)
    assert copy.wait().tolist() == [5, 6]


def test_the_queue_is_checked_every_n_steps_while_others_decode() -> None:
    bench = OverlapHarness(SimulatedDevice(2), depth=1, admit_every=4)
    options = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    bench.submit("first", [1, 2, 3], False, **options)
    bench.tick()  # nothing decodes, so admitted at once
    assert [r.rid for r in bench.scheduler.planner.running] == ["first"]
    bench.submit("second", [4, 5, 6], False, **options)
    seen = []
    for _ in range(5):
        bench.tick()
        seen.append(len(bench.scheduler.planner.running))
    assert seen == [1, 1, 1, 2, 2]
    bench.run()
    plain = OverlapHarness()
    for rid, prompt in (("first", [1, 2, 3]), ("second", [4, 5, 6])):
        plain.submit(rid, prompt, False, **options)
    plain.run()
    assert bench.out == plain.out


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_of_a_gpu_write_the_token_table() -> None:
    """Depth 1 with the fused draw, which puts each row's token where the next step reads it, gives
    the tokens of the sampler at depth 0; grammars are masked on the way."""
    plain, late = OverlapHarness(), OverlapHarness(SimulatedDevice(6), depth=1, graphs=(4,))
    late.runner._fused = load("radixlm.kernels.triton.sample:draw")
    for bench in (plain, late):
        for index, (top_p, has_grammar) in enumerate([(1.0, False), (0.8, False), (1.0, True)]):
            options = {"max_new_tokens": 5, "ignore_eos": True, "top_p": top_p}
            bench.submit(f"r{index}", [1, 2 + index], has_grammar, sampling_seed=index, **options)
        bench.run()
    assert late.out == plain.out and late.device.num_done


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_log_probabilities_are_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of GPUs, which leave them on the device until the step is read."""
    options = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}

    def run(bench: OverlapHarness) -> list[tuple[float, int]]:
        bench.submit("r", [1, 2, 3], False, LogprobParams(), **options)
        bench.submit("other", [4, 5], False, **options)
        bench.run()
        return bench.logprobs["r"]

    want = run(OverlapHarness())
    late = OverlapHarness(SimulatedDevice(4), depth=1)
    sampler = late.runner.sampler
    monkeypatch.setattr(sampler, "_gpu", GpuSampler(late.runner.sampling, SamplerKernels()))
    got = run(late)
    assert [token for _, token in got] == [token for _, token in want] == late.out["r"]
    assert [p for p, _ in got] == pytest.approx([p for p, _ in want], abs=1e-4)
