"""The architectures of GGUF files: llama.cpp's names of a layer's tensors, and keys of config.json
that only some models have. ``KINDS`` has a row for each."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families import gguf_experts, gguf_gpt, gguf_granite, gguf_latent, gguf_mamba
from radixlm.arch.families import gguf_hybrid as hybrid
from radixlm.arch.families.gguf_experts import MIXTRAL, QWEN_MOE, slides
from radixlm.arch.families.gguf_gemma4 import NAMES as GEMMA4
from radixlm.arch.families.gguf_gemma4 import gemma4
from radixlm.arch.families.gguf_kind import (
    ATTENTION,
    DENSE,
    PRE,
    Kind,
    Kinds,
    layer_norm,
    partial_of_heads,
)
from radixlm.arch.families.gguf_rope import rope_scaling
from radixlm.arch.gguf import GgufHeader
from radixlm.base.errors import CheckpointError

_SANDWICH = {
    **ATTENTION,
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**PRE, "ffn_up": "mlp.gate_up_proj"}
_POST = {  # norms after the branches
    **ATTENTION,
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    **_PHI3,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_PARALLEL = {**ATTENTION, **DENSE}
_PHI2 = {
    **ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_STARCODER2 = {**PRE, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


def _gemma2(h: GgufHeader) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(h, 46),
        "attn_logit_softcapping": h.own("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": h.own("final_logit_softcapping", 30.0),
    }


def _gemma3(h: GgufHeader) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(h, 62),
        "rope_local_base_freq": h.own("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": h.own("final_logit_softcapping"),
    }


def _phi3(h: GgufHeader) -> dict[str, Any]:
    return {
        **partial_of_heads(h),
        "original_max_position_embeddings": h.own("rope.scaling.original_context_length"),
    }


def _olmo3(h: GgufHeader) -> dict[str, Any]:
    """Only layers that see everything have scaled rotations."""
    plain = {"rope_type": "default", "rope_theta": h.own("rope.freq_base", 10000.0)}
    ropes = {"full_attention": plain | (rope_scaling(h) or {}), "sliding_attention": plain}
    return {**_exaone4(h), "rope_scaling": None, "rope_theta": None, "rope_parameters": ropes}


def _exaone4(h: GgufHeader) -> dict[str, Any]:
    kinds = slides(h)
    if kinds is None:
        return {"layer_types": ["full_attention"] * h.count("block_count"), "sliding_window": None}
    return {"layer_types": kinds}


def _cohere(h: GgufHeader) -> dict[str, Any]:
    """The rotation is never scaled; windows cover three of four layers."""
    has_norms = "blk.0.attn_q_norm.weight" in h.tensors
    scale = h.own("logit_scale", 0.0625)
    return {
        **layer_norm(h),
        "logit_scale": scale,
        "use_qk_norm": has_norms,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": "output.weight" not in h.tensors,
    }


def _layer_normed(h: GgufHeader) -> dict[str, Any]:
    return {**layer_norm(h), **partial_of_heads(h)}


def _orion(h: GgufHeader) -> dict[str, Any]:
    """Layer norms whose epsilon the converter stores as that of RMS norms."""
    eps = h.own("attention.layer_norm_rms_epsilon") or h.own("attention.layer_norm_epsilon")
    return {"rms_norm_eps": eps}


def _jais2(h: GgufHeader) -> dict[str, Any]:
    return {**layer_norm(h), "hidden_act": "relu2"}


def _olmo(h: GgufHeader) -> dict[str, Any]:
    return {"clip_qkv": h.own("attention.clamp_kqv")}


def _ministral3(h: GgufHeader) -> dict[str, Any]:
    """YaRN, and queries that grow beyond its original length."""
    scaling = rope_scaling(h)
    if scaling is None:
        return {}
    more = {
        "mscale": 1.0,
        "mscale_all_dim": h.own("rope.scaling.yarn_log_multiplier"),
        "llama_4_scaling_beta": h.own("attention.temperature_scale"),
    }
    stated = {key: value for key, value in more.items() if value is not None}
    theta = h.own("rope.freq_base", 10000.0)
    parameters = {**scaling, **stated, "rope_theta": theta}
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": parameters}


def _query_scalar(h: GgufHeader, layers_of_largest: int) -> int:
    """The largest Gemma scales queries by hidden_size / heads, the others by head_dim; the file
    does not say which."""
    heads, width = h.count("attention.head_count"), h.count("embedding_length")
    is_largest = h.count("block_count") == layers_of_largest
    return width // heads if is_largest else h.count("attention.key_length", width // heads)


def _llama_or_mixtral(h: GgufHeader) -> Kind:
    return MIXTRAL if h.own("expert_count") else _LLAMA


def _olmo2_or_3(h: GgufHeader) -> Kind:
    if h.own("attention.sliding_window"):
        return Kind("Olmo3ForCausalLM", "olmo3", _POST, more=_olmo3)
    return Kind("Olmo2ForCausalLM", "olmo2", _POST)


_LLAMA = Kind("LlamaForCausalLM", "llama", PRE, is_permuted=True)
KINDS: Kinds = {
    **gguf_experts.KINDS,
    **gguf_gpt.KINDS,
    **gguf_granite.KINDS,
    **gguf_latent.KINDS,
    **gguf_mamba.KINDS,
    "llama": _llama_or_mixtral,
    # these differ from Llama in the names of their checkpoints alone
    "internlm2": _LLAMA,
    "xverse": _LLAMA,
    "exaone": Kind("LlamaForCausalLM", "llama", PRE),
    "orion": Kind("OrionForCausalLM", "orion", PRE, more=_orion),
    "jais2": Kind("Jais2ForCausalLM", "jais2", PRE, more=_jais2),
    "chatglm": Kind("GlmForCausalLM", "glm", _PHI3, more=partial_of_heads),
    "qwen2": Kind("Qwen2ForCausalLM", "qwen2", PRE),
    "qwen3": Kind("Qwen3ForCausalLM", "qwen3", PRE),
    "gemma": Kind("GemmaForCausalLM", "gemma", PRE, norm_offset=1.0),
    "gemma2": Kind("Gemma2ForCausalLM", "gemma2", _SANDWICH, norm_offset=1.0, more=_gemma2),
    "gemma3": Kind("Gemma3ForCausalLM", "gemma3_text", _SANDWICH, norm_offset=1.0, more=_gemma3),
    "phi3": Kind("Phi3ForCausalLM", "phi3", _PHI3, more=_phi3),
    "smollm3": Kind("SmolLM3ForCausalLM", "smollm3", PRE, is_permuted=True),
    "arcee": Kind("ArceeForCausalLM", "arcee", PRE, is_permuted=True),
    "olmo2": _olmo2_or_3,
    "exaone4": Kind("Exaone4ForCausalLM", "exaone4", _POST, more=_exaone4),
    "seed_oss": Kind("SeedOssForCausalLM", "seed_oss", _POST),
    "glm4": Kind("Glm4ForCausalLM", "glm4", _GLM4, more=partial_of_heads),
    "ernie4_5": Kind("Ernie4_5ForCausalLM", "ernie4_5", PRE),
    "starcoder2": Kind("Starcoder2ForCausalLM", "starcoder2", _STARCODER2, more=layer_norm),
    "command-r": Kind("CohereForCausalLM", "cohere", _PARALLEL, more=_cohere),
    "cohere2": Kind("Cohere2ForCausalLM", "cohere2", _PARALLEL, more=_cohere),
    "phi2": Kind(
        "PhiForCausalLM",
        "phi",
        _PHI2,
        last_norm="model.final_layernorm",
        more=_layer_normed,
    ),
    "nemotron": Kind("NemotronForCausalLM", "nemotron", PRE, norm_offset=1.0, more=_layer_normed),
    "mistral3": Kind(
        "Ministral3ForCausalLM", "ministral3", PRE, is_permuted=True, more=_ministral3
    ),
    "olmo": Kind("OlmoForCausalLM", "olmo", PRE, is_permuted=True, more=_olmo),
    "gemma4": Kind("Gemma4ForCausalLM", "gemma4_text", {**_SANDWICH, **GEMMA4}, more=gemma4),
    "qwen3next": Kind(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**QWEN_MOE, **hybrid.DELTA},
        norm_offset=1.0,
        more=hybrid.delta_net,
        changes=hybrid.delta_changes,
    ),
    **{
        name: Kind(
            architecture,
            model_type,
            {**QWEN_MOE, **hybrid.DELTA},
            norm_offset=1.0,
            more=hybrid.delta_net,
            changes=hybrid.tiled_delta_changes,
        )
        for name, architecture, model_type in (
            ("qwen35", "Qwen3_5ForCausalLM", "qwen3_5_text"),
            ("qwen35moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        )
    },
    **{
        name: Kind(
            architecture,
            name.replace("moe", "_moe"),
            hybrid.LFM2,
            last_norm="model.embedding_norm",
            more=more,
            changes=hybrid.convolved,
        )
        for name, architecture, more in (
            ("lfm2", "Lfm2ForCausalLM", hybrid.lfm2),
            ("lfm2moe", "Lfm2MoeForCausalLM", hybrid.lfm2_moe),
        )
    },
    # the text models of these: of text alone, their rotations are plain ones
    "qwen2vl": Kind("Qwen2ForCausalLM", "qwen2", PRE),
    "qwen3vl": Kind("Qwen3ForCausalLM", "qwen3", PRE),
}


def kind_of(h: GgufHeader) -> Kind:
    """CheckpointError for an architecture that is not supported from GGUF."""
    kind = KINDS.get(h.architecture)
    if kind is None:
        raise CheckpointError(
            f"{h.path}: the GGUF architecture {h.architecture!r:.60} is not read; known: "
            f"{', '.join(sorted(KINDS))}"
        )
    if (count := h.count("block_count")) > len(h.tensors):
        raise CheckpointError(
            f"{h.path}: {h.architecture}.block_count = {count}, with {len(h.tensors)} tensors"
        )
    return kind if isinstance(kind, Kind) else kind(h)
