"""The architectures of GGUF files: llama.cpp's names of a layer's tensors, and keys of config.json
that only some models have. ``KINDS`` has a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from radixlm.arch.families import gguf_hybrid as hybrid
from radixlm.arch.families.gguf_gemma4 import NAMES as GEMMA4
from radixlm.arch.families.gguf_gemma4 import gemma4
from radixlm.arch.families.gguf_rope import rope_scaling
from radixlm.arch.gguf import GgufHeader
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

_ATTENTION = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
}
_DENSE = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_PRE = {**_ATTENTION, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_MOE = {
    **_PRE,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}
_MIXTRAL = {
    **_PRE,
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}"
        for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_PHI3 = {**_PRE, "ffn_up": "mlp.gate_up_proj"}
_POST = {  # norms after the branches
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    **_PHI3,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GPT_OSS = {
    **_ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **{f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
}
_PARALLEL = {**_ATTENTION, **_DENSE}
_PHI2 = {
    **_ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_DEEPSEEK_MOE = {
    **_QWEN_MOE,
    **{f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GLM4_MOE = {**_DEEPSEEK_MOE, "post_attention_norm": "post_attention_layernorm"}
_ERNIE_MOE = {**_DEEPSEEK_MOE, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_MINIMAX_M2 = {**_MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_HUNYUAN = {
    **_PRE,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_GRANITE_MOE = {
    **_PRE,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"shared_mlp.{x}_proj" for x in ("gate", "up")},
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_STARCODER2 = {**_PRE, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


class Kind(Record):
    """An architecture of llama.cpp. ``names``: of a layer's tensors, "{}" for the expert.
    ``is_permuted``: rows of q and k are stored in pairs; ``norm_offset``: added to norm weights by
    the converter; ``more``: further keys of config.json; ``changes``: of tensors, by name in the
    layer, what the converter did, undone."""

    architecture: str
    model_type: str
    names: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    last_norm: str = "model.norm"
    more: Callable[[GgufHeader], dict[str, Any]] = lambda _: {}
    changes: Callable[[GgufHeader], Mapping[str, hybrid.Change]] = lambda _: {}


def _qwen_moe(h: GgufHeader) -> dict[str, Any]:
    shared = h.own("expert_shared_feed_forward_length")
    return {
        "num_experts": h.count("expert_count"),
        "num_experts_per_tok": h.count("expert_used_count"),
        "moe_intermediate_size": h.count("expert_feed_forward_length"),
        "norm_topk_prob": not h.own("expert_shared_feed_forward_length"),
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }


def _mixtral(h: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": h.count("expert_count"),
        "num_experts_per_tok": h.count("expert_used_count"),
    }


def _gpt_oss(h: GgufHeader) -> dict[str, Any]:
    """What the model has and the header has no key for: bounds of YaRN that are not rounded, and
    the end of a tool call, which ends the text too."""
    scaling, tokens = rope_scaling(h), h.metadata.get("tokenizer.ggml.tokens")
    ends = [h.metadata.get("tokenizer.ggml.eos_token_id")]
    if isinstance(tokens, list) and "<|call|>" in tokens:
        ends.append(tokens.index("<|call|>"))
    return {
        **_mixtral(h),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
        "eos_token_id": [one for one in ends if isinstance(one, int)] or None,
    }


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


def _granite(h: GgufHeader) -> dict[str, Any]:
    keys = {"attention": "attention.scale", "embedding": "embedding_scale"}
    keys["residual"] = "residual_scale"
    return {
        "logits_scaling": h.own("logit_scale", 1.0),
        **{f"{name}_multiplier": h.own(key) for name, key in keys.items()},
    }


def _granite_moe(h: GgufHeader) -> dict[str, Any]:
    shared = h.own("expert_shared_feed_forward_length", 0)
    return {**_granite(h), **_mixtral(h), "shared_intermediate_size": shared}


def _partial(h: GgufHeader) -> dict[str, Any]:
    """Only some channels of a head are rotated."""
    head_dim = h.count("attention.key_length", h.count("rope.dimension_count"))
    return {"partial_rotary_factor": h.count("rope.dimension_count") / head_dim}


def _phi3(h: GgufHeader) -> dict[str, Any]:
    """The header says how many channels are rotated, not how many there are."""
    head_dim = h.count("embedding_length") // h.count("attention.head_count")
    return {
        "head_dim": head_dim,
        "partial_rotary_factor": h.count("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": h.own("rope.scaling.original_context_length"),
    }


def _olmo3(h: GgufHeader) -> dict[str, Any]:
    """Only layers that see everything have scaled rotations."""
    plain = {"rope_type": "default", "rope_theta": h.own("rope.freq_base", 10000.0)}
    ropes = {"full_attention": plain | (rope_scaling(h) or {}), "sliding_attention": plain}
    return {**_exaone4(h), "rope_scaling": None, "rope_theta": None, "rope_parameters": ropes}


def _exaone4(h: GgufHeader) -> dict[str, Any]:
    slides = h.own("attention.sliding_window_pattern")
    count = h.count("block_count")
    if not isinstance(slides, list) or len(slides) != count:
        return {"layer_types": ["full_attention"] * count, "sliding_window": None}
    return {"layer_types": [f"{'sliding' if one else 'full'}_attention" for one in slides]}


def _starcoder2(h: GgufHeader) -> dict[str, Any]:
    return {"norm_epsilon": h.own("attention.layer_norm_epsilon", 1e-5)}


def _layer_norm(h: GgufHeader) -> dict[str, Any]:
    """Of layer norms, under the names of several families."""
    eps = h.own("attention.layer_norm_epsilon", 1e-5)
    return dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_eps"), eps)


def _cohere(h: GgufHeader) -> dict[str, Any]:
    """The rotation is never scaled; windows cover three of four layers."""
    has_norms = "blk.0.attn_q_norm.weight" in h.tensors
    scale = h.own("logit_scale", 0.0625)
    return {
        **_layer_norm(h),
        "logit_scale": scale,
        "use_qk_norm": has_norms,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": "output.weight" not in h.tensors,
    }


def _partial_of_heads(h: GgufHeader) -> dict[str, Any]:
    """Layer norms, and rotation of so many channels of each head."""
    width = h.count("embedding_length") // h.count("attention.head_count")
    head_dim = h.count("attention.key_length", width)
    share = h.count("rope.dimension_count", head_dim) / head_dim
    return {**_layer_norm(h), "head_dim": head_dim, "partial_rotary_factor": share}


def _olmo(h: GgufHeader) -> dict[str, Any]:
    return {"clip_qkv": h.own("attention.clamp_kqv")}


def _hunyuan_moe(h: GgufHeader) -> dict[str, Any]:
    return {"num_experts": h.count("expert_count"), "moe_topk": h.count("expert_used_count")}


def _olmoe(h: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": h.count("expert_count"),
        "num_experts_per_tok": h.count("expert_used_count"),
        "norm_topk_prob": bool(h.own("expert_weights_norm", False)),
    }


def _deepseek_moe(h: GgufHeader) -> dict[str, Any]:
    """Experts behind some dense layers, chosen with a correction. Prediction layers are counted as
    layers."""
    experts = h.count("expert_count")
    return {
        "num_hidden_layers": h.count("block_count") - (h.own("nextn_predict_layers") or 0),
        **dict.fromkeys(("n_routed_experts", "num_experts"), experts),
        "num_experts_per_tok": h.count("expert_used_count"),
        "moe_intermediate_size": h.count("expert_feed_forward_length"),
        "n_shared_experts": h.own("expert_shared_count", 0),
        "first_k_dense_replace": h.own("leading_dense_block_count", 0),
        "routed_scaling_factor": h.own("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(h.own("expert_weights_norm", True)),
        "n_group": h.own("expert_group_count", 1),
        "topk_group": h.own("expert_group_used_count", 1),
    }


def _glm4_moe(h: GgufHeader) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in h.tensors
    return {**_deepseek_moe(h), **_partial(h), "use_qk_norm": has_norms}


def _ernie_moe(h: GgufHeader) -> dict[str, Any]:
    return {
        "moe_num_experts": h.count("expert_count"),
        "moe_k": h.count("expert_used_count"),
        "moe_intermediate_size": h.count("expert_feed_forward_length"),
        "moe_num_shared_experts": h.own("expert_shared_count", 0),
        "moe_layer_start_index": h.own("leading_dense_block_count", 0),
        "moe_layer_end_index": h.count("block_count") - 1,
        "moe_layer_interval": h.own("interleave_moe_layer_step", 1),
    }


def _minimax_m2(h: GgufHeader) -> dict[str, Any]:
    inner = h.own("expert_feed_forward_length") or h.count("feed_forward_length")
    return {**_mixtral(h), **_partial(h), "intermediate_size": inner, "use_qk_norm": True}


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


KINDS: Mapping[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", "llama", _PRE, is_permuted=True),
    "qwen2": Kind("Qwen2ForCausalLM", "qwen2", _PRE),
    "qwen3": Kind("Qwen3ForCausalLM", "qwen3", _PRE),
    "qwen2moe": Kind("Qwen2MoeForCausalLM", "qwen2_moe", _QWEN_MOE, more=_qwen_moe),
    "qwen3moe": Kind("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN_MOE, more=_qwen_moe),
    "gemma": Kind("GemmaForCausalLM", "gemma", _PRE, norm_offset=1.0),
    "gemma2": Kind("Gemma2ForCausalLM", "gemma2", _SANDWICH, norm_offset=1.0, more=_gemma2),
    "gemma3": Kind("Gemma3ForCausalLM", "gemma3_text", _SANDWICH, norm_offset=1.0, more=_gemma3),
    "phi3": Kind("Phi3ForCausalLM", "phi3", _PHI3, more=_phi3),
    "smollm3": Kind("SmolLM3ForCausalLM", "smollm3", _PRE, is_permuted=True),
    "arcee": Kind("ArceeForCausalLM", "arcee", _PRE, is_permuted=True),
    "granite": Kind("GraniteForCausalLM", "granite", _PRE, is_permuted=True, more=_granite),
    "granitemoe": Kind(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        _GRANITE_MOE,
        is_permuted=True,
        more=_granite_moe,
    ),
    "olmo2": Kind("Olmo2ForCausalLM", "olmo2", _POST),
    "exaone4": Kind("Exaone4ForCausalLM", "exaone4", _POST, more=_exaone4),
    "seed_oss": Kind("SeedOssForCausalLM", "seed_oss", _POST),
    "glm4": Kind("Glm4ForCausalLM", "glm4", _GLM4, more=_partial),
    "ernie4_5": Kind("Ernie4_5ForCausalLM", "ernie4_5", _PRE),
    "gpt-oss": Kind("GptOssForCausalLM", "gpt_oss", _GPT_OSS, more=_gpt_oss),
    "starcoder2": Kind("Starcoder2ForCausalLM", "starcoder2", _STARCODER2, more=_starcoder2),
    "command-r": Kind("CohereForCausalLM", "cohere", _PARALLEL, more=_cohere),
    "cohere2": Kind("Cohere2ForCausalLM", "cohere2", _PARALLEL, more=_cohere),
    "phi2": Kind(
        "PhiForCausalLM",
        "phi",
        _PHI2,
        last_norm="model.final_layernorm",
        more=_partial_of_heads,
    ),
    "nemotron": Kind(
        "NemotronForCausalLM", "nemotron", _PRE, norm_offset=1.0, more=_partial_of_heads
    ),
    "mistral3": Kind(
        "Ministral3ForCausalLM", "ministral3", _PRE, is_permuted=True, more=_ministral3
    ),
    "olmo": Kind("OlmoForCausalLM", "olmo", _PRE, is_permuted=True, more=_olmo),
    "olmoe": Kind("OlmoeForCausalLM", "olmoe", _QWEN_MOE, more=_olmoe),
    "dots1": Kind("Dots1ForCausalLM", "dots1", _DEEPSEEK_MOE, more=_deepseek_moe),
    "glm4moe": Kind("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE, more=_glm4_moe),
    "ernie4_5-moe": Kind("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ERNIE_MOE, more=_ernie_moe),
    "minimax-m2": Kind("MiniMaxM2ForCausalLM", "minimax_m2", _MINIMAX_M2, more=_minimax_m2),
    "gemma4": Kind("Gemma4ForCausalLM", "gemma4_text", {**_SANDWICH, **GEMMA4}, more=gemma4),
    "hunyuan-dense": Kind("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _HUNYUAN),
    "hunyuan-moe": Kind("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _HUNYUAN, more=_hunyuan_moe),
    "qwen3next": Kind(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_QWEN_MOE, **hybrid.DELTA},
        norm_offset=1.0,
        more=hybrid.delta_net,
        changes=hybrid.delta_changes,
    ),
    **{
        name: Kind(
            architecture,
            model_type,
            {**_QWEN_MOE, **hybrid.DELTA},
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
    "qwen2vl": Kind("Qwen2ForCausalLM", "qwen2", _PRE),
    "qwen3vl": Kind("Qwen3ForCausalLM", "qwen3", _PRE),
    "qwen3vlmoe": Kind("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN_MOE, more=_qwen_moe),
}
_WITH_EXPERTS = {
    "llama": Kind("MixtralForCausalLM", "mixtral", _MIXTRAL, is_permuted=True, more=_mixtral)
}

_SLIDING = {"olmo2": Kind("Olmo3ForCausalLM", "olmo3", _POST, more=_olmo3)}


def kind_of(h: GgufHeader) -> Kind:
    """CheckpointError for an architecture that is not supported from GGUF."""
    if h.architecture not in KINDS:
        raise CheckpointError(
            f"{h.path}: the GGUF architecture {h.architecture!r:.60} is not read; known: "
            f"{', '.join(KINDS)}"
        )
    kind = KINDS[h.architecture]
    if h.own("expert_count"):
        return _WITH_EXPERTS.get(h.architecture, kind)
    return _SLIDING.get(h.architecture, kind) if h.own("attention.sliding_window") else kind
