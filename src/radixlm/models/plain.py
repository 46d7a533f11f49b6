"""Which decoders the C++ step program may be asked about: those that say nothing unusual."""

from __future__ import annotations

from radixlm.arch.spec import Attention, Block, Decoder, LatentAttention, Mlp, Moe, Norm
from radixlm.base.record import Record
from radixlm.layers.moe import RARE_SCORES

# fields that the program knows nothing of
_MLP = ("sub_norm", "sparsity", "limit", "out_scale")
_MOE = (
    "gated",
    "scale_input",
    "zero_experts",
    "out_norm",
    "jitter",
    "router_softcap",
    "limit",
    "router_norm",
    "expert_scale",
    "by_token",
    "width",
    "deep_router",
    "out_bias",
    "sinks",
    "expert_norm",
    "vision",
)
_BLOCK = (
    *("cross", "out_scale", "side", "beside", "weights", "post_norms", "gate_temperature"),
    *("affine_residual", "norm_ranks", "residual_channels", "asks"),
)
_LATENT = ("index", "gate", "temperature", "gates_by_q")
_DECODER = (
    "embed_norm",
    "cycles",
    "gated_streams",
    "embed_affine",
    "sinusoids",
    "altup",
    "streams",
    "unsaid",
    "layer_inputs",
    "embed_dim",
    "head_layer",
    "unspoken",
    "skips",
)


def is_plain(decoder: Decoder) -> bool:
    """Whether nothing in the record is beyond the program."""
    if decoder.norm.kind == "none":
        return False
    return _has_defaults(decoder, _DECODER) and all(_is_plain(b) for b in decoder.blocks)


def _is_plain(block: Block) -> bool:
    ffn = block.ffn
    dense = ffn.shared if isinstance(ffn, Moe) else ffn
    return (
        _attends_plainly(block.mixer)
        and _has_defaults(block, _BLOCK)
        and block.layout != "post_sum"
        and (
            not isinstance(ffn, Moe) or (_has_defaults(ffn, _MOE) and ffn.score not in RARE_SCORES)
        )
        and (dense is None or (isinstance(dense, Mlp) and _has_defaults(dense, _MLP)))
        and (dense is None or dense.act != "xielu")
    )


def _attends_plainly(mixer: object) -> bool:
    if isinstance(mixer, LatentAttention):
        norms = (mixer.norm, mixer.rope_norm)
        is_usual = all(norm is None or _is_usual(norm) for norm in norms)
        return is_usual and _has_defaults(mixer, _LATENT)
    return isinstance(mixer, Attention) and mixer.more is None


def _is_usual(norm: Norm) -> bool:
    return norm.kind != "none" and not norm.scales_input


def _has_defaults(record: Record, names: tuple[str, ...]) -> bool:
    kind = type(record)
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    return all(getattr(record, name) == defaults[name] for name in names)
