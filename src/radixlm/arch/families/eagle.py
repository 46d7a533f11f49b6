"""EAGLE and EAGLE-3 heads (arXiv:2401.15077, 2503.01840)."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.draft import Draft
from radixlm.arch.families.builders import build_decoder, rms
from radixlm.arch.families.cohere import cohere, cohere2
from radixlm.arch.families.deepseek import latent
from radixlm.arch.families.drafts import NO_NORM, moved
from radixlm.arch.families.llama import llama, mistral
from radixlm.arch.families.llama4 import llama4
from radixlm.arch.families.mistral_native import HEAD_PROJECTION
from radixlm.arch.families.mla import mistral4
from radixlm.arch.families.qwen import qwen2, qwen3
from radixlm.arch.names import LAYER, AnyOf, Named
from radixlm.arch.recipes import flat
from radixlm.arch.spec import Decoder, LatentAttention
from radixlm.base.record import replace


def _eagle(c: Config, decoder: Decoder) -> Draft:
    """The first block has no norm before its attention; there is no final norm."""
    names = moved(decoder, "layers.{i}.", draft_join="fc")
    first, *rest = decoder.blocks
    if isinstance(first.mixer, LatentAttention):
        raise c.error("architectures", "latent attention has no published head of this kind")
    blocks = (replace(first, layout="prenorm_ffn_only"), *rest)
    before, behind = names["norm1"], names["norm2"]
    names |= {"norm1": AnyOf(before, behind)}
    module = replace(decoder, blocks=blocks, names=names, norm=NO_NORM, tied=False)
    return Draft(module, join_bias=c.get("bias", True))


def llama_eagle(c: Config) -> Draft:
    return _eagle(c, llama(c))


def qwen2_eagle(c: Config) -> Draft:
    return _eagle(c, qwen2(c))


def _whole_eagle(decoder: Decoder, bias: bool = False) -> Draft:
    """Whole blocks of the model's kind and a last norm, behind which the next step reads too."""
    plain = moved(decoder, "layers.{i}.", draft_join=AnyOf("fc", HEAD_PROJECTION), norm="norm")
    under = moved(decoder, LAYER, draft_join="model.fc", norm="model.norm")
    names = {role: AnyOf(plain[role], under[role]) for role in plain}
    return Draft(replace(decoder, names=names, tied=False), join_bias=bias)


def mistral_eagle(c: Config) -> Draft:
    return _whole_eagle(mistral(c))


def mistral_large3_eagle(c: Config) -> Draft:
    return _whole_eagle(mistral4(c))


def cohere_eagle(c: Config) -> Draft:
    return _whole_eagle(cohere2(c) if c.model_type == "cohere2" else cohere(c), bias=True)


def llama4_eagle(c: Config) -> Draft:
    """Dense layers."""
    return _whole_eagle(llama4(c.replace(moe_layers=[])))


def llama_eagle3(c: Config) -> Draft:
    return _eagle3(c, qwen3(c) if c.get("model_type") == "qwen3" else llama(c))


def peagle(c: Config) -> Draft:
    """An EAGLE-3 head that makes all drafts in one step (P-EAGLE)."""
    mask = c.get("mask_token_id", _mask(c))
    if mask is None:
        raise c.error("mask_token_id", "is missing")
    return llama_eagle3(c.replace(ptd_token_id=mask))


def deepseek_eagle3(c: Config) -> Draft:
    """Latent attention and dense layers."""
    return _eagle3(c, build_decoder(c, latent(c, interleaved=True)))


def _eagle3(c: Config, decoder: Decoder) -> Draft:
    """A block that reads the concatenated inputs, and hidden states of some target layers. Its
    head has a smaller vocabulary, or is the target's (``draft_vocab_size`` null)."""
    first, *rest = decoder.blocks
    layers, size = _eagle3_taps(c)
    vocab, mask = c.get("draft_vocab_size", c.vocab_size), _mask(c)
    has_table = bool(c.get("embed_requires_grad", mask is not None))
    names = _eagle3_names(decoder, size)
    if mask is not None:
        names["draft.mask_hidden"] = Named(("mask_hidden",), flat)
    module = replace(
        decoder,
        blocks=(replace(first, layout="prenorm_ffn_only"), *rest),
        names=names,
        vocab=vocab,
        extra_vocab_rows=c.vocab_size - vocab if has_table else 0,
        tied=False,
    )
    return Draft(
        module,
        embed_norm=rms(c),
        hidden_norm=rms(c),
        is_projected=False,
        residual_is_normed=bool(c.get("norm_before_residual")),
        target_dim=c.get("target_hidden_size", 0),
        target_vocab=0 if vocab == c.vocab_size else c.vocab_size,
        taps=size,
        tap_layers=layers,
        taps_norm=rms(c) if c.get("norm_before_fc") else None,
        tap_norm=rms(c) if c.get("fc_norm") or c.get("use_aux_norm") else None,
        passes_normed=bool(c.get("norm_output")),
        owns_head=c.get("draft_vocab_size") is not None,
        owns_table=has_table,
        has_vocab_map=vocab != c.vocab_size,
        mask=mask,
    )


def _mask(c: Config) -> int | None:
    """The token that stands for drafts where all are made in one step, or None."""
    mask = c.get("ptd_token_id", c.get("pard_token"))
    if mask is not None and not (isinstance(mask, int) and 0 <= mask < c.vocab_size):
        raise c.error("mask_token_id", f"= {mask!r} must be a token below {c.vocab_size}")
    return mask


def _eagle3_names(decoder: Decoder, num_taps: int) -> dict[str, Any]:
    """The first block is called ``midlayer`` or ``layers.0``."""
    layers, mid = (moved(decoder, at) for at in ("layers.{i}.", "midlayer."))
    either: dict[str, Any] = {role: AnyOf(mid[role], layers[role]) for role in layers}
    own: dict[str, Any] = {"norm": "norm", "head": "lm_head"}
    own |= {"draft.taps": "fc", "draft.vocab": "d2t"}
    own |= {"embed": AnyOf("embed_tokens", "model.embed_tokens")}
    first = {
        "norm1": "post_attention_layernorm",
        "draft.embed_norm": "input_layernorm",
        "draft.hidden_norm": "hidden_norm",
    }
    firsts = {r: AnyOf("midlayer." + name, "layers.0." + name) for r, name in first.items()}
    later = {"norm1": AnyOf(firsts["norm1"], layers["norm1"])} if len(decoder.blocks) > 1 else {}
    of_taps = {f"draft.tap_norms.{i}": f"fc_norm.{i}" for i in range(num_taps)}
    return either | own | firsts | later | of_taps | {"draft.taps_norm": "input_norm"}


def _eagle3_taps(c: Config) -> tuple[tuple[int, ...], int]:
    """The target layers whose outputs the head reads, and how many. SGLang's and the authors' list
    names the layers themselves, that of ``speculators`` the layers that they lead to."""
    own = c.get("eagle_config", {})
    if not own.get("use_aux_hidden_state", True):
        return (), 0
    listed = own.get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        listed = c.get("eagle_aux_hidden_state_layer_ids")
        shift = int(c.get("speculators_model_type") is not None)
    else:
        shift = 0
    layers = tuple(int(layer) - shift for layer in listed or ())
    return layers, len(layers) or int(c.get("num_aux_hidden_states", 3))
