"""RWKV 4 (arXiv:2305.13048): each layer is two blocks, time mixing and channel mixing."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.hybrid import stacked
from radixlm.arch.names import Named, Names
from radixlm.arch.recipes import flat
from radixlm.arch.spec import Block, Decoder, Norm, RwkvChannel, RwkvTime
from radixlm.base.record import replace


def rwkv_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual name of the context length."""
    if raw.get("context_length") is None:
        return raw
    return {**raw, "max_position_embeddings": raw["context_length"]}


_BLOCK = "rwkv.blocks.{half}."
_TIME, _CHANNEL = _BLOCK + "attention.", _BLOCK + "feed_forward."


def _mix(part: str) -> tuple[Named, Named]:
    """The share of the token before, for time and channel mixing."""
    at = (f"{_TIME}time_mix_{part}", f"{_CHANNEL}time_mix_{part}")
    return Named((at[0],), flat), Named((at[1],), flat)


def _names() -> Names:
    """Time mixing has its own roles where both kinds of block have a tensor of that name."""
    return {
        "embed": "rwkv.embeddings",
        "embed_norm": "rwkv.blocks.0.pre_ln",
        "norm": "rwkv.ln_out",
        "head": "head",
        "norm1": _BLOCK + "ln{nth}",
        "state.time.mix_key.share": _mix("key")[0],
        "state.time.mix_value.share": _mix("value")[0],
        "state.time.mix_receptance.share": _mix("receptance")[0],
        "state.time.decay": _TIME + "time_decay",
        "state.time.first": _TIME + "time_first",
        "state.time.key": _TIME + "key",
        "state.time.value": _TIME + "value",
        "state.time.receptance": _TIME + "receptance",
        "state.time.out": _TIME + "output",
        "state.channel.mix_key.share": _mix("key")[1],
        "state.channel.mix_receptance.share": _mix("receptance")[1],
        "state.channel.key": _CHANNEL + "key",
        "state.channel.value": _CHANNEL + "value",
        "state.channel.receptance": _CHANNEL + "receptance",
    }


def rwkv(c: Config) -> Decoder:
    """The class halves the residual and all that is added to it every rescale_every layers; a
    larger norm epsilon is equivalent."""
    dim, count, every = c.hidden_size, c.num_hidden_layers, max(c.get("rescale_every", 0), 0)
    norm = Norm(c.layer_norm_epsilon, "layer", bias=True)
    time = RwkvTime(c.get("attention_hidden_size") or dim, dim)
    channel = RwkvChannel(c.get("intermediate_size") or 4 * dim, dim)

    def at(layer: int, of: Norm) -> Norm:
        return replace(of, eps=of.eps * 4.0 ** (layer // every)) if every else of

    blocks = [Block(m, None, at(i, norm)) for i in range(count) for m in (time, channel)]
    last = at(count, replace(norm, eps=1e-5))  # the class gives it torch's own epsilon
    return stacked(c, blocks, last, _names(), embed_norm=norm)
