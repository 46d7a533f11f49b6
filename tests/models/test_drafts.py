"""Draft models compute what plain torch code and one-layer models of their family compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.arch.test_draft import CASES
from tests.fakes.paged_runner import CPU, PagedRunner, load_model
from tests.fakes.shapes import LATENT
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.models.reference_math import attention, checkpoint, rms, rotated
from tests.models.test_decoder import relative_error
from torch import Tensor
from torch.nn import functional as F

from radixlm.arch.hf import describe, describe_draft
from radixlm.arch.registry import MTP_LAYERS
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.layers.context import LayerContext
from radixlm.models.build import build_model
from radixlm.models.decoder import DecoderModel
from radixlm.models.drafts import DraftModel
from radixlm.models.program.step import why_no_program
from radixlm.models.taps import HiddenNeeds
from radixlm.step.batch import InputEmbeds
from radixlm.weights.load import load_weights

BACKENDS = ["torch_native", pytest.param("cpu", marks=pytest.mark.skipif(
    not cpu.available, reason="no C++ kernels"))]  # fmt: skip
HEADS, KV_HEADS, WIDTH, DIM, INNER, VOCAB, SMALL = 4, 2, 16, 64, 96, 384, 40
COUNT = 21
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "draft_vocab_size": SMALL,
    "rms_norm_eps": 1e-5,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 2]},
}
EAGLE3_SHAPES = {
    "fc.weight": (DIM, 3 * DIM),
    "norm.weight": (DIM,),
    "lm_head.weight": (SMALL, DIM),
    "midlayer.input_layernorm.weight": (DIM,),
    "midlayer.hidden_norm.weight": (DIM,),
    "midlayer.post_attention_layernorm.weight": (DIM,),
    "midlayer.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * DIM),
    "midlayer.self_attn.k_proj.weight": (KV_HEADS * WIDTH, 2 * DIM),
    "midlayer.self_attn.v_proj.weight": (KV_HEADS * WIDTH, 2 * DIM),
    "midlayer.self_attn.o_proj.weight": (DIM, HEADS * WIDTH),
    "midlayer.mlp.gate_proj.weight": (INNER, DIM),
    "midlayer.mlp.up_proj.weight": (INNER, DIM),
    "midlayer.mlp.down_proj.weight": (DIM, INNER),
}


def kernels_of(backend: str) -> Kernels:
    return bind("cpu", {} if backend == "cpu" else {"all": "reference"})


def loaded(folder: Path, target: Any, backend: str) -> DraftModel:
    """The draft of a folder, bound to its target."""
    spec = describe_draft(folder)
    assert spec is not None
    model = DraftModel(spec, LayerContext(kernels_of(backend), CPU, torch.float32), None)
    load_weights(model, folder, progress=False, leaves=lambda name: True)
    model.bind(target)
    return model


def run(model: DraftModel, backend: str, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, what the next step reads) of all tokens, computed in two chunks."""
    runner = PagedRunner(model, backend, 16, 32)
    logits, passed = [], []
    for part in (slice(0, 8), slice(8, len(ids))):
        with torch.inference_mode():
            made = model.draft_step(runner.batch({0: ids[part]}), hidden[part])
        assert made.hidden_RD is not None
        logits.append(made.logits_RV)
        passed.append(made.hidden_RD)
    if backend == "cpu" and model.program is None:
        why = why_no_program(model) or ""
        assert "streams" in why or "BlockIndexer" in why
    batch = PagedRunner(model, backend, 16, 32).batch({0: ids})
    batch.logits_rows_R = torch.tensor([4, len(ids) - 1])
    with torch.inference_mode():
        every = model.draft_step(batch, hidden, passes_all=True)
    assert relative_error(every.hidden_RD, torch.cat(passed)) < 1e-4
    assert relative_error(every.logits_RV, torch.cat(logits)[[4, -1]]) < 1e-4
    return torch.cat(logits), torch.cat(passed)


