"""Zamba (arXiv:2405.16712) and Zamba 2 (arXiv:2411.15242): Mamba layers, some of which first call
one of few shared transformer layers."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    activation,
    attention,
    rms,
    rope,
)
from radixlm.arch.families.hybrid import mamba_names, stacked
from radixlm.arch.names import LAYER, AnyOf, Name, Named, Names
from radixlm.arch.recipes import SelectRow, flat, interleaved_rows, merge_heads
from radixlm.arch.spec import Block, Decoder, Mamba1, Mamba2, Mlp, Norm, SharedLayer

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
# a layer that calls a shared one has its mixer one level deeper
_MIXER, _DEEP = LAYER + "mamba.", LAYER + "mamba_decoder.mamba."


def _asking(c: Config, kinds: list[str]) -> list[int]:
    """The layers that call a shared layer, in order."""
    if len(kinds) != c.num_hidden_layers or set(kinds) - set(_KINDS):
        raise c.error("layers_block_type", "does not name 'mamba' or 'hybrid' for each layer")
    return [layer for layer, kind in enumerate(kinds) if _KINDS[kind]]


def _either(parts: Names, deep: Names) -> dict[str, Name]:
    return {role: AnyOf(parts[role], deep[role]) for role in parts}


def _decoder(
    c: Config, state: Mamba1 | Mamba2, calls: dict[int, SharedLayer], names: dict[str, Any]
) -> Decoder:
    norm = rms(c)
    blocks = [
        Block(state, None, norm, shared_block=calls.get(i)) for i in range(c.num_hidden_layers)
    ]
    ends: Names = {
        "norm": "model.final_layernorm",
        "norm1": AnyOf(LAYER + "input_layernorm", LAYER + "mamba_decoder.input_layernorm"),
        "asked": LAYER + "linear",
    }
    return stacked(c, blocks, norm, {**ends, **names})


def _calls(
    c: Config, asking: list[int], num_banks: int, **fields: Any
) -> tuple[dict[int, SharedLayer], list[int]]:
    """The calls by layer, and for each call the layer that stores its weights. The class shares
    weights where the config ties the embeddings; else each calling layer has its own."""
    count = num_banks if c.tie_word_embeddings else len(asking)
    calls = {
        layer: SharedLayer(n % count, n // count, norm=rms(c), **fields)
        for n, layer in enumerate(asking)
    }
    return calls, [asking[n % count] for n in range(len(asking))]


def _bank_names(bank: int, layer: int, first: int, part: str) -> dict[str, Name]:
    """The shared weights, stored with the calling ``layer``, or with the ``first`` one."""
    own = f"banks.{bank}."
    return {
        own + role: AnyOf(*(name for at in (layer, first) for name in _spelt(at, part, role)))
        for role in ("norm1", "norm2", "attention.qkv", "attention.o", "up", "down")
    }


def _spelt(layer: int, part: str, role: str) -> tuple[Name, ...]:
    at = f"model.layers.{layer}.{part}."
    attn, feed = at + "self_attn.", at + "feed_forward."
    spellings: dict[str, tuple[Name, ...]] = {
        "norm1": (at + "input_layernorm",),
        "norm2": (at + "pre_ff_layernorm",),
        "attention.qkv": (tuple(f"{attn}{one}_proj" for one in "qkv"),),
        "attention.o": (attn + "o_proj",),
        "up": ((feed + "gate_proj", feed + "up_proj"), feed + "gate_up_proj"),
        "down": (feed + "down_proj",),
    }
    return spellings[role]


def _shared_head_dim(c: Config) -> int:
    whole = c.replace(attention_hidden_size=2 * c.hidden_size)
    dim = c.get("attention_head_dim")
    return int(dim or whole.divide("attention_hidden_size", "num_attention_heads"))


def zamba(c: Config) -> Decoder:
    """One shared layer; Mambas of several heads with their own projections."""
    c.refuse("attention_hidden_size", 2 * c.hidden_size)
    heads, inner = c.n_mamba_heads, c.mamba_expand * c.hidden_size
    if inner % heads:
        raise c.error("n_mamba_heads", f"= {heads} does not divide {inner} channels")
    rank = c.get("mamba_dt_rank", "auto")
    state = Mamba1(
        inner,
        c.mamba_d_state,
        -(-c.hidden_size // 16) if rank == "auto" else rank,
        c.mamba_d_conv,
        c.mamba_conv_bias,
        c.mamba_proj_bias,
        heads=heads,
        act=activation(c, "hidden_mamba_act"),
    )
    every, at = c.attn_layer_period, c.attn_layer_offset
    if not every:
        raise c.error("attn_layer_period", "must not be 0")
    first = ["mamba", "mamba", "hybrid"]
    rest = ["hybrid" if i % every == at else "mamba" for i in range(c.num_hidden_layers - 3)]
    asking = _asking(c, c.get("layers_block_type") or first + rest)
    dim = _shared_head_dim(c)
    attends = attention(c, head_dim=dim, rope=None, scale=(dim / 2) ** -0.5)
    feed = Mlp(c.intermediate_size, activation(c))
    calls, sources = _calls(c, asking, 1, attention=attends, ffn=feed)
    names = _either(_headed(_MIXER, heads), _headed(_DEEP, heads))
    for source in dict.fromkeys(sources):
        names |= _bank_names(calls[source].bank, source, asking[0], "shared_transf")
    return _decoder(c, state, calls, names)


def _headed(prefix: str, heads: int) -> Names:
    """The tensors of a Mamba that have an axis of heads."""
    names = dict(mamba_names(prefix))
    names["state.inp"] = Named((prefix + "in_proj",), interleaved_rows)
    names["state.a_log"] = Named((prefix + "A_log",), merge_heads)
    names["state.d"] = Named((prefix + "D",), flat)
    for head in range(heads):
        one, row = f"s.{head}" if heads > 1 else "", SelectRow(head)
        names["state.x_proj" + one] = Named((prefix + "x_proj_weight",), row)
        names["state.dt_proj" + one] = Named((prefix + "dt_proj_weight",), row)
        names[f"state.dt_proj{one}.bias"] = Named((prefix + "dt_proj_bias",), row)
    return names


def zamba2_config(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "max_position_embeddings": 16384} if raw.get("use_long_context") else raw


def zamba2(c: Config) -> Decoder:
    """Shared layers in turn, with low-rank adapters for each call."""
    heads, inner, bias = c.n_mamba_heads, int(c.mamba_expand * c.hidden_size), c.add_bias_linear
    if inner % heads or heads % c.mamba_ngroups:
        raise c.error("n_mamba_heads", f"= {heads} does not fit {inner} channels and their groups")
    state = Mamba2(
        heads,
        inner // heads,
        c.mamba_d_state,
        c.mamba_ngroups,
        c.mamba_d_conv,
        Norm(1e-5),
        c.mamba_ngroups,
        bias=bias,
        out_bias=bias,
        dt_limit=(c.time_step_min, float("inf")),
    )
    asking = _asking(c, c.get("layers_block_type") or _PUBLISHED)
    dim = _shared_head_dim(c.replace(attention_head_dim=None))  # whatever the config says
    position = rope(c, dim) if c.use_mem_rope else None
    attends = attention(c, head_dim=dim, rope=position, scale=(dim / 2) ** -0.5)
    adapts, banks = c.use_shared_attention_adapter, c.num_mem_blocks
    if banks < 1:
        raise c.error("num_mem_blocks", f"= {banks} must be positive")
    if adapts and attends.kv_heads != attends.heads:
        raise c.error("use_shared_attention_adapter", "needs as many key-value heads as heads")
    feed = Mlp(c.get("intermediate_size") or 4 * c.hidden_size, activation(c), bias=bias)
    ranks = {"rank": c.adapter_rank, "changes_qkv": bool(adapts)}
    calls, sources = _calls(c, asking, banks, attention=attends, ffn=feed, **ranks)
    names = _either(mamba_names(_MIXER), mamba_names(_DEEP))
    for n, (layer, source) in enumerate(zip(asking, sources, strict=True)):
        first, call = asking[n % banks], calls[layer]
        names |= _bank_names(call.bank, source, first, "shared_transformer")
        names |= _change_names(call, source, first, n)
    return _decoder(c, state, calls, names)


_PUBLISHED = (
    ["mamba"]
    + (["mamba"] * 5 + ["hybrid"]) * 7
    + ["mamba"] * 4
    + ["hybrid"]
    + ["mamba"] * 3
    + ["hybrid"]
    + ["mamba"] * 2
)


def _change_names(call: SharedLayer, layer: int, first: int, nth: int) -> dict[str, Name]:
    """The adapters of the ``nth`` calling layer; the lists of each bank have entries for all of
    them."""
    own, at = f"banks.{call.bank}.changes.{call.call}.", "self_attn.linear_{}_adapter_list"
    lists = {own + "up": "feed_forward.gate_up_proj_adapter_list"}
    lists |= {f"{own}qkv.{index}": at.format(one) for index, one in enumerate("qkv")}
    return {
        f"{role}.{part}": AnyOf(
            *(
                f"model.layers.{source}.shared_transformer.{stored}.{nth}.{index}"
                for source in (layer, first)
            )
        )
        for role, stored in lists.items()
        for index, part in enumerate("ab")
    }
