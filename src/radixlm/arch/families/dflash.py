"""DFlash (arXiv:2602.06036) and DSpark: heads that draft a block of tokens in one step."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.draft import Draft, MaskedBlock
from radixlm.arch.families import builders as b
from radixlm.arch.families.deepseek_v4 import deepseek_v4
from radixlm.arch.families.drafts import moved, v4_names
from radixlm.arch.families.sparse_attention import minimax_m3_parts
from radixlm.arch.names import AnyOf, Name
from radixlm.arch.spec import Attention, AttentionExtras, Decoder
from radixlm.base.record import replace

_MARKOV = {
    "table": "markov_w1",
    "out": "markov_w2",
    "gate": "gate_proj",
    "joint": "joint_proj",
}

_MINIMAX = "language_model.model.dspark."

_DFLASH2 = {
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "num_candidates",
}
_SELECTOR = {
    "before": "predecessor_codebook",
    "token": "successor_codebook",
    "hidden": "hidden_projection",
}


def dflash(c: Config) -> Draft:
    return _drafting(c, _layers(c), _block(c, 16))


def dflash2(c: Config) -> Draft:
    """Convolutions around the branches of layers; the token before chooses among the best ones."""
    own = {key: _own(c).get(key, c.get(key)) for key in _DFLASH2}
    if missing := [key for key, value in own.items() if not isinstance(value, int) or value < 1]:
        raise c.error("dflash_config", f"has no positive {missing[0]!r}")
    if c.hidden_size % own["conv_group_size"]:
        raise c.error("conv_group_size", f"must divide 'hidden_size' = {c.hidden_size}")
    sizes = {_DFLASH2[key]: value for key, value in own.items()}
    embed_scale = float(_own(c).get("input_embedding_scale", 1.0))
    block = replace(_block(c, 16), **sizes, embed_scale=embed_scale)
    decoder = replace(
        _layers(c),
        logit_scale=float(_own(c).get("output_multiplier", 1.0)),
        logit_softcap=float(_own(c).get("final_logit_softcapping") or 0.0),
    )
    return _drafting(c, decoder, block)


def dspark(c: Config) -> Draft:
    """The last known token drafts the first one; the token before adds to the logits of each."""
    return _drafting(c, _layers(c), _markov_block(c))


def lfm2_dspark(c: Config) -> Draft:
    """The heads of LFM 2.5 rotate neighboring channels. Convolution layers are refused."""
    kinds = {*(c.get("layer_types") or ())} - {"full_attention", "sliding_attention"}
    if kinds:
        raise c.error("layer_types", f"names {sorted(kinds)}, which these heads do not support")
    return dspark(c.replace(rope_is_neox_style=c.get("rope_is_neox_style", False)))


def _markov_block(c: Config) -> MaskedBlock:
    own = _own(c)
    rank = own.get("markov_rank") or c.get("markov_rank", 0)
    kind = str(own.get("markov_head_type") or c.get("markov_head_type", "vanilla")).lower()
    if rank < 1:
        raise c.error("markov_rank", f"= {rank} must be positive")
    if kind not in ("vanilla", "gated", "rnn"):
        raise c.error("markov_head_type", f"= {kind!r} must be 'vanilla', 'gated' or 'rnn'")
    return replace(_block(c, 7, tells_next=True), markov=kind, markov_rank=rank)


def deepseek_v4_dspark(c: Config) -> Draft:
    """Window layers on several residual streams, all of which read the means of the target's. They
    are in the model's checkpoint, and so is what describes them."""
    c = _with_keys(c)
    taps = _tapped(c)
    count = len(taps)
    kinds = {"layer_types": ["sliding_attention"] * count, "mlp_layer_types": ["moe"] * count}
    decoder = deepseek_v4(c.replace(num_hidden_layers=count, **kinds))
    names = v4_names(decoder, "mtp.{i}.", last=f"mtp.{count - 1}.")
    names |= {"draft.taps": "mtp.0.main_proj", "draft.hidden_norm": "mtp.0.main_norm"}
    for role, name in _MARKOV.items():
        stored = (f"mtp.{i}.markov_head.{name}" for i in reversed(range(count)))
        names[f"draft.markov.{role}"] = AnyOf(*stored, f"markov_head.{name}")
    module = replace(decoder, names=names, tied=False)
    return Draft(module, is_projected=False, hidden_norm=b.rms(c), taps=count, tap_layers=taps,
                 block=_markov_block(c))  # fmt: skip