def ids_and_hidden(width: int = DIM) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 380, (COUNT,), generator=generator).tolist()
    return ids, torch.randn(COUNT, width, generator=generator)


def plain_heads(w: dict[str, Tensor], x: Tensor, blanks: int = 0) -> Tensor:
    """``blanks``: places before the first token, whose keys and values are zeros."""
    q, k, v = (
        (x @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, WIDTH)) for n in ("q", "k", "v")
    )
    q, k, v = (F.pad(part, (0, 0, 0, 0, blanks, 0)) for part in (rotated(q), rotated(k), v))
    return attention(q, k, v, WIDTH**-0.5)[blanks:]


def latent_heads(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Latent attention, whose rotated channels are stored in pairs."""
    w = {name.removeprefix("self_attn."): tensor for name, tensor in w.items()}
    nope, rope, rank = (
        LATENT[f"{n}"] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    low = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6)
    q = (low @ w["q_b_proj.weight"].T).unflatten(-1, (HEADS, -1))
    latent, k_rope = (x @ w["kv_a_proj_with_mqa.weight"].T).split((rank, rope), -1)
    both = rms(latent, w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T
    k_nope, v = both.unflatten(-1, (HEADS, -1)).split((nope, LATENT["v_head_dim"]), -1)

    def turned(part: Tensor) -> Tensor:
        return rotated(torch.cat((part[..., ::2], part[..., 1::2]), -1))

    q = torch.cat((q[..., :nope], turned(q[..., nope:])), -1)
    k = torch.cat((k_nope, turned(k_rope[:, None]).expand(-1, HEADS, -1)), -1)
    return attention(q, k, v, (nope + rope) ** -0.5)


def eagle3_reference(
    w: dict[str, Tensor], embeds: Tensor, taps: Tensor, normed_residual: bool, blanks: int = 0
) -> tuple[Tensor, Tensor]:
    """(logits, hidden state before the last norm) of all places; ``blanks`` as of plain_heads."""
    w = {name.removeprefix("midlayer."): t for name, t in w.items()}
    h = taps @ w["fc.weight"].T
    normed = rms(h, w["hidden_norm.weight"])
    x = torch.cat((rms(embeds, w["input_layernorm.weight"]), normed), -1)
    is_latent = "self_attn.kv_b_proj.weight" in w
    heads = latent_heads(w, x) if is_latent else plain_heads(w, x, blanks)
    x = (normed if normed_residual else h) + heads @ w["self_attn.o_proj.weight"].T
    y = rms(x, w["post_attention_layernorm.weight"])
    inner = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    x = x + inner @ w["mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"]) @ w["lm_head.weight"].T, x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_an_eagle3_head(prefix: str, normed: bool, backend: str, tmp_path: Path) -> None:
    target = load_model(cached_tiny("LlamaForCausalLM"), kernels_of(backend))
    w = checkpoint(tmp_path, {**EAGLE3, "norm_before_residual": normed}, EAGLE3_SHAPES)
    targets = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:SMALL]
    stored = {name.replace("midlayer.", prefix): tensor for name, tensor in w.items()}
    stored["d2t"], stored["t2d"] = targets - torch.arange(SMALL), torch.ones(VOCAB).bool()
    save_file(stored, tmp_path / "model.safetensors")
    model = loaded(tmp_path, target, backend)
    assert model.needs == HiddenNeeds((-1, 0, 2), False)
    assert model.target_ids_V is not None and torch.equal(model.target_ids_V, targets)
    ids, taps = ids_and_hidden(3 * DIM)
    logits, passed = run(model, backend, ids, model.combine(taps))
    expected = eagle3_reference(w, target.embed.run(torch.tensor(ids)), taps, normed)
    assert relative_error(logits, expected[0]) < 1e-4
    assert relative_error(passed, expected[1]) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_eagle3_head_of_latent_attention(backend: str, tmp_path: Path) -> None:
    """Of Kimi K2.5."""
    target = load_model(cached_tiny("LlamaForCausalLM"), kernels_of(backend))
    config = {**EAGLE3, **LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    config |= {"model_type": "kimi_k2", "draft_vocab_size": VOCAB}
    at, rope, rank = "midlayer.self_attn.", LATENT["qk_rope_head_dim"], LATENT["kv_lora_rank"]
    query, value = LATENT["qk_nope_head_dim"] + rope, LATENT["v_head_dim"]
    shapes = {name: shape for name, shape in EAGLE3_SHAPES.items() if not name.startswith(at)}
    shapes |= {
        "lm_head.weight": (VOCAB, DIM),
        f"{at}q_a_proj.weight": (LATENT["q_lora_rank"], 2 * DIM),
        f"{at}q_a_layernorm.weight": (LATENT["q_lora_rank"],),
        f"{at}q_b_proj.weight": (HEADS * query, LATENT["q_lora_rank"]),
        f"{at}kv_a_proj_with_mqa.weight": (rank + rope, 2 * DIM),
        f"{at}kv_a_layernorm.weight": (rank,),
        f"{at}kv_b_proj.weight": (HEADS * (query - rope + value), rank),
        f"{at}o_proj.weight": (DIM, HEADS * value),
    }
    w = checkpoint(tmp_path, config, shapes)
    model = loaded(tmp_path, target, backend)
    ids, taps = ids_and_hidden(3 * DIM)
    logits, passed = run(model, backend, ids, model.combine(taps))
    expected = eagle3_reference(w, target.embed.run(torch.tensor(ids)), taps, False)
    assert relative_error(logits, expected[0]) < 1e-4
    assert relative_error(passed, expected[1]) < 1e-4


def test_norms_before_the_projection(tmp_path: Path) -> None:
    """Of all hidden states together, then of each."""
    target = load_model(cached_tiny("LlamaForCausalLM"), kernels_of("torch_native"))
    shapes = {**EAGLE3_SHAPES, "input_norm.weight": (3 * DIM,)}
    shapes |= {f"fc_norm.{i}.weight": (DIM,) for i in range(3)}
    config = {**EAGLE3, "norm_before_fc": True, "fc_norm": True}
    w = checkpoint(tmp_path, config, shapes)
    stored = load_file(tmp_path / "model.safetensors") | {"d2t": torch.zeros(SMALL).long()}
    save_file(stored, tmp_path / "model.safetensors")
    model = loaded(tmp_path, target, "torch_native")
    _, taps = ids_and_hidden(3 * DIM)
    each = rms(taps, w["input_norm.weight"]).chunk(3, -1)
    normed = torch.cat([rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(each)], -1)
    assert relative_error(model.combine(taps), normed @ w["fc.weight"].T) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_eagle_head(is_cut: bool, backend: str, tmp_path: Path) -> None:
    """The block of EAGLE-1 with the target's head, or with some of its rows."""
    target = load_model(cached_tiny("LlamaForCausalLM"), kernels_of(backend))
    shapes = {
        name.replace("midlayer", "layers.0"): shape[:1] + tuple(s // 2 for s in shape[1:])
        if "self_attn" in name and "o_proj" not in name
        else shape
        for name, shape in EAGLE3_SHAPES.items()
        if name.startswith("midlayer") and "input_layernorm" not in name and "hidden" not in name
    }
    shapes |= {"fc.weight": (DIM, 2 * DIM), "fc.bias": (DIM,)}
    config = {**EAGLE3, "architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None}
    w = checkpoint(tmp_path, config, shapes)
    model = loaded(tmp_path, target, backend)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:50]
    if is_cut:
        model.bind(target, kept)
    assert model.needs == HiddenNeeds((), True)
    ids, hidden = ids_and_hidden()
    logits, passed = run(model, backend, ids, model.combine(hidden))
    w = {name.removeprefix("layers.0."): t for name, t in w.items()}
    joined = torch.cat((target.embed.run(torch.tensor(ids)), hidden), -1)
    x = joined @ w["fc.weight"].T + w["fc.bias"]
    q, k, v = (
        (x @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, WIDTH)) for n in ("q", "k", "v")
    )
    heads = attention(rotated(q), rotated(k), v, WIDTH**-0.5)
    x = x + heads @ w["self_attn.o_proj.weight"].T
    y = rms(x, w["post_attention_layernorm.weight"])
    inner = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    x = x + inner @ w["mlp.down_proj.weight"].T
    assert relative_error(passed, x) < 1e-4
    expected = target.logits(x)
    assert relative_error(logits, expected[:, kept] if is_cut else expected) < 1e-4
    assert model.target_ids_V is (kept if is_cut else None)


# architecture -> the block that is copied, where its names go, projection, norms, last norm
MTP: dict[str, tuple[int, str, str, tuple[str, str], str]] = {
    "DeepseekV3ForCausalLM": (
        2, "model.layers.3.", "model.layers.3.eh_proj",
        ("model.layers.3.enorm", "model.layers.3.hnorm"), "model.layers.3.shared_head.norm",
    ),
    "Glm4MoeForCausalLM": (
        2, "model.layers.3.", "model.layers.3.eh_proj",
        ("model.layers.3.enorm", "model.layers.3.hnorm"), "model.layers.3.shared_head.norm",
    ),
    "Ernie4_5_MoeForCausalLM": (
        0, "model.mtp_block.0.", "model.mtp_linear_proj.0",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", MTP)
def test_multi_token_prediction(architecture: str, backend: str, tmp_path: Path) -> None:
    """The block alone, as the only layer of a model whose embeddings are the projection's."""
    layer, at, join, norms, last = MTP[architecture]
    folder = copy_tiny(cached_tiny(architecture), tmp_path / "model")
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    old = f"model.layers.{layer}."
    block = {n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)}
    own = {
        f"{join}.weight": torch.randn(DIM, 2 * DIM, generator=generator) * 0.1,
        **{f"{name}.weight": torch.rand(DIM, generator=generator) + 0.5 for name in norms},
    }
    if last:
        own[f"{last}.weight"] = torch.rand(DIM, generator=generator) + 0.5
    save_file({**tensors, **own, **{at + n: t.clone() for n, t in block.items()}}, _weights(folder))
    _configure(folder, num_nextn_predict_layers=1)
    target = load_model(folder, kernels_of(backend))
    model = loaded(folder, target, backend)
    assert model.needs == HiddenNeeds((), True)
    ids, hidden = ids_and_hidden()
    logits, passed = run(model, backend, ids, model.combine(hidden))
    embeds = target.embed.run(torch.tensor(ids)).clone()
    if not last:  # ERNIE blanks the embedding of the second token
        embeds[1] = 0
    eps = target.decoder.norm.eps
    joined = torch.cat(
        (rms(embeds, own[f"{norms[0]}.weight"], eps), rms(hidden, own[f"{norms[1]}.weight"], eps)),
        -1,
    )
    # all other layers leave the stream alone: their outputs are zero
    alone = {n: t for n, t in tensors.items() if not n.startswith("model.layers.")}
    for n, t in tensors.items():
        if n.startswith("model.layers."):
            is_out = n.endswith(("o_proj.weight", "down_proj.weight"))
            alone[n] = torch.zeros_like(t) if is_out and not n.startswith(old) else t
    if last:
        alone["model.norm.weight"] = own[f"{last}.weight"]
    save_file(alone, _weights(copy_tiny(folder, tmp_path / "alone")))
    plain = PagedRunner(load_model(tmp_path / "alone"), "torch_native", 16, 32)
    batch = plain.batch({0: ids})
    batch.embeds = InputEmbeds(joined @ own[f"{join}.weight"].T)
    with torch.inference_mode():
        plain.backend.begin(batch)
        normed = plain.model.forward(batch)
    if last:
        assert relative_error(logits, plain.model.logits(normed)) < 1e-4
        assert relative_error(passed, normed) < 1e-4
    else:  # no last norm: undone up to the length of the vectors, of which the norm knows nothing
        again = rms(passed, tensors["model.norm.weight"], eps)
        assert relative_error(again, normed) < 1e-4
        assert relative_error(logits, target.logits(passed)) < 1e-5


@pytest.mark.parametrize("architecture", sorted(set(CASES) & set(MTP_LAYERS)))
def test_every_described_family_drafts(architecture: str, tmp_path: Path) -> None:
    """Random weights: the target leaves what its prediction layer reads, in chunks as at once."""
    raw = {"architectures": [architecture], **CASES[architecture][0]}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    target = build_model(describe(tmp_path), CPU, torch.float32, kernels_of("torch_native"))
    load_weights(target, tmp_path, "dummy", progress=False)
    spec = describe_draft(tmp_path)
    assert spec is not None and isinstance(target, DecoderModel)
    model = DraftModel(spec, LayerContext(kernels_of("torch_native"), CPU, torch.float32), None)
    load_weights(model, tmp_path, "dummy", progress=False)
    model.bind(target)
    target.tap(model.needs)
    ids = [3 + 5 * n % 100 for n in range(COUNT)]
    runner = PagedRunner(target, "torch_native", 16, 32)
    batch = runner.batch({0: ids})
    with torch.inference_mode():
        runner.backend.begin(batch)
        target.step(batch, False)
        assert batch.taps_TN is not None
        hidden_TD = model.combine(batch.taps_TN)
        whole = model.draft_step(
            PagedRunner(model, "torch_native", 16, 32).batch({0: ids}), hidden_TD
        )
    logits, _ = run(model, "torch_native", ids, hidden_TD)
    assert logits.shape == (COUNT, target.decoder.vocab) and logits.isfinite().all()
    assert relative_error(logits, whole.logits_RV) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_taps_are_the_outputs_of_layers(backend: str) -> None:
    """A model cut behind a layer gives that layer's output; the last norm has no weights here."""
    folder = cached_tiny("LlamaForCausalLM")
    model, ids = load_model(folder, kernels_of(backend)), ids_and_hidden()[0]
    plain = PagedRunner(model, backend, 16, 32)
    with torch.inference_mode():
        batch = plain.batch({0: ids})
        batch.logits_rows_R = torch.tensor([4, COUNT - 1])
        plain.backend.begin(batch)
        untapped = model.step(batch, False)[1]
        for layers in ((-1, 0, 1), (0, 2), ()):
            model.tap(HiddenNeeds(layers, final=True))
            runner = PagedRunner(model, backend, 16, 32)
            batch = runner.batch({0: ids})
            batch.logits_rows_R = torch.tensor([4, COUNT - 1])
            runner.backend.begin(batch)
            logits = model.step(batch, False)[1]
            assert torch.equal(logits, untapped)
            assert batch.taps_TN is not None
            parts = batch.taps_TN.split(DIM, -1)
            assert len(parts) == len(layers) + 1
            for layer, part in zip(layers, parts, strict=False):
                assert relative_error(part, _output(model, backend, ids, layer)) < 1e-5
            model.tap(None)
            assert relative_error(model.logits(parts[-1])[[4, -1]], untapped) < 1e-6


def _output(model: Any, backend: str, ids: list[int], layer: int) -> Tensor:
    runner = PagedRunner(model, backend, 16, 32)
    batch = runner.batch({0: ids})
    runner.backend.begin(batch)
    x = model.embed.run(batch.token_ids_T)
    angles = model.ropes.angles(batch)
    for block in model.blocks[: layer + 1]:
        x = block.run(x, batch, angles)
    return x


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
