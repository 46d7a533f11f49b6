"""Inkling 2: relative attention of clipped vectors, and branches that read averages of sums."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.conv_attention import inkling_config, spoken
from radixlm.arch.families.hybrid import stacked
from radixlm.arch.families.sparse_attention import positive
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import (
    FirstRows,
    distances_to_taps,
    interleaved_middle,
    message_queries,
)
from radixlm.base.record import replace

_LLM, _SUMS = "model.llm.", "model.llm.attn_res."
_HERE, _THERE = LAYER + "self_attn.", _LLM + "layers.{i}.attn."


def _layer(part: str, stored: str) -> AnyOf:
    """A tensor of a layer under transformers' name and under the published one."""
    return AnyOf(LAYER + part, f"{_LLM}layers.{{i}}.{stored}")


def _attention(part: str, stored: str) -> AnyOf:
    return AnyOf(_HERE + part, _THERE + stored)


def _convolution(part: str) -> Names:
    """Of keys or values. Where tokens add to the weights, those of all tokens go by distance."""
    here, there = f"{_HERE}{part}_proj.sconv.", f"{_THERE}{part}_sconv"
    by_distance = (here + "static_weight", there + ".static_w")
    return {
        f"mixer.{part}_conv.conv": AnyOf(
            here + "conv1d", there, *(Named((one,), distances_to_taps) for one in by_distance)
        ),
        f"mixer.{part}_conv.by_token": AnyOf(here + "weight_proj", there + ".weight_proj"),
    }


def _names(c: Config) -> Names:
    rows, bias = FirstRows(spoken(c)), "relative_position_bias."
    return {
        **_convolution("k"),
        **_convolution("v"),
        "embed": AnyOf("model.embed_tokens", _LLM + "embed"),
        "embed_norm": AnyOf("model.embed_tokens.embed_norm", _LLM + "embed_norm"),
        "norm": AnyOf("model.norm", _LLM + "norm"),
        "head": AnyOf(*(Named((one,), rows) for one in ("lm_head", _LLM + "unembed"))),
        "norm1": AnyOf(
            _layer("input_layernorm", "attn_norm"), _layer("q_input_layernorm", "q_input_norm")
        ),
        "norm2": _layer("post_attention_layernorm", "mlp_norm"),
        "k_norm": _layer("k_input_layernorm", "k_input_norm"),
        "v_norm": _layer("v_input_layernorm", "v_input_norm"),
        "sums1.query": AnyOf(LAYER + "attention_input.query", _SUMS + "attn_queries.{before}"),
        "sums2.query": AnyOf(LAYER + "mlp_input.query", _SUMS + "mlp_queries.{i}"),
        "sums_end.query": AnyOf("model.final_input.query", _SUMS + "output_query"),
        "mixer.q": _attention("q_proj.linear", "wq_du"),
        "mixer.k": _attention("k_proj.linear", "wk_dv"),
        "mixer.v": _attention("v_proj.linear", "wv_dv"),
        "mixer.o": _attention("o_proj.linear", "wo_ud"),
        "mixer.gate": _attention("o_proj.gate_proj", "gate_attn"),
        "mixer.sink": _attention("sink_proj", "attn_sink_proj"),
        "mixer.distance": _attention(bias + "linear", "wr_du"),
        "mixer.profiles": _attention(bias + "proj", "rel_logits_proj.proj"),
        "mixer.q_scale": _attention("q_proj.norm.scale", "q_l2_clip.scale"),
        "mixer.distance_scale": _attention(bias + "norm.scale", "rel_l2_clip.scale"),
        "mixer.out_conv.conv": _layer("post_attention_convolution.conv1d", "attn_sconv"),
        "mixer.ffn_conv.conv": _layer("post_mlp_convolution.conv1d", "mlp_sconv"),
        "moe.router": _layer("mlp.gate", "mlp.gate"),
        "moe.correction": _layer("mlp.gate.e_score_correction_bias", "mlp.gate.bias"),
        "moe.up": AnyOf(
            LAYER + "mlp.experts.gate_up_proj",
            Named((_LLM + "layers.{i}.mlp.experts.w13_weight",), interleaved_middle),
        ),
        "moe.down": _layer("mlp.experts.down_proj", "mlp.experts.w2_weight"),
    }


