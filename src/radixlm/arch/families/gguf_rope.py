"""Scaled rotations of GGUF files, as ``rope_scaling`` of config.json."""

from __future__ import annotations

from typing import Any

from radixlm.arch.gguf import GgufHeader, read_row

# tensors that became keys of config.json
CONSUMED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# of YaRN: key of config.json -> end of llama.cpp's
_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def rope_scaling(h: GgufHeader) -> dict[str, Any] | None:
    """Of the metadata and of tables of factors; None for plain rotations."""
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
    more = {key: h.own(f"rope.scaling.{name}") for key, name in _YARN.items()}
    stated = {key: value for key, value in more.items() if value is not None}
    return {"rope_type": kind, "factor": factor, **stated}


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
