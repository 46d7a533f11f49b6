"""ERNIE 4.5: dense, with experts, and with vision experts; interleaved rotation."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.media.config_json import BOUNDARY_TOKEN_KEYS
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import SelectRow, flat, transposed
from radixlm.arch.spec import Attention, Decoder, Mlp
from radixlm.base.record import replace


def _attention(c: Config) -> Attention:
    position = b.rope(c, b.head_dim(c), interleaved=True)
    return b.attention(c, rope=position, qkv_bias=c.use_bias, o_bias=c.use_bias)


def ernie(c: Config) -> Decoder:
    return b.build_decoder(c, _attention(c), b.mlp(c, bias=c.use_bias))


def ernie_moe(c: Config) -> Decoder:
    shared = c.moe_intermediate_size * c.moe_num_shared_experts
    sparse = b.moe(
        c,
        correction=True,
        renorm=True,
        shared=Mlp(shared, b.activation(c), bias=c.use_bias) if shared else None,
    )
    if c.moe_norm_min > 1e-4:  # below the sum of any chosen experts' shares
        raise c.error("moe_norm_min", f"= {c.moe_norm_min} is not supported (at most 1e-4)")
    end = c.moe_layer_end_index if c.moe_layer_end_index != -1 else c.num_hidden_layers - 1

    def ffn(i: int) -> b.Ffn:
        inside = c.moe_layer_start_index <= i <= end
        is_sparse = inside and (i + 1) % c.moe_layer_interval == 0
        return sparse if is_sparse else b.mlp(c, bias=c.use_bias)

    at = ("mlp.", "mlp.gate.")
    correction = AnyOf(
        *(Named((f"{LAYER}{one}moe_statics.e_score_correction_bias",), flat) for one in at)
    )
    names = {"moe.correction": correction}
    return b.build_decoder(c, _attention(c), ffn, head_bias=c.use_bias, names=names)


def paddleocr_config(raw: dict[str, Any]) -> dict[str, Any]:
    """One key for the biases of all projections."""
    bias = raw.get("use_bias", False)
    return {"attention_bias": bias, "mlp_bias": bias, **raw}


# defaults for ``BOUNDARY_TOKEN_KEYS``, and for mrope_section: rows, columns, time
_BOUNDARY_TOKENS = (100295, 101304, 101305, 103367, 101306, 101307)
_SECTIONS = (22, 22, 20)


def ernie_vl_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``moe_intermediate_size`` lists the widths of text and vision experts."""
    inner = raw.get("moe_intermediate_size") or [1536, 512]
    if not isinstance(inner, list) or len(inner) != 2:
        return raw  # refused by name where it is read
    return {**raw, "moe_intermediate_size": inner[0], "vision_intermediate_size": inner[1]}


def ernie_vl(c: Config) -> Decoder:
    """Text and images have their own router and experts, and share the shared experts."""
    position = _attention(c).rope
    assert position is not None
    rows, columns, times = c.rope_parameters.get("mrope_section") or _SECTIONS
    if rows != columns or not times or rows + columns + times != position.dim // 2:
        raise c.error("rope_parameters", "mrope_section must be as many rows as columns, and times")
    position = replace(position, mrope_sections=(times, rows, columns), mrope_paired=True)
    if position.scaling is not None:
        raise c.error("rope_parameters", "rope_type must be 'default'")
    bias, act = bool(c.use_bias), b.activation(c)
    shared = c.moe_intermediate_size * c.moe_num_shared_experts
    vision = b.moe(c, inner=c.vision_intermediate_size, correction=True, renorm=True)
    sparse = b.moe(
        c,
        correction=True,
        renorm=True,
        shared=Mlp(shared, act, bias=bias) if shared else None,
        vision=vision,
        marks=tuple(
            c.get(key, default)
            for key, default in zip(BOUNDARY_TOKEN_KEYS, _BOUNDARY_TOKENS, strict=True)
        ),
    )
    kinds = c.get("mlp_layer_types") or ["dense"] + ["sparse"] * (c.num_hidden_layers - 1)
    if len(kinds) != c.num_hidden_layers or not set(kinds) <= {"dense", "sparse"}:
        raise c.error("mlp_layer_types", "must say dense or sparse for each layer")
    mixer = b.attention(c, rope=position, qkv_bias=bias, o_bias=bias)
    return b.build_decoder(
        c,
        mixer,
        lambda i: sparse if kinds[i] == "sparse" else b.mlp(c, bias=bias),
        names=_VL_NAMES,
    )


_STATICS, _EXPERTS = LAYER + "mlp.moe_statics.e_score_correction_bias", LAYER + "mlp.experts."
_VL_NAMES: Names = {
    "moe.router": Named((LAYER + "mlp.gate.weight",), transposed),
    "moe.vision.router": Named((LAYER + "mlp.gate.weight_1",), transposed),
    "moe.correction": Named((_STATICS,), SelectRow(0)),
    "moe.vision.correction": Named((_STATICS,), SelectRow(1)),
    "moe.vision.up": tuple(_EXPERTS + "{past}." + one for one in ("gate_proj", "up_proj")),
    "moe.vision.down": _EXPERTS + "{past}.down_proj",
}