def _messages() -> Names:
    """Of a loop: its gates, and the queries of its layers' messages."""
    ways = {"down": "down_proj", "forget": "forget_gate_proj", "gain": "message_gate_proj"}
    gates = {
        f"gates.{number}.{way}": _layer(
            f"{part}_message_gate.{here}", f"controllers.{stored}.{way}_weight"
        )
        for number, (part, stored) in enumerate(
            (("q", "attn"), ("k", "k"), ("v", "v"), ("mlp", "mlp"))
        )
        for way, here in ways.items()
    }
    queries, at = "model.message_input.query", _LLM + "middle_cycle_cross_pass_"
    published = Named((at + "queries", at + "kv_queries"), message_queries)
    return {**gates, "messages.query": AnyOf(Named((queries,), message_queries), published)}


def inkling2_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of layer types and widths."""
    out = {"num_hidden_layers": 48, **raw}
    for new_key, old_key in (
        ("moe_intermediate_size", "intermediate_size"),
        ("route_scale", "routed_scaling_factor"),
    ):
        if out.get(new_key) is None and out.get(old_key) is not None:
            out[new_key] = out[old_key]
    return inkling_config(out)


def inkling2_loop_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The same; published configs keep the loop in an object of its own."""
    out = inkling2_config({"num_hidden_layers": 24, **raw})
    for key, stored in (
        ("loop_layer_index_start", "core_start"),
        ("loop_layer_index_end", "core_end"),
        ("loop_num_passes", "num_passes"),
        ("loop_gate_rank", "gate_rank"),
    ):
        if (value := (raw.get("loop_config") or {}).get(stored)) is not None:
            out[key] = value
    return out


def inkling2_loop(c: Config) -> spec.Decoder:
    """Some layers run several times."""
    positive(c, "loop_layer_index_start", "loop_num_passes", "loop_gate_rank")
    loop = spec.MessageLoop(
        c.loop_layer_index_start, c.loop_layer_index_end, c.loop_num_passes, c.loop_gate_rank
    )
    sums, count = c.n_layers_per_attn_res_block, c.num_hidden_layers
    if not loop.first < loop.end <= count or loop.first % sums or loop.end % sums:
        raise c.error(
            "loop_layer_index_end",
            f"= {loop.end} and 'loop_layer_index_start' = {loop.first} must be multiples of "
            f"{sums} ('n_layers_per_attn_res_block') up to {count}",
        )
    plain = inkling2(c)
    visits = range(count + (loop.passes - 1) * loop.size)
    blocks = tuple(plain.blocks[loop.stored(visit)] for visit in visits)
    names = {**plain.names, **_messages()}
    return replace(plain, blocks=blocks, message_loop=loop, names=names)


def inkling2(c: Config) -> spec.Decoder:
    c.refuse("scoring_func", "sigmoid", "softmax", "sqrtsoftplus")
    positive(c, "conv_kernel_size", "d_rel", "rel_extent", "n_layers_per_attn_res_block")
    norm = b.rms(c)
    sparse = b.moe(
        c,
        act="silu",
        score=c.scoring_func,
        correction=True,
        renorm=True,
        scale=c.route_scale,
        softcaps=(float(c.mlp_gate_softcap), float(c.mlp_up_softcap)),
    )

    def block(i: int) -> spec.Block:
        span = b.window(c, i)
        attends = b.attention(
            c,
            heads=c.swa_num_attention_heads if span else c.num_attention_heads,
            kv_heads=c.swa_num_key_value_heads if span else c.num_key_value_heads,
            head_dim=c.swa_head_dim if span else c.head_dim,
            rope=None,
            window=span,
        )
        mixer = spec.ClippedRelativeAttention(
            attends,
            dim=c.hidden_size,
            width=c.conv_kernel_size,
            rank=c.d_rel,
            extent=span or c.rel_extent,
            longest=float(c.qk_l2_clip_threshold),
            longest_rank=float(c.rel_l2_clip_threshold),
            norm=spec.Norm(c.rms_norm_eps, affine=False),
            is_dynamic=not span,
            grows_from=0 if span else c.get("log_scaling_n_floor", 0),
            growth=0.0 if span else float(c.log_scaling_alpha),
        )
        return spec.Block(mixer, sparse, norm)

    return stacked(
        c.replace(vocab_size=spoken(c)),
        [block(i) for i in range(c.num_hidden_layers)],
        norm,
        _names(c),
        tied=False,
        extra_vocab_rows=c.vocab_size - spoken(c),
        embed_norm=norm,
        embed_norm_text_only=True,
        logit_softcap=float(c.final_logit_softcapping),
        residual_sums=c.n_layers_per_attn_res_block,
    )
