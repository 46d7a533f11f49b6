"""A GGUF header -> config.json, and GGUF tensor names -> Hugging Face's: the inverse of llama.cpp's
converters. ``KINDS`` has a row for each architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from radixlm.arch.gguf import GRIDS, GgufHeader, read_row
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16"}
# tensors that became keys of config.json
CONSUMED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
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
_STARCODER2 = {**_PRE, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


class Kind(Record):
    """An architecture of llama.cpp. ``names``: of a layer's tensors, "{}" for the expert.
    ``is_permuted``: rows of q and k are stored in pairs; ``norm_offset``: added to norm weights by
    the converter; ``more``: further keys of config.json."""

    architecture: str
    model_type: str
    names: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    more: Callable[[GgufHeader], dict[str, Any]] = lambda _: {}


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
    scaling, tokens = _rope_scaling(h), h.metadata.get("tokenizer.ggml.tokens")
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
    return {"query_pre_attn_scalar": _query_scalar(h, 62), "rope_local_base_freq": 10000.0}


def _granite(h: GgufHeader) -> dict[str, Any]:
    keys = {"attention": "attention.scale", "embedding": "embedding_scale"}
    keys["residual"] = "residual_scale"
    return {
        "logits_scaling": h.own("logit_scale", 1.0),
        **{f"{name}_multiplier": h.own(key) for name, key in keys.items()},
    }


def _partial(h: GgufHeader) -> dict[str, Any]:
    """Only some channels of a head are rotated."""
    head_dim = h.count("attention.key_length", h.count("rope.dimension_count"))
    return {"partial_rotary_factor": h.count("rope.dimension_count") / head_dim}


def _exaone4(h: GgufHeader) -> dict[str, Any]:
    slides = h.own("attention.sliding_window_pattern")
    count = h.count("block_count")
    if not isinstance(slides, list) or len(slides) != count:
        return {"layer_types": ["full_attention"] * count, "sliding_window": None}
    return {"layer_types": [f"{'sliding' if one else 'full'}_attention" for one in slides]}


def _starcoder2(h: GgufHeader) -> dict[str, Any]:
    return {"norm_epsilon": h.own("attention.layer_norm_epsilon", 1e-5), "use_bias": True}


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
    "phi3": Kind("Phi3ForCausalLM", "phi3", _PHI3),
    "smollm3": Kind("SmolLM3ForCausalLM", "smollm3", _PRE, is_permuted=True),
    "arcee": Kind("ArceeForCausalLM", "arcee", _PRE, is_permuted=True),
    "granite": Kind("GraniteForCausalLM", "granite", _PRE, is_permuted=True, more=_granite),
    "olmo2": Kind("Olmo2ForCausalLM", "olmo2", _POST),
    "exaone4": Kind("Exaone4ForCausalLM", "exaone4", _POST, more=_exaone4),
    "seed_oss": Kind("SeedOssForCausalLM", "seed_oss", _POST),
    "glm4": Kind("Glm4ForCausalLM", "glm4", _GLM4, more=_partial),
    "ernie4_5": Kind("Ernie4_5ForCausalLM", "ernie4_5", _PRE),
    "gpt-oss": Kind("GptOssForCausalLM", "gpt_oss", _GPT_OSS, more=_gpt_oss),
    "starcoder2": Kind("Starcoder2ForCausalLM", "starcoder2", _STARCODER2, more=_starcoder2),
}
_WITH_EXPERTS = {
    "llama": Kind("MixtralForCausalLM", "mixtral", _MIXTRAL, is_permuted=True, more=_mixtral)
}


def kind_of(h: GgufHeader) -> Kind:
    """CheckpointError for an architecture that is not supported from GGUF."""
    if h.architecture not in KINDS:
        raise CheckpointError(
            f"{h.path}: the GGUF architecture {h.architecture!r:.60} is not read; known: "
            f"{', '.join(KINDS)}"
        )
    kind = KINDS[h.architecture]
    return _WITH_EXPERTS.get(h.architecture, kind) if h.own("expert_count") else kind


def config_of(h: GgufHeader) -> dict[str, Any]:
    """The config.json that the header stands for; CheckpointError for missing or invalid values."""
    kind, embed = kind_of(h), h.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{h.path}: token_embd.weight is missing or no table")
    heads, width = h.count("attention.head_count"), h.count("embedding_length")
    head_dim = h.own("attention.key_length") or h.own("rope.dimension_count") or width // heads
    eos = [h.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": embed.shape[0],
        "hidden_size": width,
        "num_hidden_layers": h.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": h.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": h.count("feed_forward_length", h.own("expert_feed_forward_length")),
        "max_position_embeddings": h.count("context_length"),
        "rms_norm_eps": h.own("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": h.own("rope.freq_base", 10000.0),
        "sliding_window": h.own("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in h.tensors,
        "attention_bias": "blk.0.attn_q.bias" in h.tensors,
        "bos_token_id": h.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(one for one in eos if isinstance(one, int))) or None,
        "torch_dtype": _DTYPES.get(embed.kind, "bfloat16"),  # what blocks are widened to
        "rope_scaling": _rope_scaling(h),
        "quantization_config": {"quant_method": "gguf"} if _has_grids(h) else None,
        **kind.more(h),
    }
    return {key: value for key, value in config.items() if value is not None}


def _has_grids(h: GgufHeader) -> bool:
    return any(tensor.kind in GRIDS for tensor in h.tensors.values())


def _rope_scaling(h: GgufHeader) -> dict[str, Any] | None:
    tables = {name: read_row(h, name) for name in CONSUMED if name in h.tensors}
    length = h.count("context_length")
    if "rope_freqs.weight" in tables:  # Llama 3: what each frequency is divided by
        return _table_of(tables["rope_freqs.weight"], tables["rope_freqs.weight"], length, 1.0)
    if "rope_factors_long.weight" in tables:
        long = tables["rope_factors_long.weight"]
        short = tables.get("rope_factors_short.weight", [1.0] * len(long))
        before = h.own("rope.scaling.original_context_length", length)
        return _table_of(short, long, before, h.own("rope.scaling.attn_factor"))
    kind, factor = h.own("rope.scaling.type"), h.own("rope.scaling.factor")
    if kind not in ("linear", "yarn") or not factor:
        return None
    before = h.own("rope.scaling.original_context_length")
    original = {} if before is None else {"original_max_position_embeddings": before}
    return {"rope_type": kind, "factor": factor, **original}


def _table_of(
    short: list[float], long: list[float], before: int, attention_factor: float | None
) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": before,
    }
    factor = {} if attention_factor is None else {"attention_factor": attention_factor}
    return scaling | factor


class Piece(Record):
    """A tensor of the checkpoint within a tensor of the file. ``expert``: its slice, None = all;
    ``heads``: of a q or k whose rows are stored in pairs, else 0; ``offset``: to be subtracted."""

    source: str
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0


def pieces(h: GgufHeader) -> Iterator[tuple[str, Piece]]:
    """The checkpoint name of each tensor of the file; unknown ones keep their name."""
    kind = kind_of(h)
    heads = {"attn_q": h.count("attention.head_count")}
    heads["attn_k"] = h.count("attention.head_count_kv", heads["attn_q"])
    for source, tensor in h.tensors.items():
        stem, _, ending = source.rpartition(".")
        block = _BLOCK.fullmatch(source)
        if source in CONSUMED:
            continue
        if stem in _ENDS:
            offset = kind.norm_offset if stem == "output_norm" else 0.0
            yield f"{_ENDS[stem]}.{ending}", Piece(source, offset=offset)
            continue
        if block is None or block[2] not in kind.names:
            yield source, Piece(source)
            continue
        name = f"model.layers.{block[1]}.{kind.names[block[2]]}.{ending}"
        if "{}" in name:
            is_of_each = len(tensor.shape) == (2 if ending == "bias" else 3)
            for expert in range(tensor.shape[0] if is_of_each else 0):
                yield name.format(expert), Piece(source, expert)
            continue
        paired = heads.get(block[2], 0) if kind.is_permuted else 0
        offset = kind.norm_offset if block[2].endswith("norm") else 0.0
        yield name, Piece(source, heads=paired, offset=offset)
