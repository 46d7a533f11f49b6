"""Records with recurrent mixers and attention variants as one C++ program: near the reference, and
the same bits alone, in a batch, in chunks and token by token."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import CPU, PagedRunner
from tests.models.test_decoder import relative_error

from radixlm.arch.spec import (
    AltUp,
    Attention,
    AttentionExtras,
    Block,
    Decoder,
    DeltaNet,
    HierarchicalRecurrence,
    LatentAttention,
    LayerInputs,
    LogNScaling,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    ParallelHybrid,
    RgLru,
    Rope,
    SharedLayer,
    ShortConv,
    StateMixer,
)
from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.models.build import Model, build_model
from radixlm.models.program.step import StepProgram
from radixlm.weights.load import load_weights

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

RMS, LAYER = Norm(1e-6), Norm(1e-5, "layer", bias=True)
PLAIN = Attention(heads=4, kv_heads=2, head_dim=12, rope=Rope(8, 1e4))
LATENT = LatentAttention(4, 12, 8, 16, 24, 20, Rope(8, 1e4), RMS, 0.2)
DENSE = Mlp(40, "silu")
DELTA = DeltaNet(2, 4, 12, 20, 4, RMS)
SSD = Mamba2(6, 10, 9, 2, 4, RMS)
STATES: dict[str, StateMixer] = {
    "short conv": ShortConv(48, 3),
    "short conv with a bias": ShortConv(36, 4, bias=True),
    "mamba": Mamba1(56, 9, 5, 4),
    "mamba with norms": Mamba1(56, 9, 5, 3, conv_bias=False, bias=True, norm=RMS),
    "mamba of two heads": Mamba1(56, 9, 5, 4, heads=2, act="relu"),
    "gated linear recurrence": RgLru(60, 3, 4, "gelu_tanh"),
    "mamba 2": SSD,
    "mamba 2, gate behind": replace(SSD, norm_groups=2, gate_after_norm=True, bias=True),
    "mamba 2, bias behind": replace(SSD, out_bias=True, act="gelu"),
    "mamba 2, no norm": replace(SSD, norm=None, dt_limit=(0.01, 0.6), conv_bias=False),
    "delta": DELTA,
    "delta, wide": replace(
        DELTA, v_dim=70, beta_scale=2.0, gate_act="sigmoid", width=2, act="gelu_tanh"
    ),
    "delta by channel": replace(DELTA, channel_decay=True, gate_act="sigmoid"),
    "delta with a floor": replace(DELTA, channel_decay=True, low_rank=False, decay_floor=-5.0),
}
VARIANTS = {
    "slopes": AttentionExtras(alibi_slopes=(0.5, 0.25, 0.125, 0.0625), clip_qkv=0.7),
    "chunks": AttentionExtras(attention_chunk_size=6, logn_scaling=LogNScaling(0.1, 4.0, 1)),
    "power": AttentionExtras(logn_scaling=LogNScaling(0.3, 8.0, is_power=True), k_scale=0.5),
    "norms elsewhere": AttentionExtras(norm_after_rope=True, v_norm=RMS, v_scale=0.7),
    "channel gate": AttentionExtras(
        gate="channel", out_norm=RMS, clip_qkv=0.9, clip_after_norm=True
    ),
    "head gate": AttentionExtras(
        gate="head", gate_act="softplus", out_norm=RMS, out_norm_heads=True
    ),
    "twice": AttentionExtras(gate="head", gate_act="sigmoid2", gate_bias=True, v_dim=20),
    "values are keys": AttentionExtras(k_is_v=True, v_norm=RMS),
}
LENGTHS = (37, 1, 5, 22)
EACH_KERNEL = ("short conv", "mamba", "mamba 2", "delta by channel", "gated linear recurrence")


def make(decoder: Decoder, folder: Path, kernels: Kernels) -> Model:
    model = build_model(decoder, CPU, torch.float32, kernels)
    load_weights(model, folder, "dummy", progress=False)
    return model


def check(decoder: Decoder, folder: Path) -> Model:
    """Compare a program with the layers and the reference (whose chunks round differently); its
    bits depend on nothing else. Returns the model."""
    vocab = decoder.vocab
    ids = {s: [(7 * s + 3 * i * i) % vocab for i in range(n)] for s, n in enumerate(LENGTHS)}
    want = PagedRunner(make(decoder, folder, bind("cpu", {"all": "reference"}))).prefill(ids, 2)
    model = make(decoder, folder, bind("cpu"))
    assert model.use_program
    model.use_program = False
    layers = PagedRunner(model, "cpu", 16).prefill(ids, 2)
    model.use_program = True
    together = PagedRunner(model, "cpu", 16).prefill(ids, 3)
    assert isinstance(model.program, StepProgram)
    for sequence in ids:
        got, near, far = (t[sequence].clamp(min=-1e3) for t in (together, layers, want))
        assert relative_error(got, near) < 5e-5  # delta rules with a large step amplify rounding
        assert relative_error(got, far) < 2e-4
    alone = PagedRunner(model, "cpu", 32, seed=1).prefill({0: ids[0]})[0]
    assert torch.equal(alone, together[0])
    steps = PagedRunner(model, "cpu", 16, seed=2)
    rows = [steps.step({0: [token]})[0] for token in ids[0]]
    assert torch.equal(torch.cat(rows), together[0])
    check_wanted_rows(model, ids)
    return model


def check_wanted_rows(model: Model, ids: dict[int, list[int]]) -> None:
    """`step` computes the last block for some rows only, to the same bits."""
    batches = []
    for _ in range(2):  # each with its own states, because a step changes them
        runner = PagedRunner(model, "cpu", 16)
        batches.append((runner, runner.batch(ids)))
    with torch.inference_mode():
        runner, batch = batches[0]
        runner.backend.begin(batch)
        rows_R = torch.tensor([36, 2, 2])
        want = model.logits(model.forward(batch)[rows_R])
        runner, batch = batches[1]
        runner.backend.begin(batch)
        batch.logits_rows_R = rows_R
        _, got = model.step(batch, need_hidden=False)
    assert got is not None and torch.equal(got, want)


@pytest.mark.parametrize("name", STATES)
def test_recurrent_mixers(name: str, tmp_path: Path) -> None:
    mixer = STATES[name]
    blocks = (
        Block(mixer, DENSE, RMS, residual=0.7),
        Block(PLAIN, DENSE, RMS),
        Block(mixer, DENSE, RMS, "sandwich"),
        Block(mixer, Moe(4, 2, 20, "silu"), RMS),
    )
    check(Decoder(70, 48, blocks, RMS, 64), tmp_path)


LIMITED = {
    "before": Mlp(40, "silu", limit=0.02),
    "after": Mlp(40, "gelu", limit=0.02, limit_after=True),
    "another one": Mlp(40, "swiglu_oai", limit=0.02),
    "the largest gates": Mlp(40, "gelu_tanh", sparsity=0.7),
    "experts": Moe(4, 2, 20, "silu", limit=0.02, shared=Mlp(40, "silu", limit_after=True)),
    "experts, after": Moe(4, 2, 20, "silu", limit=0.02, limit_after=True),
    "experts, another one": Moe(4, 2, 20, "swiglu_oai", limit=0.02),
}


@pytest.mark.parametrize("name", LIMITED)
def test_gates_with_limits(name: str, tmp_path: Path) -> None:
    block = Block(PLAIN, LIMITED[name], RMS)
    check(Decoder(70, 48, (block, block), RMS, 64), tmp_path)


@pytest.mark.parametrize("rank", [0, 6])
def test_layers_that_blocks_share(rank: int, tmp_path: Path) -> None:
    wide = Attention(4, 4, 24, Rope(24, 1e4) if rank else None, scale=0.25)
    shared = SharedLayer(0, 0, wide, Mlp(40, "gelu", bias=rank > 0), RMS, rank, rank > 0)
    caller = Block(SSD, None, RMS, shared_block=shared)
    blocks = (
        *(caller, Block(STATES["mamba of two heads"], None, RMS)),
        *(replace(caller, shared_block=replace(shared, call=n)) for n in (1, 2)),
    )
    check(Decoder(70, 48, blocks, RMS, 64), tmp_path)


def test_stacks_that_run_again_and_again(tmp_path: Path) -> None:
    cycles = HierarchicalRecurrence(2, 3, 2, ("first", "second"))
    blocks = (Block(PLAIN, DENSE, RMS),) * 16
    check(Decoder(70, 48, blocks, RMS, 64, cycles=cycles), tmp_path)


@pytest.mark.parametrize("scales", [False, True])
def test_streams_that_are_predicted(scales: bool, tmp_path: Path) -> None:
    extended = replace(PLAIN, extras=AttentionExtras(v_norm=RMS))
    ffns = (Mlp(40, "gelu_tanh", sparsity=0.9), DENSE, DENSE)
    blocks = tuple(Block(extended, ffn, RMS, "sandwich") for ffn in ffns)
    altup = AltUp(3, 8, 12, 60, "gelu_tanh", scales)
    check(Decoder(70, 48, blocks, RMS, 64, altup=altup), tmp_path)


@pytest.mark.parametrize("isa", native().supported_isas() if cpu.available else [])
def test_every_processor(isa: str, tmp_path: Path) -> None:
    before = native().isa()
    native().select_isa(isa)
    try:
        mixers = (STATES[name] for name in EACH_KERNEL)
        ffns = (DENSE, *(LIMITED[name] for name in ("before", "the largest gates", "experts")))
        blocks = tuple(
            Block(mixer, ffn, RMS)
            for mixer, ffn in zip(mixers, itertools.cycle(ffns), strict=False)
        )
        variant = replace(PLAIN, extras=VARIANTS["head gate"])
        check(Decoder(70, 48, (*blocks, Block(variant, DENSE, RMS)), RMS, 64), tmp_path)
    finally:
        native().select_isa(before)


def test_branches_alone_and_together(tmp_path: Path) -> None:
    """A mixer or an MLP alone, attention parallel to a recurrence, a norm of the embeddings."""
    pair = ParallelHybrid(PLAIN, SSD)
    blocks = (
        Block(SSD, None, RMS, residual=0.5),
        Block(None, DENSE, RMS),
        Block(pair, DENSE, RMS, "parallel"),
        Block(pair, DENSE, RMS, "post"),
        Block(None, Moe(6, 2, 20, "silu", shared=DENSE, shared_gate=True), RMS, residual=0.7),
    )
    decoder = Decoder(70, 48, blocks, RMS, 64, embed_norm=LAYER, suppressed_tokens=(3, 60))
    check(decoder, tmp_path)
    last = replace(decoder, blocks=(*blocks[:2], Block(pair, None, RMS)))
    assert check(last, tmp_path).decoder.blocks[-1].ffn is None


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("norm", ["", "head"])
def test_variants_of_attention(name: str, norm: str, tmp_path: Path) -> None:
    extras = VARIANTS[name]
    mixer = replace(PLAIN, extras=extras)
    if norm == "head":
        has_gate = not extras.v_dim and not extras.clip_after_norm
        gate = "head" if has_gate else ""
        mixer = replace(mixer, qk_norm="head", qk_norm_spec=RMS, gate=gate)
    reader = replace(
        PLAIN,
        extras=AttentionExtras(kv_from=2),
        rope=Rope(12, 1e5),
        qk_norm="head",
        qk_norm_spec=RMS,
    )
    blocks = (
        Block(mixer, DENSE, RMS, "prenorm_ffn_only"),
        Block(mixer, replace(DENSE, sub_norm=RMS), RMS, "sandwich", weights=(0.9, 0.8, 1.1, 0.7)),
        Block(PLAIN, DENSE, RMS, out_scale=True),
        Block(reader, DENSE, RMS),
        Block(mixer, DENSE, RMS, "sandwich", post_norms=(RMS, LAYER)),
    )
    check(Decoder(70, 48, blocks, RMS, 64), tmp_path)


FFNS = {
    "shared gate": Moe(4, 2, 20, "silu", shared=DENSE, shared_gate=True),
    "out norm": Moe(4, 2, 20, "silu", shared=DENSE, out_norm=RMS),
    "inputs weighed": Moe(4, 1, 20, "silu", score="sigmoid_topk", scale_input=True, shared=DENSE),
    "sigmoids of the chosen": Moe(6, 3, 20, "silu", score="sigmoid_topk", renorm=True),
    "weights scaled twice": Moe(4, 2, 20, "silu", scale_input=True, router_norm=RMS),
    "without a gate": Moe(4, 2, 20, "relu2", gated=False, expert_scale=True),
    "one after another": Moe(6, 2, 20, "silu", score="sparsemixer", jitter=0.4),
    "experts that pass": Moe(4, 3, 20, "silu", zero_experts=2, correction=True, scale=1.5),
    "experts that give nothing": Moe(
        4, 3, 20, "silu", zero_experts=2, zero_experts_are_identity=False
    ),
}


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("layout", ["pre", "post", "sandwich", "parallel2"])
def test_mixtures(ffn: str, layout: str, tmp_path: Path) -> None:
    block = Block(PLAIN, FFNS[ffn], RMS, layout, residual=0.6)  # type: ignore[arg-type]
    check(Decoder(70, 48, (block, block), RMS, 64), tmp_path)


def test_inputs_of_each_layer_and_experts_beside(tmp_path: Path) -> None:
    """The parts of Gemma 4."""
    beside = Moe(4, 2, 20, "gelu_tanh", router_norm=RMS, expert_scale=True, renorm=True)
    reader = replace(PLAIN, extras=AttentionExtras(kv_from=0))
    blocks = (
        Block(PLAIN, DENSE, RMS, "sandwich", out_scale=True),
        Block(reader, DENSE, RMS, "sandwich", parallel_moe=beside),
        Block(PLAIN, DENSE, RMS, "sandwich", parallel_moe=beside, out_scale=True),
    )
    for inputs in (LayerInputs(12, 60, "gelu_tanh"), LayerInputs(12, 0, "silu")):
        check(Decoder(70, 48, blocks, RMS, 64, layer_inputs=inputs, extra_vocab_rows=5), tmp_path)


def test_latents_beside_other_parts(tmp_path: Path) -> None:
    """The parts of LongCat, Mistral 4 and Kimi Linear."""
    side = Moe(4, 3, 20, "silu", zero_experts=2, correction=True, scale=1.5)
    hot = replace(LATENT, logn_scaling=LogNScaling(0.1, 4.0), gate="head")
    kimi = replace(DELTA, channel_decay=True, gate_act="sigmoid")
    blocks = (
        Block(LATENT, DENSE, RMS, deferred_moe=side),
        Block(hot, DENSE, RMS),
        Block(kimi, Moe(4, 2, 20, "silu", shared=DENSE), RMS),
        Block(replace(LATENT, gate="channel", q_rank=0), DENSE, RMS, deferred_moe=side),
        Block(replace(LATENT, rope=None), DENSE, RMS),
    )
    check(Decoder(70, 48, blocks, RMS, 64), tmp_path)


def test_too_long_for_its_table_runs_by_layers(tmp_path: Path) -> None:
    mixer = replace(PLAIN, extras=AttentionExtras(logn_scaling=LogNScaling(0.1, 4.0)))
    model = make(Decoder(70, 48, (Block(mixer, DENSE, RMS),), RMS, 20), tmp_path, bind("cpu"))
    runner = PagedRunner(model, "cpu", 16)
    runner.prefill({0: list(range(20))})
    assert isinstance(model.program, StepProgram)
    assert model.program.accepts(runner.batch({1: [1]}))
    assert not model.program.accepts(runner.batch({0: [1]}))
