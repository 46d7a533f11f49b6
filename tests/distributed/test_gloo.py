"""Gloo groups of threads of one process, which connect over loopback."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.distributed.test_groups import SHAPES, check_collectives, every_collective, together
from tests.fakes.cut_model import CutModel, StepRunner, logits_of
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from torch.distributed import HashStore, PrefixStore

from radixlm.base.errors import RankLost
from radixlm.distributed.gloo import GlooGroup
from radixlm.distributed.topology import Topology
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind


def gloo_groups(size: int, timeout_s: float = 20.0) -> list[GlooGroup]:
    store = PrefixStore("tp", HashStore())
    with ThreadPoolExecutor(size) as pool:
        made = [
            pool.submit(GlooGroup, store, rank, size, timeout_s, "127.0.0.1")
            for rank in range(size)
        ]
        return [m.result(30) for m in made]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_against_plain_tensors(size: int) -> None:
    groups = gloo_groups(size)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for rows, columns in SHAPES:
            found = together(groups, lambda g: every_collective(g, rows, columns, dtype))  # noqa: B023
            check_collectives(found, rows, columns, dtype)


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "FalconH1ForCausalLM"])
@pytest.mark.parametrize("ep", [1, 2])
def test_step_programs_have_the_bits_of_one_rank(arch: str, ep: int) -> None:
    """Ranks of two hosts run step programs, as those of one host do."""
    folder = cached_tiny(arch)
    whole = load_model(folder, bind("cpu", {}))
    tokens = {0: list(range(3, 22)), 1: [7, 9, 11, 13]}
    wanted = logits_of(StepRunner(whole, "cpu", 16), tokens)
    cut = CutModel(folder, Topology(tp=2, ep=ep), groups=gloo_groups(2))
    found = cut.prefill(tokens, backend="cpu", page_size=16, kind=StepRunner)
    assert all(model.program is not None for model in (whole, *cut.models))
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)


def test_a_step_program_tells_a_lost_rank() -> None:
    groups = gloo_groups(2, timeout_s=0.2)
    program = native().Program()
    buffer = program.buffer(2, 1)
    program.all_gather(y=buffer, bounds=[0, 1, 2], group=groups[0].native)
    step = native().Step()
    step.tokens = 1
    for reason in ("a rank of 2 is lost", "an earlier exchange has failed"):
        with pytest.raises(RankLost, match=reason):
            program.run(step)


def test_sums_are_added_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    found = together(gloo_groups(4), lambda g: g.all_reduce(torch.full((9,), values[g.rank])))
    assert all(torch.equal(x, torch.ones(9)) for x in found)


def test_a_silent_rank_is_told_after_the_timeout() -> None:
    groups = gloo_groups(2, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(RankLost, match="a rank of 2 is lost"):
        groups[0].all_reduce(torch.ones(3))
    assert time.monotonic() - start < 5
    with pytest.raises(RankLost):
        GlooGroup(HashStore(), 0, 2, timeout_s=0.2)
