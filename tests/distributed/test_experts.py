"""Experts on several ranks have the bits of one rank that holds all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.test_groups import together
from tests.distributed.test_shm import segments
from tests.fakes.cut_model import CutModel, StepRunner, logits_of
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.thread_groups import thread_groups
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

from radixlm.base.record import replace
from radixlm.distributed.groups import Group
from radixlm.distributed.shm import ShmGroup
from radixlm.distributed.topology import Topology, bounds
from radixlm.kernels.cpu import linear
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.fused import pack_experts as pack_native
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.moe import PackedExperts, UngatedExperts
from radixlm.kernels.ops.moe import pack_experts as pack_reference
from radixlm.layers.experts import ExpertSplit, InsideCut, SplitExperts, even_split
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.program import struct
from radixlm.models.build import mixtures_of

EXPERTS, DIM, INNER = 6, 48, 40
Pack = Callable[[Tensor, Tensor], PackedExperts]
PACKS: dict[str, Pack] = {
    "fp32": lambda up, down: pack_native(up, down, None, None, "silu"),
    "w8a8": lambda up, down: pack_native(up, down, None, None, "silu", ("w8a8", "w8a8")),
    "reference": lambda up, down: pack_reference(up, down, None, None, "silu"),
    "ungated": lambda up, down: UngatedExperts(up[:, :INNER], down, None, None, "relu2"),
}


def weights() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    up = torch.randn(EXPERTS, 2 * INNER, DIM, generator=g) * 0.2
    return up, torch.randn(EXPERTS, DIM, INNER, generator=g) * 0.2


def choice(tokens: int, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(tokens)])
    return torch.randn(tokens, DIM, generator=g), torch.rand(tokens, top_k, generator=g), ids


def split_pack(pack: Pack, split: ExpertSplit) -> SplitExperts:
    up, down = weights()
    held = list(split.held)
    return SplitExperts(pack(up[held], down[held]), split)


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_bits_equal_one_rank(name: str, size: int, tokens: int) -> None:
    """Also of uneven parts; 70 tokens are exchanged all to all from three ranks on."""
    x, w, ids = choice(tokens)
    want = PACKS[name](*weights()).run(x, w, ids)
    for got in together(
        thread_groups(size),
        lambda group: split_pack(PACKS[name], even_split(EXPERTS, group)).run(x, w, ids),
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 7, 80])
@pytest.mark.parametrize("size", [2, 4])
def test_copies_change_no_bit(tokens: int, size: int) -> None:
    """Experts 5 and 0 have two copies each; tokens take turns."""
    logical = (5, 0, 1, 2, 3, 0, 4, 5)
    table = torch.tensor([[1, 2, 3, 4, 6, 0], [5, 2, 3, 4, 6, 7], [5, 2, 3, 4, 6, 0]]).int()
    starts = tuple(range(0, 9, 8 // size))
    x, w, ids = choice(tokens)
    want = PACKS["fp32"](*weights()).run(x, w, ids)
    for got in together(
        thread_groups(size),
        lambda group: split_pack(PACKS["fp32"], ExpertSplit(group, starts, logical, table)).run(
            x, w, ids
        ),
    ):
        assert torch.equal(got, want)


def test_each_rank_holds_a_run_of_slots() -> None:
    splits = [even_split(7, group) for group in thread_groups(3)]
    assert [split.held for split in splits] == [(0, 1, 2), (3, 4), (5, 6)]


def step_program(
    experts: Any, part: Any, zero_experts: int, x_TD: Tensor, logits_TE: Tensor
) -> Tensor:
    """One step of a C++ program: x + experts(x), chosen by these logits."""
    tokens, count = logits_TE.shape
    p = native().Program()
    x, logits, y = p.buffer(DIM), p.buffer(count), p.buffer(DIM)
    table = torch.cat((x_TD, logits_TE), 1).contiguous()
    both = p.buffer(DIM + count)
    args = struct(
        "EmbedArgs", table=table.data_ptr(), dtype=0, vocab=tokens, dim=DIM + count, scale=1.0
    )
    p.embed(y=both, tied=None, args=args, replaced=True)
    parts = torch.eye(DIM + count)
    heads = [linear.pack(parts[:DIM], None, "fp32"), linear.pack(parts[DIM:], None, "fp32")]
    for target, head in zip((x, logits), heads, strict=True):
        p.linear(x=both, y=target, w=head.handle)
    p.linear(x=both, y=y, w=heads[0].handle)
    route = struct(
        "Route", experts=count, top_k=3, score=native().RouterScore.SOFTMAX, renorm=True, scale=1.5
    )
    p.moe(
        x=x, logits=logits, y=y, experts=experts.handle, route=route, scale=0.5, adds=True,
        zero_experts=zero_experts, zero_experts_are_identity=True, scales_input=False,
        selected=False, part=part,
    )  # fmt: skip
    end = linear.pack(torch.eye(DIM), None, "fp32")
    p.logits(x=y, w=end.handle, scale=1.0, softcap=0.0)
    out, starts = torch.empty(tokens, DIM), torch.tensor([0, tokens], dtype=torch.int32)
    ids = torch.arange(tokens, dtype=torch.int32)
    p.run(
        struct(
            "Step", tokens=tokens, ids=ids.data_ptr(), positions=ids.data_ptr(), num_seqs=1,
            query_start=starts.data_ptr(), kv_len=starts[1:].data_ptr(), num_rows=tokens,
            logits=out.data_ptr(), ld_logits=DIM, threads=1,
        )
    )  # fmt: skip
    return out


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize(("size", "copied", "zero"), [(2, False, 0), (3, False, 2), (4, True, 1)])
def test_step_programs_of_several_ranks_have_the_bits_of_one(
    tokens: int, size: int, copied: bool, zero: int
) -> None:
    x, _, _ = choice(tokens)
    logits = torch.randn(tokens, EXPERTS + zero, generator=torch.Generator().manual_seed(tokens))
    want = step_program(PACKS["fp32"](*weights()), None, zero, x, logits)
    ranks = [one.ranks(rank) for rank, one in enumerate(segments(Topology(tp=size, ep=size)))]

    def run(group: Group) -> Tensor:
        split = even_split(EXPERTS, group, zero)
        if copied:
            table = torch.tensor([[1, 2, 3, 4, 6, 0, 8], [5, 2, 3, 4, 6, 7, 8]]).int()
            split = ExpertSplit(group, (0, 2, 4, 6, 8), (5, 0, 1, 2, 3, 0, 4, 5), table)
        experts = split_pack(PACKS["fp32"], split)
        return step_program(experts.pack, experts.program_part(), zero, x, logits)

    assert all(torch.equal(got, want) for got in together([r.tp for r in ranks], run))


@pytest.mark.parametrize("name", ["fp32", "w8a8"])
@pytest.mark.parametrize(("size", "ep"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_experts_cut_inside_have_the_bits_of_whole_ones(
    name: str, size: int, ep: int, tokens: int
) -> None:
    """Uneven parts: 40 inner channels and 48 outputs on three ranks."""
    x, w, ids = choice(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    whole = PACKS[name](*weights())
    want = whole.run(x, w, ids), step_program(whole, None, 0, x, logits)
    segments_of = segments(Topology(tp=size, ep=ep))
    ranks = [one.ranks(rank) for rank, one in enumerate(segments_of)]

    def run(tp: Group) -> tuple[Tensor, Tensor]:
        own = ranks[tp.rank]
        assert isinstance(own.expert_tp, ShmGroup)
        parts = own.expert_tp.size
        inside = InsideCut(own.expert_tp, bounds(INNER, parts), bounds(DIM, parts))
        split = replace(even_split(EXPERTS, own.experts), inside=inside)
        up, down = weights()
        held = list(split.held)
        (up_cut,), (down_cut,) = inside.cuts(2)
        experts = SplitExperts(PACKS[name](up_cut.of(up[held]), down_cut.of(down[held])), split)
        program = step_program(experts.pack, experts.program_part(), 0, x, logits)
        return experts.run(x, w, ids), program

    for got in together([r.tp for r in ranks], run):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


MODELS = (
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
)


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (3, 1), (4, 2)])
def test_models_have_the_bits_of_one_rank(arch: str, tp: int, ep: int) -> None:
    """Step programs with whole experts, with parts of them, and with both."""
    folder = cached_tiny(arch)
    whole = load_model(folder, bind("cpu", {}))
    tokens = {0: [5, 6, 7, 8, 9, 10, 11], 1: [20] * 12}
    wanted = logits_of(StepRunner(whole, "cpu", 16), tokens)
    cut = CutModel(folder, Topology(tp=tp, ep=ep), shared=True)
    found = cut.prefill(tokens, backend="cpu", page_size=16, kind=StepRunner)
    assert whole.program is not None and all(one.program is not None for one in cut.models)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)
    layers = mixtures_of(cut.models[0])
    assert layers and all(layer.share and bool(layer.share.inside) == (ep < tp) for layer in layers)


def test_dense_feed_forwards_may_be_whole_on_each_rank() -> None:
    folder = cached_tiny("DeepseekV3ForCausalLM")
    whole = load_model(folder, bind("cpu", {}))
    whole.use_program = False
    tokens = {0: [5, 6, 7, 8, 9, 10, 11]}
    wanted = logits_of(PagedRunner(whole, "cpu", 16), tokens)
    cut = CutModel(folder, Topology(tp=2), moe_dense_tp=1)
    found = cut.prefill(tokens, backend="cpu", page_size=16)
    assert torch.equal(found[0], wanted[0])
    dense = [b.ffn for b in cut.models[0].blocks if isinstance(b.ffn, MlpLayer)]
    assert dense and all(layer.inner == layer.spec.inner for layer in dense)
