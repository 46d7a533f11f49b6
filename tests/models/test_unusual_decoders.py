"""Further configs of unusual decoders, and settings that they refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.pooled_checkpoint import expected, made
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model
from tests.fakes.unusual_configs import EMBEDDING_GEMMA2, UNUSUAL_CONFIGS
from tests.models.test_decoder import relative_error
from tests.models.test_pooling import engine, prompts
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": None, "sliding_window_pattern": 2, "attention_bias": True},
        {"sliding_window": 3, "embedding_dim": 16, "hidden_activation": "silu", "head_dim": 8},
        {"global_head_dim": 16, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 9},
    ],
)
def test_an_embedding_gemma_of_another_shape(changes: dict[str, Any]) -> None:
    folder = made("EmbeddingGemma2TextModel", **{**EMBEDDING_GEMMA2, **changes})
    texts = prompts("gemma")
    with engine(folder) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
    for text, vector in zip(texts, got, strict=True):
        assert vector == pytest.approx(expected(folder, text), abs=1e-4)


REFUSED = [
    ("Step3p5ForCausalLM", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ("Step3p5ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Step3p5ForCausalLM", {"layer_types": ["conv"] * 4}, "layer_types"),
    ("MuseGlimmerForCausalLM", {"layer_types": ["conv"] * 4}, "layer_types"),
    ("Qwen4ExpForCausalLM", {"indexer_budget": 9}, "indexer_budget"),
    ("Qwen4ExpForCausalLM", {"indexer_n_heads": None}, "indexer_n_heads"),
    ("Qwen4ExpForCausalLM", {"ple_layer_ids": [2]}, "ple_layer_ids"),
    ("Qwen4ExpForCausalLM", {"ple_embed_dim": 63}, "ple_embed_dim"),
    ("Qwen4ExpForCausalLM", {"output_gate_type": "relu"}, "output_gate_type"),
    ("ZayaForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
    ("ZayaForCausalLM", {"cca_time0": 0}, "cca_time0"),
    ("InklingForCausalLM", {"shared_expert_sink": False}, "shared_expert_sink"),
    ("HrmTextForCausalLM", {"H_cycles": 0}, "H_cycles"),
    ("DogeForCausalLM", {"is_moe": True}, "is_moe"),
    ("DogeForCausalLM", {"sliding_window": 8}, "sliding_window"),
    ("xLSTMForCausalLM", {"use_bias": True}, "use_bias"),
    ("CohereCompassForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    ("ZambaForCausalLM", {"n_mamba_heads": 3}, "n_mamba_heads"),
    ("ZambaForCausalLM", {"hidden_mamba_act": "xielu"}, "hidden_mamba_act"),
    ("ZambaForCausalLM", {"layers_block_type": ["hybrid"]}, "layers_block_type"),
    ("ZambaForCausalLM", {"attn_layer_period": 0, "layers_block_type": None}, "attn_layer_period"),
    ("Zamba2ForCausalLM", {"mamba_ngroups": 3}, "n_mamba_heads"),
    ("Zamba2ForCausalLM", {"num_key_value_heads": 2}, "use_shared_attention_adapter"),
    ("Zamba2ForCausalLM", {"num_mem_blocks": 0}, "num_mem_blocks"),
    ("xLSTMForCausalLM", {"num_heads": 3}, "qk_dim_factor"),
    ("AXK2ForCausalLM", {"n_group": 2}, "n_group"),
    ("MuseSparkForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
]


@pytest.mark.parametrize(("architecture", "changes", "key"), REFUSED)
def test_unsupported_settings_are_refused_by_name(
    architecture: str, changes: dict[str, Any], key: str
) -> None:
    muse = UNUSUAL_CONFIGS["MuseGlimmerForConditionalGeneration"]["text_config"]
    whole = UNUSUAL_CONFIGS.get(architecture.replace("ForCausalLM", "ForConditionalGeneration"), {})
    own = whole.get("text_config") or UNUSUAL_CONFIGS.get(architecture, {})
    shape = {**muse, "num_hidden_layers": 3, "layer_types": None, **own}
    with pytest.raises(CheckpointError, match=key):
        describe({"architectures": [architecture], **shape, **changes})


def test_per_layer_lists_may_include_mtp_layers() -> None:
    """As in the published Step 3.5: entries for three multi-token prediction layers, one rope a
    layer."""
    kinds = ["full_attention", "sliding_attention"] * 2
    published = {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        **UNUSUAL_CONFIGS["Step3p7ForConditionalGeneration"]["text_config"],
        "num_key_value_heads": None,
        "num_attention_groups": 2,
        "num_sliding_attention_heads": None,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "num_nextn_predict_layers": 3,
        "layer_types": [*kinds, "sliding_attention", "sliding_attention", "sliding_attention"],
        "swiglu_limits": [0.0] * 3 + [7.0] * 4,
        "swiglu_limits_shared": [0.0] * 6 + [16.0],
        "rope_theta": [5e6, 1e4] * 2 + [1e4] * 3,
        "partial_rotary_factors": [0.5, 1.0] * 2 + [1.0] * 3,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
    }
    published = {key: value for key, value in published.items() if value is not None}
    full, sliding, *_, last = describe(published).blocks
    assert (full.mixer.heads, sliding.mixer.heads, full.mixer.kv_heads) == (4, 8, 2)
    assert (full.mixer.rope.dim, full.mixer.rope.theta, full.mixer.rope.scaling.kind) == (
        12,
        5e6,
        "llama3",
    )
    assert (sliding.mixer.rope.dim, sliding.mixer.rope.theta) == (24, 1e4)
    assert sliding.mixer.rope.scaling is None and sliding.mixer.window == 7
    assert (last.ffn.limit, last.ffn.shared.limit, full.ffn.limit) == (7.0, 0.0, 0.0)


INKLING = {
    "lm_head.weight": "model.llm.unembed.weight",
    "embed_tokens.embed_norm": "embed_norm",
    "embed_tokens": "embed",
    "mlp_sconv.conv1d": "mlp_sconv",
    "attn_sconv.conv1d": "attn_sconv",
    "sconv.conv1d": "sconv",
    "self_attn.q_proj": "attn.wq_du",
    "self_attn.k_proj": "attn.wk_dv",
    "self_attn.v_proj": "attn.wv_dv",
    "self_attn.r_proj": "attn.wr_du",
    "self_attn.o_proj": "attn.wo_ud",
    "self_attn.": "attn.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "gate.e_score_correction_bias": "gate.bias",
    "experts.gate_up_proj": "experts.w13_weight",
    "shared_experts.down_proj": "shared_experts.shared_w2_weight",
    "experts.down_proj": "experts.w2_weight",
    "mlp.down_proj": "mlp.w2_md",
}


def _in_turn(gate: Tensor, up: Tensor, axis: int) -> Tensor:
    """Rows gate, up, gate, up, ..."""
    return torch.stack((gate, up), axis + 1).flatten(axis, axis + 1)


def _published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint of the class in Inkling's published layout."""
    out: dict[str, Tensor] = {"model.audio.encoder.weight": torch.zeros(2, 2)}
    for name, value in tensors.items():
        if name.endswith(("up_proj.weight", "shared_experts.up_proj")):
            continue
        if name.endswith("mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            name, value = name.replace("gate_proj", "w13_dn"), _in_turn(value, up, 0)
        elif name.endswith("shared_experts.gate_proj"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            name = name.replace("gate_proj", "shared_w13_weight")
            value = _in_turn(value, up, 1)
        elif name.endswith("experts.gate_up_proj"):
            value = _in_turn(*value.chunk(2, 1), 1)
        for ours, theirs in INKLING.items():
            name = name.replace(ours, theirs)
        out[name.replace("model.", "model.llm.", "llm" not in name)] = value.contiguous()
    return out


def test_inkling_as_it_is_published(tmp_path: Path) -> None:
    """The composite config and names; its encoders are left out."""
    folder = cached_tiny("InklingForCausalLM", unpadded_vocab_size=381)
    text = json.loads((folder / "config.json").read_text())
    text |= {"sconv_kernel_size": text.pop("conv_kernel_size"), "layer_types": None}
    text |= {"local_layer_ids": [1], "dense_intermediate_size": text["intermediate_size"]}
    text["intermediate_size"] = text.pop("moe_intermediate_size")
    text["model_max_length"] = text.pop("max_position_embeddings")
    whole = {"architectures": ["InklingForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "model_type": "inkling_mm_model"}))
    save_file(_published(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
    ids = torch.randint(3, 380, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0]
    ours = PagedRunner(load_model(tmp_path)).prefill({0: ids}, num_chunks=3)[0]
    assert ours.shape == theirs.shape == (40, 381)
    assert relative_error(ours, theirs) < 1e-4


def test_an_xlstm_with_joined_projections(tmp_path: Path) -> None:
    """As weight_mode "fused" stores them, which the class itself cannot create."""
    folder = cached_tiny("xLSTMForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    joined = {
        "mlstm_layer.qkv_opreact.weight": ("q", "k", "v", "ogate_preact"),
        "mlstm_layer.ifgate_preact.weight": ("igate_preact", "fgate_preact"),
        "mlstm_layer.ifgate_preact.bias": ("igate_preact", "fgate_preact"),
        "ffn.proj_up_gate_z.weight": ("proj_up_gate", "proj_up"),
    }
    for layer in range(3):
        for name, parts in joined.items():
            at = f"backbone.blocks.{layer}.{name.partition('.')[0]}."
            end = name.rpartition(".")[2]
            whole = torch.cat([tensors.pop(f"{at}{part}.{end}") for part in parts])
            tensors[f"backbone.blocks.{layer}.{name}"] = whole
    config = json.loads((folder / "config.json").read_text()) | {"weight_mode": "fused"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    ids = list(range(5, 30))
    ours, same = (PagedRunner(load_model(at)).prefill({0: ids})[0] for at in (tmp_path, folder))
    assert torch.equal(ours, same)


MULTIPLIERS = {
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.4,
    "key_multiplier": 0.3,
    "mlp_multipliers": [0.3, 0.6],
    "ssm_in_multiplier": 1.7,
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "ssm_out_multiplier": 2.0,
}
UNUSUAL_STATES: list[tuple[str, dict[str, Any]]] = [
    ("FalconH1ForCausalLM", {"attention_bias": True, "mamba_proj_bias": True, **MULTIPLIERS}),
    ("FalconH1ForCausalLM", {"mlp_bias": True, "projectors_bias": True, **MULTIPLIERS}),
    *(
        (architecture, {"hidden_act": "gelu"})
        for architecture in ("MambaForCausalLM", "BambaForCausalLM", "Qwen3NextForCausalLM")
    ),
    ("KimiLinearForCausalLM", {"hidden_act": "relu"}),
    ("NemotronHForCausalLM", {"mamba_hidden_act": "relu"}),
    ("ErnieForCausalLM", {"use_task_id": True, "type_vocab_size": 3}),
    ("ZambaForCausalLM", {"hidden_mamba_act": "gelu_new"}),
]


@pytest.mark.parametrize(("architecture", "changes"), UNUSUAL_STATES)
def test_biases_activations_and_task_ids(architecture: str, changes: dict[str, Any]) -> None:
    folder = cached_tiny(architecture, **changes)
    ids = torch.randint(3, 380, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0]
    ours = PagedRunner(load_model(folder)).prefill({0: ids}, num_chunks=3)[0]
    assert relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("FalconH1ForCausalLM", MULTIPLIERS), ("RobertaPreLayerNormForCausalLM", {})],
)
def test_what_is_computed_of_16_bit_weights_is_not_rounded(
    architecture: str, changes: dict[str, Any]
) -> None:
    folder = cached_tiny(architecture, dtype=torch.bfloat16, **changes)
    ids = torch.randint(3, 380, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0]
    ours = PagedRunner(load_model(folder)).prefill({0: ids})[0]
    assert relative_error(ours, theirs) < 1e-5


def test_multipliers_that_a_falcon_leaves_out() -> None:
    shape = UNUSUAL_CONFIGS["DogeForCausalLM"] | {"hidden_size": 64, "num_hidden_layers": 2}
    shape |= {"mamba_d_ssm": 64, "mamba_n_heads": 4, "num_attention_heads": 8, "vocab_size": 128}
    decoder = describe({"architectures": ["FalconH1ForCausalLM"], **shape})
    assert decoder.names["ffn.down"].recipe.factor == 1.0


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "num_attention_heads": 2}])
def test_a_doge_that_drops_tokens(changes: dict[str, Any]) -> None:
    """No token occurs twice, because equal tokens would have equal scores."""
    folder = cached_tiny("DogeForCausalLM", keep_window_size=7, **changes)
    ids = torch.randperm(380, generator=torch.Generator().manual_seed(0))[:40].tolist()
    with torch.inference_mode():
        theirs = reference_model(folder)(torch.tensor([ids])).logits[0]
    runner = PagedRunner(load_model(folder))
    ours = runner.prefill({0: ids[:-2]}, num_chunks=3)[0]
    ours = torch.cat((ours, *(runner.step({0: [one]})[0] for one in ids[-2:])))
    assert relative_error(ours, theirs) < 1e-4
