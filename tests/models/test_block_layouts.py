"""Records that no known architecture has, in every combination: the C++ kernels, layer by layer and
as a program, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import CPU, PagedRunner
from tests.models.test_decoder import relative_error

from radixlm.arch.spec import Attention, Block, Decoder, Layout, Mlp, Moe, Norm, Rope
from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.models.build import Model, build_model
from radixlm.models.program.step import why_no_program
from radixlm.weights.load import load_weights

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

RMS, LAYER = Norm(1e-6), Norm(1e-5, "layer", bias=True)
PLAIN = Attention(heads=4, kv_heads=2, head_dim=12, rope=Rope(8, 1e4))
DENSE = Mlp(40, "silu")
LAYOUTS: tuple[Layout, ...] = ("pre", "post", "sandwich", "parallel", "parallel2")
MIXERS = {
    "gate": replace(PLAIN, gate="head"),
    "gate and norms": replace(PLAIN, gate="head", qk_norm="each", qk_norm_spec=RMS, softcap=3.0),
    "row norms, sinks": replace(PLAIN, qk_norm="row", qk_norm_spec=LAYER, sinks=True, window=5),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, rope=Rope(12, 1e4, interleaved=True)),
}
FFNS = {
    "plain act": Mlp(40, "relu2", gated=False, bias=True),
    "quick gelu": Mlp(36, "gelu_quick", bias=True),
    "experts": Moe(6, 3, 20, "gelu_tanh", renorm=True, scale=1.5),
    "shared": Moe(6, 2, 20, "silu", score="sigmoid", correction=True, shared=DENSE, bias=True),
    "shared gate": Moe(4, 2, 20, "silu", shared=DENSE, shared_gate=True),
}


def make(decoder: Decoder, folder: Path, kernels: Kernels) -> Model:
    model = build_model(decoder, CPU, torch.float32, kernels)
    load_weights(model, folder, "dummy", progress=False)
    return model


def check(decoder: Decoder, folder: Path) -> bool:
    """Compare the three ways; whether a program covered the model."""
    ids = {0: [3, 9, 4, 1, 5, 9, 2, 6, 5, 3, 5], 1: [8, 7], 2: [1]}
    want = PagedRunner(make(decoder, folder, bind("cpu", {"all": "reference"}))).prefill(ids, 2)
    model = make(decoder, folder, bind("cpu"))
    ways = (False,) if why_no_program(model) else (False, True)
    for model.use_program in ways:
        got = PagedRunner(model, "cpu", 16).prefill(ids, 2)
        alone = PagedRunner(model, "cpu", 16).prefill({0: ids[0]})
        assert torch.equal(alone[0], got[0])
        for sequence in ids:
            assert relative_error(got[sequence], want[sequence]) < 1e-5
    return len(ways) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_in_every_layout(layout: Layout, mixer: str, tmp_path: Path) -> None:
    norm = LAYER if mixer == "biases" else RMS
    blocks = (
        Block(MIXERS[mixer], DENSE, norm, layout, residual=0.7),
        Block(PLAIN, FFNS["plain act"], norm, layout),
    )
    decoder = Decoder(70, 48, blocks, norm, 64, embed_scale=2.0, logit_softcap=5.0)
    assert check(decoder, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ffn", FFNS)
def test_feed_forwards_in_every_layout(layout: Layout, ffn: str, tmp_path: Path) -> None:
    blocks = tuple(Block(PLAIN, FFNS[ffn], RMS, layout, residual=0.6) for _ in range(2))
    positions = (66, 2) if layout == "pre" else None
    decoder = Decoder(70, 48, blocks, RMS, 64, tied=True, positions=positions, logit_scale=0.5)
    assert check(decoder, tmp_path)


def test_early_experts_beside_plain_layers(tmp_path: Path) -> None:
    early = Block(PLAIN, DENSE, RMS, "early_experts", deferred_moe=Moe(5, 2, 20, "silu"))
    decoder = Decoder(70, 48, (early, Block(PLAIN, DENSE, RMS), early), RMS, 64)
    assert check(decoder, tmp_path)
