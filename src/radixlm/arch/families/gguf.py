"""A GGUF header -> config.json, and GGUF tensor names -> Hugging Face's: the inverse of llama.cpp's
converters. ``gguf_kinds.py`` has a row for each architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from radixlm.arch.families.gguf_gemma4 import BARE
from radixlm.arch.families.gguf_kind import Change, Kind, has, num_layers
from radixlm.arch.families.gguf_kinds import kind_of
from radixlm.arch.families.gguf_rope import CONSUMED, rope_scaling
from radixlm.arch.gguf import GRIDS, GgufHeader, GgufTensor
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
    try:
        return _config_of(h)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{h.path}: its metadata do not fit its tensors: {error}") from error


def _config_of(h: GgufHeader) -> dict[str, Any]:
    kind, embed = kind_of(h), h.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{h.path}: token_embd.weight is missing or no table")
    heads, width = _least(h, "attention.head_count", 1), h.count("embedding_length")
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
        "intermediate_size": _least(h, "feed_forward_length", _other_inner(h)),
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


def _other_inner(h: GgufHeader) -> int | None:
    inner = h.own("expert_feed_forward_length") or h.own("ssm.inner_size")
    return inner if isinstance(inner, int) else None


def _least(h: GgufHeader, key: str, default: int | None) -> int:
    """Of a list by layer, the least that is not 0: layers without attention have no heads, and
    families know which layers have more. 0 stands for the default."""
    counts = h.own(key)
    each: list[int] = counts if isinstance(counts, list) else [counts]
    if all(isinstance(one, int) for one in each):
        used = [one for one in each if one]
        if used and len(each) > 1:
            return min(used)
        if not used and default is not None:
            return default
    return h.count(key, default)


def _biases(h: GgufHeader) -> dict[str, bool]:
    """The keys by which families say which layers have biases."""
    return {key: has(h, f"{part}.bias") for key, part in _BIASED.items()}


def _has_grids(h: GgufHeader) -> bool:
    return any(tensor.kind in GRIDS for tensor in h.tensors.values())


class Piece(Record):
    """A tensor of the checkpoint within a tensor of the file. ``expert``: its slice, None = all;
    ``rows``: puts its rows into the order of the checkpoint; ``offset``: to be subtracted;
    ``change``: what else is to be done to the tensor; ``other``: a second tensor of the file, and
    what joins both."""

    source: str
    expert: int | None = None
    rows: Change | None = None
    offset: float = 0.0
    change: Change | None = None
    other: tuple[str, Callable[[Any, Any], Any]] | None = None


def pieces(h: GgufHeader) -> Iterator[tuple[str, Piece]]:
    """The checkpoint name of each tensor of the file; unknown ones keep their name. Layers that
    predict further tokens are left out."""
    kind = kind_of(h)
    ends = {**_ENDS, "output_norm": kind.last_norm, "token_embd_norm": kind.last_norm, **kind.ends}
    rows = {**_paired_rows(h, kind), **kind.rows(h)}
    changes, second = kind.changes(h), {other for other, _ in kind.pairs.values()}
    count = num_layers(h)
    for source, tensor in h.tensors.items():
        stem, _, ending = source.rpartition(".")
        block = _BLOCK.fullmatch(source)
        if source in CONSUMED or (block is not None and int(block[1]) >= count):
            continue
        if stem in ends:
            is_shifted = stem == "output_norm" and ending == "weight"
            offset = kind.norm_offset if is_shifted else 0.0
            yield f"{ends[stem]}.{ending}", Piece(source, offset=offset)
            continue
        part = "" if block is None else source.split(".", 2)[2]
        if block is None or block[2] not in kind.names or part in second:
            if part not in second:
                yield source, Piece(source)
            continue
        name, ending = f"{kind.prefix}{block[1]}.{kind.names[block[2]]}", block[3] or ""
        if not ending and name.endswith("norm"):
            ending = "weight"  # some converters leave it out
        is_bare = name.endswith(("_bias", *BARE)) or not ending
        name += "" if is_bare else f".{ending}"
        if "{}" in name:
            for expert in range(_num_slices(tensor, name, ending)):
                yield name.format(expert), Piece(source, expert)
            continue
        is_shifted = block[2].endswith("norm") and block[2] != "ssm_norm" and ending == "weight"
        yield (
            name,
            Piece(
                source,
                rows=rows.get(part),
                offset=kind.norm_offset if is_shifted else 0.0,
                change=changes.get(part),
                other=_other(source, part, kind),
            ),
        )


def _num_slices(tensor: GgufTensor, name: str, ending: str) -> int:
    """How many experts a tensor holds, or norms of heads."""
    dims = 2 if ending == "bias" or ".norms." in name else 3
    return tensor.shape[0] if len(tensor.shape) == dims else 0


def _other(source: str, part: str, kind: Kind) -> tuple[str, Callable[[Any, Any], Any]] | None:
    if part not in kind.pairs:
        return None
    other, join = kind.pairs[part]
    return source.removesuffix(part) + other, join


def _paired_rows(h: GgufHeader, kind: Kind) -> dict[str, Change]:
    """Of q and k whose rows are stored as neighbours (i, i + half)."""
    if not kind.is_permuted:
        return {}
    heads = _least(h, "attention.head_count", 1)
    counts = {"attn_q": heads, "attn_k": _least(h, "attention.head_count_kv", heads)}
    return {
        f"{part}.{ending}": partial(_half_rotary_rows, count)
        for part, count in counts.items()
        for ending in ("weight", "bias")
    }


def _half_rotary_rows(heads: int, value: Any) -> Any:
    """Rows of each head as rotary pairs (i, i + half), as Hugging Face orders them, from pairs of
    neighbours."""
    if value.shape[0] % (2 * heads):
        raise ValueError(f"{value.shape[0]} rows are no pairs of {heads} heads")
    rows = value.reshape(heads, -1, 2, math.prod(value.shape[1:]))
    return rows.swapaxes(1, 2).reshape(value.shape)