def minimax_dspark(c: Config) -> Draft:
    """The dense layers of MiniMax M3. In windows too the tokens of a block see each other."""
    c.refuse("use_gemma_norm", True)
    c.refuse("dspark_hybrid_context_fusion", False)
    inner = c.get("dense_intermediate_size") or c.get("dspark_ffn_hidden_size")
    sees_both = c.get("sliding_window_non_causal", True)
    share = {"partial_rotary_factor": c.get("rotary_dim", b.head_dim(c)) / b.head_dim(c)}
    c = _with_keys(c).replace(
        rope_parameters=share | c.rope_parameters,
        dense_intermediate_size=inner,
        swiglu_limit=c.get("swiglu_limit", 7.0),
        sliding_window_non_causal=sees_both,
    )
    if any(c.get("moe_layer_freq", ())) or c.get("sparse_attention_config"):
        raise c.error("moe_layer_freq", "or 'sparse_attention_config' is not supported in a head")
    mixer, ffn, norm = minimax_m3_parts(c)
    decoder, at = b.build_decoder(c, lambda i: _seen(c, i, mixer), ffn, norm), _MINIMAX
    own: dict[str, Name] = {"norm": at + "final_norm", "draft_taps": at + "fc"}
    own["draft_hidden_norm"] = at + "hidden_norm"
    names = moved(decoder, at + "layers.{i}.decoder_layer.", **own)
    names |= {f"draft.markov.{role}": f"{at}markov_head.{name}" for role, name in _MARKOV.items()}
    taps = _tapped(c)
    module = replace(decoder, names=names, tied=False)
    return Draft(module, is_projected=False, hidden_norm=norm, taps=len(taps), tap_layers=taps,
                 block=_markov_block(c))  # fmt: skip


def _with_keys(c: Config) -> Config:
    """What keys of the whole config say where the layers' own object does not."""
    own = {key: c.get("dspark_" + key) for key in ("markov_rank", "markov_head_type", "block_size")}
    own |= {"mask_token_id": c.get("dspark_noise_token_id")}
    own |= {"target_layer_ids": c.get("dspark_target_layer_ids")}
    given = {key: value for key, value in own.items() if value is not None}
    return c.replace(dspark_config=_own(c) | given)


def laguna_dflash(c: Config) -> Draft:
    """Layers with a gate, whose entries pass the layer's first norm."""
    gating = c.get("gating", True)
    extras = AttentionExtras(
        gate="head" if gating in (True, "per-head") else "channel", gate_act="softplus"
    )
    decoder = _layers(c, None if gating in (False, "disabled") else extras)
    block = replace(_block(c, 16), norms_entries=True)
    return _drafting(c, decoder, block, tap_norm=b.rms(c))


def _layers(c: Config, extras: AttentionExtras | None = None) -> Decoder:
    """Qwen 3's, with windows where ``layer_types`` has them."""
    bias = c.get("attention_bias", False)
    is_interleaved = not c.get("rope_is_neox_style", c.get("is_neox_style", True))
    mixer = b.attention(
        c,
        rope=b.rope(c, b.head_dim(c), interleaved=is_interleaved),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=b.rms(c),
        extras=extras,
    )
    return b.build_decoder(c, lambda i: _seen(c, i, mixer), b.mlp(c))


