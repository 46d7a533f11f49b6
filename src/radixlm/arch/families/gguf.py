"""A GGUF header -> config.json, and GGUF tensor names -> Hugging Face's: the inverse of llama.cpp's
converters. ``gguf_kinds.py`` has a row for each architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from radixlm.arch.families.gguf_gemma4 import BARE
from radixlm.arch.families.gguf_hybrid import Change
from radixlm.arch.families.gguf_kinds import kind_of
from radixlm.arch.families.gguf_rope import CONSUMED, rope_scaling
from radixlm.arch.gguf import GRIDS, GgufHeader
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# key of config.json -> the part of a layer whose bias it means
_BIASED = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias"), "attn_q"),
    "attention_out_bias": "attn_output",
    "mlp_bias": "ffn_down",
}
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16"}


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
        "num_key_value_heads": _least(h, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _least(h, "feed_forward_length", h.own("expert_feed_forward_length")),
        "max_position_embeddings": h.count("context_length"),
        "rms_norm_eps": h.own("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": h.own("rope.freq_base", 10000.0),
        "sliding_window": h.own("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in h.tensors,
        **_biases(h),
        "bos_token_id": h.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(one for one in eos if isinstance(one, int))) or None,
        "torch_dtype": _DTYPES.get(embed.kind, "bfloat16"),  # what blocks are widened to
        "rope_scaling": rope_scaling(h),
        "quantization_config": {"quant_method": "gguf"} if _has_grids(h) else None,
        **kind.more(h),
    }
    return {key: value for key, value in config.items() if value is not None}


def _least(h: GgufHeader, key: str, default: int | None) -> int:
    """Of a list by layer, the least that is not 0: layers without attention have no heads, and
    families know which layers have more."""
    counts = h.own(key)
    if isinstance(counts, list) and all(isinstance(one, int) for one in counts) and any(counts):
        return int(min(one for one in counts if one))
    return h.count(key, default)


def _biases(h: GgufHeader) -> dict[str, bool]:
    """The keys by which families say which layers have biases."""
    has_own = {part: f"blk.0.{part}.bias" in h.tensors for part in _BIASED.values()}
    return {key: has_own[part] for key, part in _BIASED.items()}


def _has_grids(h: GgufHeader) -> bool:
    return any(tensor.kind in GRIDS for tensor in h.tensors.values())


class Piece(Record):
    """A tensor of the checkpoint within a tensor of the file. ``expert``: its slice, None = all;
    ``heads``: of a q or k whose rows are stored in pairs, else 0; ``offset``: to be subtracted;
    ``change``: what else is to be done to the tensor."""

    source: str
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0
    change: Change | None = None


def pieces(h: GgufHeader) -> Iterator[tuple[str, Piece]]:
    """The checkpoint name of each tensor of the file; unknown ones keep their name. Layers that
    predict further tokens are left out."""
    kind = kind_of(h)
    heads = {"attn_q": h.count("attention.head_count")}
    heads["attn_k"] = _least(h, "attention.head_count_kv", heads["attn_q"])
    ends = {**_ENDS, "output_norm": kind.last_norm, "token_embd_norm": kind.last_norm}
    num_layers = h.count("block_count") - (h.own("nextn_predict_layers") or 0)
    changes = kind.changes(h)
    for source, tensor in h.tensors.items():
        stem, _, ending = source.rpartition(".")
        block = _BLOCK.fullmatch(source)
        if source in CONSUMED or (block is not None and int(block[1]) >= num_layers):
            continue
        if stem in ends:
            is_shifted = stem == "output_norm" and ending == "weight"
            offset = kind.norm_offset if is_shifted else 0.0
            yield f"{ends[stem]}.{ending}", Piece(source, offset=offset)
            continue
        if block is None or block[2] not in kind.names:
            yield source, Piece(source)
            continue
        name = f"model.layers.{block[1]}.{kind.names[block[2]]}"
        ending = block[3] or ""
        is_bare = name.endswith(("_bias", *BARE)) or not ending
        name += "" if is_bare else f".{ending}"
        change = changes.get(source.split(".", 2)[2])
        if "{}" in name:
            is_of_each = len(tensor.shape) == (2 if ending == "bias" else 3)
            for expert in range(tensor.shape[0] if is_of_each else 0):
                yield name.format(expert), Piece(source, expert)
            continue
        paired = heads.get(block[2], 0) if kind.is_permuted else 0
        is_shifted = block[2].endswith("norm") and block[2] != "ssm_norm" and ending == "weight"
        offset = kind.norm_offset if is_shifted else 0.0
        yield name, Piece(source, heads=paired, offset=offset, change=change)
