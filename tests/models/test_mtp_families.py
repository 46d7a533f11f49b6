"""Prediction layers of families with a block of their own compute what the family's Hugging Face
class computes, where that block is its only layer and its input the projection's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny, copy_tiny, reference_model
from tests.models.reference_math import rms
from tests.models.test_decoder import relative_error
from tests.models.test_drafts import BACKENDS, DIM, ids_and_hidden, kernels_of, loaded, run

from radixlm.arch.draft import num_streams
from radixlm.arch.hf import describe_draft
from radixlm.engine.draft_fit import completed
from radixlm.models.taps import HiddenNeeds

STEP3P7 = "Step3p7ForConditionalGeneration"
_STEP: dict[str, Any] = ARCHITECTURES[STEP3P7]["text_config"]
_ONE_WINDOW: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
_ONE_STEP = {**_ONE_WINDOW, "moe_layers_enum": "", "swiglu_limits": None}
_ONE_STEP |= {"swiglu_limits_shared": None}
# architecture -> settings of a model with the block only; of the model that it predicts for; names
# in the block's model and in the checkpoint; the last norm there; what the norms' weights lack
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], str, float]] = {
    "MiMoV2FlashForCausalLM": (
        {**_ONE_WINDOW, "mlp_layer_types": ["dense"]},
        {},
        {
            "model.layers.0.post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm",
            "model.layers.0.": "model.mtp.layers.0.",
            "model.norm.": "model.mtp.layers.0.final_layernorm.",
        },
        "model.mtp.layers.0.",
        0.0,
    ),
    "NemotronHForCausalLM": (
        {"layers_block_type": ["full_attention", "moe"]},
        {"mtp_layers_block_type": ["full_attention", "moe"]},
        {
            "backbone.layers.": "mtp.layers.",
            "backbone.norm_f.": "mtp.layers.1.final_layernorm.",
        },
        "mtp.layers.0.",
        0.0,
    ),
    "DeepseekV4ForCausalLM": (
        {**_ONE_WINDOW, "mlp_layer_types": ["moe"]},
        {},
        {
            "model.layers.0.": "mtp.0.",
            "model.norm.": "mtp.0.norm.",
            "model.hc_head.hc_": "mtp.0.hc_head_",
        },
        "mtp.0.",
        0.0,
    ),
    "ExaoneMoeForCausalLM": (
        {**_ONE_WINDOW, "mlp_layer_types": ["dense"]},
        {"mtp_layer_types": ["sliding_attention"]},
        {"model.layers.": "mtp.layers.", "model.norm.": "mtp.norm."},
        "mtp.",
        0.0,
    ),
    "MellumForCausalLM": (
        {**_ONE_WINDOW, "mlp_layer_types": ["sparse"]},
        {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"]},
        {"model.layers.": "mtp.layers.", "model.norm.": "mtp.norm."},
        "mtp.",
        0.0,
    ),
    "HYV3ForCausalLM": (
        {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
        {},
        {
            "model.layers.0.": "model.layers.3.",
            "model.norm.": "model.layers.3.final_layernorm.",
        },
        "model.layers.3.",
        0.0,
    ),
    "BailingHybridForCausalLM": (
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
        {},
        {
            "model.layers.0.": "model.layers.3.",
            "model.norm.": "model.layers.3.final_layernorm.",
        },
        "model.layers.3.",
        0.0,
    ),
    "HYV4ForCausalLM": (
        {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        {},
        {
            "model.layers.0.": "model.mtp_layers.0.",
            "model.norm.": "model.mtp_layers.0.final_layernorm.",
        },
        "model.mtp_layers.0.",
        0.0,
    ),
    "Glm5NextForCausalLM": (
        {
            "num_hidden_layers": 1, "layer_types": ["indexed_attention"],
            "mlp_layer_types": ["sparse"], "indexer_types": ["full"],
        },
        {},
        {
            "model.layers.0.": "model.layers.5.",
            "model.norm.": "model.layers.5.shared_head.norm.",
        },
        "model.layers.5.",
        0.0,
    ),
    "Dots3NoteForCausalLM": (
        {**_ONE_WINDOW, "mlp_layer_types": ["dense"]},
        {},
        {
            "model.layers.0.": "model.layers.4.",
            "model.norm.": "model.layers.4.shared_head.norm.",
        },
        "model.layers.4.",
        0.0,
    ),
    "Qwen4ExpForCausalLM": (
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []},
        {},
        {"model.layers.0.": "mtp.layers.0.", "model.hyper_": "mtp.hyper_"},
        "mtp.",
        1.0,
    ),
    "MiniMaxM3VLForCausalLM": (
        {
            "num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"],
            "mlp_layer_types": ["sparse"],
        },
        {"num_mtp_modules": 1},
        {
            "model.layers.0.": "model.mtp.layers.0.transformer_layer.",
            "model.norm.": "model.mtp.layers.0.final_layernorm.",
        },
        "model.mtp.layers.0.",
        1.0,
    ),
    "Qwen3MoeForCausalLM": (
        {"num_hidden_layers": 1},
        {},
        {"model.layers.": "mtp.layers.", "model.norm.": "mtp.norm."},
        "mtp.",
        0.0,
    ),
    STEP3P7: (
        {"text_config": _STEP | _ONE_STEP},
        {"layer_types": [*_STEP["layer_types"], "sliding_attention"]},
        {
            "model.layers.0.": "model.layers.4.",
            "model.norm.": "model.layers.4.transformer.shared_head.norm.",
        },
        "model.layers.4.",
        1.0,
    ),
}  # fmt: skip
# the projection, and the norms of its two inputs
PRE_FC = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
JOINTS = {"ExaoneMoeForCausalLM": PRE_FC, "MellumForCausalLM": PRE_FC}
JOINTS |= {"Qwen3MoeForCausalLM": PRE_FC, "Qwen4ExpForCausalLM": PRE_FC}
# where there is a projection of each input, their names
PAIRS = {
    "DeepseekV4ForCausalLM": ("e_proj", "h_proj"),
    "Qwen4ExpForCausalLM": ("fc_embedding", "fc_hidden"),
}
OWN_TABLE = "model.mtp.embed_tokens.weight"
DEEPSEEK_JOINT = ("eh_proj", "enorm", "hnorm")


def with_block(architecture: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with one prediction layer, and the tensors that join its inputs."""
    alone, more, names, at, _ = CASES[architecture]
    copy_tiny(cached_tiny(architecture), folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    join, *norms = (f"{at}{part}.weight" for part in JOINTS.get(architecture, DEEPSEEK_JOINT))
    own = {join: torch.randn(DIM, 2 * DIM, generator=generator) * 0.1}
    if architecture in PAIRS:
        both = zip(PAIRS[architecture], own.pop(join).chunk(2, 1), strict=True)
        own = {f"{at}{name}.weight": part.clone() for name, part in both}
    own |= {name: torch.rand(DIM, generator=generator) + 0.5 for name in norms}
    if architecture == "Qwen4ExpForCausalLM":  # a norm of all streams together
        own[norms[1]] = torch.rand(2 * DIM, generator=generator) - 0.5
    if architecture == "Dots3NoteForCausalLM":
        table = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator)
        own[OWN_TABLE] = 0.1 * table
    for name, tensor in load_file(cached_tiny(architecture, **alone) / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), None)
        if old is not None:
            own[names[old] + name.removeprefix(old)] = tensor
    save_file(tensors | own, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(more, num_nextn_predict_layers=1)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", CASES)
def test_the_layer_of(architecture: str, backend: str, tmp_path: Path) -> None:
    alone, _, _, at, offset = CASES[architecture]
    folder, own = with_block(architecture, tmp_path / "model")
    target = load_model(folder, kernels_of(backend))
    model = loaded(folder, target, backend)
    if not model.spec.before_norm:
        assert model.needs == HiddenNeeds((), True)
    else:  # before the last norm
        assert model.needs == HiddenNeeds((len(target.decoder.blocks) - 1,), False)
    streams = num_streams(model.spec.decoder)
    ids, hidden = ids_and_hidden(streams * DIM)
    logits, passed = run(model, backend, ids, model.combine(hidden))
    embeds, eps = target.embed.run(torch.tensor(ids)), target.decoder.norm.eps
    if OWN_TABLE in own:
        embeds = own[OWN_TABLE][torch.tensor(ids)]
    if model.spec.blanks_first:
        embeds[1] = 0.0
    join, *norms = (f"{part}.weight" for part in JOINTS.get(architecture, DEEPSEEK_JOINT))
    own = {name.removeprefix(at): tensor for name, tensor in own.items()}
    embeds = rms(embeds, own[norms[0]] + offset, eps)
    width = len(own[norms[1]])
    hidden = rms(hidden.view(len(ids), -1, width), own[norms[1]] + offset, eps)
    hidden = hidden.view(len(ids), -1, DIM)
    if join in own:
        embed_DD, hidden_DD = own[join].chunk(2, 1)
    else:
        embed_DD, hidden_DD = (own[f"{name}.weight"] for name in PAIRS[architecture])
    joined = (embeds @ embed_DD.T)[:, None] + hidden @ hidden_DD.T  # [T, streams, DIM]
    normed, stream = reference(cached_tiny(architecture, **alone), joined)
    assert relative_error(logits, target.logits(normed)) < 1e-4
    assert relative_error(passed, normed if model.spec.passes_normed else stream) < 1e-4


def reference(folder: Path, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The Hugging Face model's hidden states after the last norm, and before it (all streams)."""
    decoder, seen = reference_model(folder).get_decoder(), list[torch.Tensor]()
    decoder = getattr(decoder, "model", decoder)  # Llama 4 gives its head too
    if type(decoder).__name__ in ("HYV4Model", "Glm5NextModel", "Glm5NextTextModel"):
        _without_streams(decoder)
    if joined.shape[1] > 1:  # it would begin with equal streams
        first = joined.flatten(1) if type(decoder).__name__.startswith("Qwen4Exp") else joined
        decoder.layers[0].register_forward_pre_hook(lambda _, args: (first[None], *args[1:]))
    decoder.layers[-1].register_forward_hook(lambda *call: seen.append(call[-1]))
    with torch.inference_mode():
        made = decoder(inputs_embeds=joined[None, :, 0])
    stream = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return made.last_hidden_state[0], stream.reshape(len(joined), -1)


def _without_streams(decoder: Any) -> None:
    """Have all streams of hyper-connections hold the same, as if there was one."""
    has_mixes = hasattr(decoder.layers[0].attn_hc, "hc_sinkhorn_iters")

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixes = (torch.eye(x.shape[-2]).expand(*x.shape[:-1], -1),) if has_mixes else ()
        return torch.ones_like(x[..., 0]), *mixes, x[..., 0, :]

    for layer in decoder.layers:
        for part in (layer.attn_hc, layer.ffn_hc):
            part.forward = forward
    decoder.hc_head.forward = lambda x: x[..., 0, :]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3NextForCausalLM"])
def test_a_head_of_speculators(architecture: str, tmp_path: Path) -> None:
    """Of the kind "mtp": a folder of its own, experts packed as in transformers."""
    is_next = architecture == "Qwen3NextForCausalLM"
    one = {"num_hidden_layers": 1} | ({"layer_types": ["full_attention"]} if is_next else {})
    alone, at = cached_tiny(architecture, **one), "mtp_layers.0."
    generator = torch.Generator().manual_seed(5)
    own = {f"{at}input_proj.weight": torch.randn(DIM, 2 * DIM, generator=generator) * 0.1}
    for name in ("token_layernorm", "hidden_layernorm"):
        own[f"{at}{name}.weight"] = torch.rand(DIM, generator=generator) + 0.5
    state = reference_model(alone).state_dict()
    own |= {
        name.replace("model.layers.0.", at).replace("model.norm.", at + "final_layernorm."): tensor
        for name, tensor in state.items()
        if name.startswith(("model.layers.", "model.norm."))
    }
    save_file({name: t.contiguous() for name, t in own.items()}, tmp_path / "model.safetensors")
    layer = json.loads((cached_tiny(architecture) / "config.json").read_text())
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]}
    config |= {"num_nextn_predict_layers": 1, "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_model(cached_tiny(architecture), kernels_of("torch_native"))
    model = loaded(tmp_path, target, "torch_native")
    assert model.needs == HiddenNeeds((), True)
    ids, hidden = ids_and_hidden()
    logits, passed = run(model, "torch_native", ids, model.combine(hidden))
    eps, offset = target.decoder.norm.eps, 1.0 if is_next else 0.0
    embeds = target.embed.run(torch.tensor(ids))
    both = (
        rms(embeds, own[at + "token_layernorm.weight"] + offset, eps),
        rms(hidden, own[at + "hidden_layernorm.weight"] + offset, eps),
    )
    joined = torch.cat(both, -1) @ own[at + "input_proj.weight"].T
    normed, _ = reference(alone, joined[:, None])
    assert relative_error(logits, target.logits(normed)) < 1e-4
    assert relative_error(passed, normed) < 1e-4


def test_modules_are_those_in_the_files() -> None:
    """MiMo V2's config does not say how many there are."""
    config = {"architectures": ["MiMoV2FlashForCausalLM"]}
    config |= json.loads((cached_tiny("MiMoV2FlashForCausalLM") / "config.json").read_text())
    spec = describe_draft(config)
    assert spec is not None and spec.modules == 3
    present = [f"model.mtp.layers.{n}.eh_proj.weight" for n in range(2)]
    assert completed(spec, Path("x"), frozenset(present)).modules == 2
    assert completed(spec, Path("x"), frozenset()).modules == 3
