"""Which decoders the C++ step program may be asked about: those that say nothing unusual."""

from __future__ import annotations

from radixlm.arch.spec import (
    Attention,
    AttentionExtras,
    Block,
    Decoder,
    DeltaNet,
    LatentAttention,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    ParallelHybrid,
    ShortConv,
)
from radixlm.base.record import Record
from radixlm.kernels.cpu.moe import SCORE_CODE
from radixlm.models.program_states import MAX_CONV

# fields that the program knows nothing of
_MLP = ("sparsity", "limit", "out_scale")
_MOE = (
    "router_softcap",
    "limit",
    "hash_vocab",
    "width",
    "deep_router",
    "out_bias",
    "sinks",
    "expert_norm",
    "vision",
)
_BLOCK = (
    *("cross", "gate_temperature", "affine_residual", "norm_ranks"),
    *("residual_channels", "shared_block"),
)
_LATENT = ("indexer", "gate_from_q")
_VARIANT = ("block_sparse", "indexer", "diff_lambda_init", "dynamic_mask_topk", "experts", "q_rank")
_DECODER = (
    "cycles",
    "gated_streams",
    "embed_affine",
    "sinusoidal_positions",
    "altup",
    "streams",
    "embed_dim",
    "head_layer",
    "skips",
)
_LAYOUTS = ("pre", "post", "sandwich", "parallel", "parallel2", "prenorm_ffn_only")


def is_plain(decoder: Decoder) -> bool:
    """Whether nothing in the record is beyond the program."""
    norms = (decoder.norm, decoder.embed_norm)
    is_usual = all(norm is None or _is_usual(norm) for norm in norms)
    return (
        is_usual
        and not (decoder.extra_vocab_rows and decoder.tied)
        and (decoder.layer_inputs is None or decoder.norm.kind == "rms")
        and _has_defaults(decoder, _DECODER)
        and all(_is_plain(block) for block in decoder.blocks)
    )


def _is_plain(block: Block) -> bool:
    norms = (block.norm, *(block.post_norms or ()))
    return (
        all(_is_usual(norm) for norm in norms)
        and block.layout in _LAYOUTS
        and _has_defaults(block, _BLOCK)
        and (block.layout == "pre" or None not in (block.mixer, block.ffn))
        and (block.deferred_moe is None or _feeds_plainly(block.deferred_moe))
        and (block.parallel_moe is None or _feeds_plainly(block.parallel_moe))
        and (block.mixer is None or _mixes_plainly(block.mixer))
        and (block.ffn is None or _feeds_plainly(block.ffn))
    )


def _feeds_plainly(ffn: object) -> bool:
    if isinstance(ffn, Mlp):
        is_usual = ffn.sub_norm is None or _is_usual(ffn.sub_norm)
        return is_usual and _has_defaults(ffn, _MLP)
    return (
        isinstance(ffn, Moe)
        and _has_defaults(ffn, _MOE)
        and ffn.score in SCORE_CODE
        and all(n is None or _is_usual(n) for n in (ffn.out_norm, ffn.router_norm))
        and (ffn.shared is None or _feeds_plainly(ffn.shared))
    )


def _mixes_plainly(mixer: object) -> bool:
    if isinstance(mixer, ParallelHybrid):
        return _mixes_plainly(mixer.attention) and _mixes_plainly(mixer.state)
    if isinstance(mixer, LatentAttention):
        norms = (mixer.norm, mixer.rope_norm)
        is_usual = all(norm is None or _is_usual(norm) for norm in norms)
        return is_usual and _has_defaults(mixer, _LATENT)
    if isinstance(mixer, Attention):
        return mixer.extras is None or _varies_plainly(mixer, mixer.extras)
    return _recurs_plainly(mixer)


def _varies_plainly(spec: Attention, extras: AttentionExtras) -> bool:
    v_norm, out_norm = extras.v_norm, extras.out_norm
    heads_are_rms = not extras.out_norm_heads or out_norm is None or out_norm.kind == "rms"
    return (
        _has_defaults(extras, _VARIANT)
        and not (spec.gate and (spec.qk_norm == "row" or extras.clip_after_norm))
        and not (spec.rope is not None and spec.rope.mrope_by_channel)
        and (v_norm is None or (_is_usual(v_norm) and v_norm.kind == "rms"))
        and (out_norm is None or (_is_usual(out_norm) and heads_are_rms))
        and (spec.qk_norm_spec is None or _is_usual(spec.qk_norm_spec))
        and (not extras.k_is_v or v_norm is not None)
    )


def _recurs_plainly(mixer: object) -> bool:
    if isinstance(mixer, Mamba1):
        is_usual = mixer.norm is None or _is_usual(mixer.norm)
        return is_usual and mixer.heads == 1 and mixer.width <= MAX_CONV
    if isinstance(mixer, DeltaNet):
        return mixer.ngrams is None and mixer.width <= MAX_CONV
    return isinstance(mixer, Mamba2 | ShortConv) and mixer.width <= MAX_CONV


def _is_usual(norm: Norm) -> bool:
    return norm.kind != "none" and not norm.scales_input


def _has_defaults(record: Record, names: tuple[str, ...]) -> bool:
    kind = type(record)
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    return all(getattr(record, name) == defaults[name] for name in names)