def _seen(c: Config, layer: int, mixer: Attention) -> Attention:
    """The attention of a layer: tokens of a block see those before them alone in layers with a
    window, unless ``is_causal`` says whether they do in all layers."""
    span = b.window(c, layer) if c.get("layer_types") else 0
    is_causal = c.get("is_causal", _own(c).get("causal"))
    if is_causal is None:
        is_causal = span and not c.get("sliding_window_non_causal")
    if not span and not is_causal:
        return mixer
    extras = replace(mixer.extras or AttentionExtras(), is_causal=True)
    return replace(mixer, window=span, extras=extras if is_causal else mixer.extras)


def _block(c: Config, size: int, tells_next: bool = False) -> MaskedBlock:
    """``size`` and ``tells_next``: where the config does not say."""
    own = _own(c)
    mask = own.get("mask_token_id", c.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < c.vocab_size:
        raise c.error("dflash_config", f"has no 'mask_token_id' below {c.vocab_size}")
    size = own.get("block_size") or c.get("block_size", size)
    if size < 2:
        raise c.error("block_size", f"= {size} must be at least 2")
    return MaskedBlock(size, mask, bool(c.get("sample_from_anchor", tells_next)))


def _own(c: Config) -> dict[str, Any]:
    """What the config has apart from the layers."""
    own: dict[str, Any] = c.get("dspark_config", {}) | c.get("dflash_config", {})
    return own


def _drafting(c: Config, decoder: Decoder, block: MaskedBlock, **fields: Any) -> Draft:
    taps = _tapped(c)
    plain, under = (
        moved(
            decoder,
            at + "layers.{i}.",
            norm=at + "norm",
            draft_taps=at + "fc",
            draft_hidden_norm=at + "hidden_norm",
        )
        for at in ("", "model.")
    )
    names: dict[str, Any] = {role: AnyOf(plain[role], under[role]) for role in plain}
    names["mixer.gate"] = AnyOf(*(at + "layers.{i}.self_attn.g_proj" for at in ("", "model.")))
    names |= {f"draft.tap_norms.{i}": f"aux_hidden_norms.{i}" for i in range(len(taps))}
    names |= {f"draft.markov.{role}": f"markov_head.{name}" for role, name in _MARKOV.items()}
    selector = {role: f"candidate_selector.{name}" for role, name in _SELECTOR.items()}
    names |= {f"draft.selector.{role}": name for role, name in selector.items()}
    for number, branch in (("1", "attention"), ("2", "mlp")):
        at = f"layers.{{i}}.{branch}_conv."
        names |= {f"conv{number}.base": at + "base_kernel"}
        names |= {f"conv{number}.factors": at + "kernel_projection"}
    names |= {"head": "lm_head", "draft.vocab": "d2t"}
    vocab = c.get("draft_vocab_size") or c.vocab_size
    is_cut = vocab != c.vocab_size
    module = replace(decoder, names=names, vocab=vocab, tied=False)
    return Draft(
        module,
        is_projected=False,
        hidden_norm=b.rms(c),
        target_vocab=c.vocab_size if is_cut else 0,
        taps=len(taps),
        tap_layers=taps,
        owns_head=is_cut,
        has_vocab_map=is_cut,
        block=block,
        **fields,
    )


def _tapped(c: Config) -> tuple[int, ...]:
    """The target layers whose outputs are read: the listed ones, else as many as the draft has
    layers, from the second to the third from the last."""
    own = _own(c)
    listed = own.get("target_layer_ids") or c.get("target_layer_ids")
    if led_to := c.get("aux_hidden_state_layer_ids"):  # of ``speculators``: to these they lead
        listed = [layer - 1 for layer in led_to]
    if listed:
        return tuple(int(layer) for layer in listed)
    total = own.get("num_target_layers") or c.get("num_target_layers", 0)
    count = c.num_hidden_layers
    if total < (4 if count > 1 else 1):
        raise c.error("dflash_config", "has neither 'target_layer_ids' nor 'num_target_layers'")
    if count == 1:
        return (total // 2,)
    return tuple(round(1 + i * (total - 4) / (count - 1)) for i in range(count))
