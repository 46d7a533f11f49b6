"""Role of a parameter -> names of the checkpoint tensors that fill it.

A template names a module (the loader appends ``.weight`` or ``.bias``), or one tensor where the
checkpoint has exactly that name. Placeholders:

    {i}     the layer
    {e}     the expert: the template is read for every expert and stacked along a new first axis
    {past}  the expert, counted on from the number of experts
    {before}  the layer before
    {half}  the layer, where a layer of the checkpoint is two blocks
    {odd}   which of these two blocks: 0 or 1; {nth}: 1 or 2

What a table may hold for a role:

    "a.b"                      one template
    ("a.q", "a.k", "a.v")      joined along the rows, in this order (axis 1 of stacked experts)
    Named("a.b", recipe)       joined, then passed through a recipe (``arch/recipes.py``)
    AnyOf(x, y)                the first of these spellings whose tensors are present

Roles: embed positions norm head | per layer ``{i}``: norm1 .. norm4, mixer.{qkv o q_norm k_norm
sinks}, latent mixers mixer.{q q_a q_a_norm q_b kv_a kv_a_norm kv_b o}, one matrix {mixer
ffn}.matrix, ffn.{up up1 down} (up = gate above up, up1 = not gated), moe.{router correction up
down up_bias down_bias shared_gate}, moe.shared.{up up1 down}. Of models that do not generate:
types embed_norm embed_proj distances relative relative_norm pool.{n} gate.{n} (see
``arch/spec.Pool``). ``beside`` is a pattern, of tensors of encoders that no name here tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from radixlm.arch.quant_methods import SCALE_TENSORS
from radixlm.arch.recipes import Recipe
from radixlm.arch.spec import Decoder
from radixlm.base.record import Record, replace


class Named(Record):
    """Checkpoint tensors joined along their rows, then changed by ``recipe``."""

    templates: tuple[str, ...]
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Alternative names of one role, in the order in which they are tried."""

    spellings: tuple[Name, ...]

    def __init__(self, *spellings: Name) -> None:
        object.__setattr__(self, "spellings", spellings)


Name = str | tuple[str, ...] | Named | AnyOf
Names = Mapping[str, Name]

LAYER = "model.layers.{i}."
_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
SPLIT_QKV = tuple(f"{_ATTENTION}{part}_proj" for part in "qkv")
FUSED_UP = _MLP + "gate_up_proj"
# parts of multimodal checkpoints that hold the language model
_PARTS = ("language_model", "text_model", "llm", "language", "thinker", "model", "decoder")

DEFAULT: Names = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": AnyOf("lm_head", *(f"{part}.lm_head" for part in _PARTS)),
    "norm1": LAYER + "input_layernorm",
    "norm2": LAYER + "post_attention_layernorm",
    "mixer.qkv": AnyOf(SPLIT_QKV, _ATTENTION + "qkv_proj"),
    "mixer.o": _ATTENTION + "o_proj",
    "mixer.q_norm": _ATTENTION + "q_norm",
    "mixer.k_norm": _ATTENTION + "k_norm",
    "mixer.sinks": _ATTENTION + "sinks",
    "mixer.q": _ATTENTION + "q_proj",
    "mixer.qk": SPLIT_QKV[:2],
    "mixer.v_norm": _ATTENTION + "v_norm",
    "mixer.gate": _ATTENTION + "gate_proj",
    "mixer.q_a": _ATTENTION + "q_a_proj",
    "mixer.q_a_norm": _ATTENTION + "q_a_layernorm",
    "mixer.q_b": _ATTENTION + "q_b_proj",
    "mixer.kv": SPLIT_QKV[1:],
    **{f"mixer.lambda_{one}": f"{_ATTENTION}lambda_{one}" for one in ("q1", "k1", "q2", "k2")},
    "mixer.index.q": _ATTENTION + "indexer.wq_b",
    "mixer.index.k": _ATTENTION + "indexer.wk",
    "mixer.index.k_norm": _ATTENTION + "indexer.k_norm",
    "mixer.index.weights": _ATTENTION + "indexer.weights_proj",
    "mixer.kv_a": _ATTENTION + "kv_a_proj_with_mqa",
    "mixer.kv_a_norm": _ATTENTION + "kv_a_layernorm",
    "mixer.kv_b": _ATTENTION + "kv_b_proj",
    "ffn.up": AnyOf((_MLP + "gate_proj", _MLP + "up_proj"), FUSED_UP),
    "ffn.up1": _MLP + "up_proj",
    "ffn.down": _MLP + "down_proj",
    "moe.router": _MLP + "gate",
    "moe.correction": _MLP + "gate.e_score_correction_bias",
    "moe.up": AnyOf(
        (_MLP + "experts.{e}.gate_proj", _MLP + "experts.{e}.up_proj"),
        _MLP + "experts.gate_up_proj",
    ),
    "moe.down": AnyOf(_MLP + "experts.{e}.down_proj", _MLP + "experts.down_proj"),
    "moe.shared.up": AnyOf(
        (_MLP + "shared_experts.gate_proj", _MLP + "shared_experts.up_proj"),
        _MLP + "shared_experts.gate_up_proj",
    ),
    "moe.shared.down": _MLP + "shared_experts.down_proj",
    "moe.shared_gate": _MLP + "shared_expert_gate",
}

SANDWICH: Names = {
    "norm2": LAYER + "post_attention_layernorm",
    "norm3": LAYER + "pre_feedforward_layernorm",
    "norm4": LAYER + "post_feedforward_layernorm",
}
POST: Names = {
    "norm1": LAYER + "post_attention_layernorm",
    "norm2": LAYER + "post_feedforward_layernorm",
}


def spellings(names: Mapping[str, Any], role: str) -> tuple[Named, ...]:
    """The names under which a checkpoint may store ``role``, first choice first; KeyError if none
    is known. ``names`` is ``Decoder.names``; what it lacks is looked up in ``DEFAULT``."""
    name = names[role] if role in names else DEFAULT[role]
    return _flat(name)


def _flat(name: Name) -> tuple[Named, ...]:
    match name:
        case AnyOf():
            return tuple(one for spelling in name.spellings for one in _flat(spelling))
        case Named():
            return (name,)
        case str():
            return (Named((name,)),)
        case _:
            return (Named(name),)


def untied_with_bias(decoder: Decoder) -> Decoder:
    """A tied head with a bias becomes a head of its own whose weight is the token table's."""
    return untied(decoder) if decoder.tied and decoder.head_bias else decoder


def untied(decoder: Decoder) -> Decoder:
    """A head of its own: the checkpoint's where it has one, else a copy of the token table."""
    names: Any = {**DEFAULT, **decoder.names}
    either = AnyOf(names["head"], names["embed"])
    return replace(decoder, tied=False, names={**decoder.names, "head": either})


# Where multimodal checkpoints keep the language model, and old ones the decoder without its head.
PREFIXES = (
    *("language_model.model.", "model.language_model.", "language_model.", "model.text_model."),
    *("text_model.model.", "decoder.model."),
    *("llm.model.", "language.model.", "thinker.model.", "language_model.backbone."),
    *("esmc.", "lfm2.", "model.", ""),
)


def prefix_of(decoder: Decoder, present: Container[str]) -> tuple[str, str]:
    """(local prefix, checkpoint prefix): in templates the first is replaced by the second.

    The checkpoint's prefix is where its token embedding is; ``present`` holds its tensor names.
    Both are equal where none fits, so that the loader reports the name that the family expects.
    """
    embed = spellings(decoder.names, "embed")[0].templates[0]
    local = embed.partition(".")[0] + "."
    tail = embed.removeprefix(local) + ".weight"
    for prefix in (local, *PREFIXES):
        if prefix + tail in present:
            return local, prefix
    return local, local


_BUFFERS = re.compile(
    r"(^|\.)encoder\.embed_positions\.weight$"  # RoFormer's sines
    r"|\.(inv_freq|attn\.(embed_positions|causal_mask)|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias|attention\.bias"
    r"|position_ids|lora_[AB]\.(vision|speech)\.weight|slope_rate|layer_multipliers|ngram_heads_(offsets|vocab_sizes)|(query|key|diagonal)_decay)$"
)
# Encoders of composite checkpoints and predictors of further tokens are no part of the decoder.
_BESIDE = re.compile(
    r"^(model\.|thinker\.)?(vision|sound_|visual|vit[_.]|image_|audio[_.]|multi_?modal|connector\.|aligner\.|mm_projector"
    r"|gen_|perceiver|vqmodel\.|generation_|mtp[_.]|high_res_|mlp_AR\.|embed_(vision|audio)\."
    r"|mm_token_embeds|projector\.|merger\.|vpm\.|apm\.|tts\.|resampler(_model)?\.|qformer\.|query_tokens|language_projection\.|sam_model\.|qwen2_model\.|mlp1\.|tile_|view_sep"
    r"|early_exit_gate\.|vit_large|patch_merge(r|_mlp)\.|pre_mm_projector_norm\.|density_router\.|(layerwise|spatial)_projectors\.|embed_tokens_extend\.|talker\.|code2wav\.|token2wav\.|(acoustic|semantic)_tokenizer_)"
)
# Audio encoders beside a decoder.
_ENCODER = re.compile(r"^(model\.)?encoder\.")
# A head that is the token table, saved once more.
_TIED_HEADS = tuple(
    f"{one}.weight" for one in ("lm_head", "embed_out", "proj_out", "output_projection")
)
# Weights that several layers share and that are saved with each of them.
_SHARED_COPIES = re.compile(r"(?:^|\.)layers\.(\d+)\.shared_transf(?:ormer)?\.")
# Heads of other tasks in the checkpoint of an encoder.
_OTHER_HEADS = re.compile(
    r"^logit_(scale|bias)$|^(head|decoder)\.|(^|\.)(lm_head|contact_head|generator_(lm_head|predictions)|cls|pooler|classifier|score"
    r"|qa_outputs|predictions|sop_classifier|discriminator_predictions|vocab_(transform|layer_norm|projector)"
    r"|visual_projection)\."
)
# BERT's heads for whole texts, which a causal language model may have kept.
_TEXT_HEADS = re.compile(r"(^|\.)(pooler\.dense|cls\.seq_relationship)\.(weight|bias)$")
# What makes images and motions out of the same layers.
_MAKERS = re.compile(
    r"^(model\.language_model\.)?(action_(modality_embed$|proj_(in|out)\.)|time_embedder\."
    r"|proj_(in|out)\.|norm_moe_gen\.|layers\.\d+\.\w+_moe_gen\."
    r"|layers\.\d+\.self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\.)"
)
_LAYER_OF = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
# What only a multi-token-prediction layer has.
_PREDICTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")

_EXPERT_OF = re.compile(r"\.experts\.(\d+)\.")


def _num_experts(decoder: Decoder) -> float:
    """The number of experts with weights, where others have none; else infinity."""
    sides = [block.deferred_moe for block in decoder.blocks if block.deferred_moe is not None]
    return max((moe.experts for moe in sides if moe.zero_experts), default=math.inf)


def is_ignorable(name: str, decoder: Decoder) -> bool:
    """Whether a leftover tensor is no part of the decoder: buffers that old checkpoints saved,
    the copy of a tied head, scales, encoders, extra layers that predict further tokens."""
    if _BUFFERS.search(name) or _BESIDE.match(name) or SCALE_TENSORS.search(name):
        return True
    if re.match(str(decoder.names.get("beside", "$.")), name):
        return True
    if _MAKERS.match(name) or _TEXT_HEADS.search(name) or _is_shared_copy(name, decoder):
        return True
    if decoder.tied and name.endswith(_TIED_HEADS):
        return True
    if decoder.encoder is None and _ENCODER.match(name):
        return True
    if decoder.head_bias and name.endswith(".bias") and _is_head(name, decoder):
        return True  # BERT's heads have it twice
    if decoder.pool is not None and (_OTHER_HEADS.search(name) or _is_head(name, decoder)):
        return True
    expert = _EXPERT_OF.search(name)
    if expert is not None and int(expert[1]) >= _num_experts(decoder):
        return True  # a placeholder of an expert without weights
    return _layer_behind(name, decoder) is not None


def is_beside(name: str) -> bool:
    """Whether a tensor is of an encoder or a predictor of a composite checkpoint."""
    return bool(_BESIDE.match(name) or _ENCODER.match(name))


def is_scale(name: str) -> bool:
    """Whether a tensor belongs to a quantized weight."""
    return SCALE_TENSORS.search(name) is not None


def layers_left_out(ignored: Iterable[str], decoder: Decoder) -> list[int]:
    """Layers after the last one of the config that have tensors in ``ignored``, without
    multi-token-prediction layers."""
    behind: set[int] = set()
    predicting: set[int] = set()
    for name in ignored:
        layer = _layer_behind(name, decoder)
        if layer is not None and not _BESIDE.match(name) and not _ENCODER.match(name):
            (predicting if _PREDICTS.search(name) else behind).add(layer)
    return sorted(behind - predicting)


def _layer_behind(name: str, decoder: Decoder) -> int | None:
    found = _LAYER_OF.search(name)
    return int(found[1]) if found and int(found[1]) >= len(decoder.blocks) else None


def _is_shared_copy(name: str, decoder: Decoder) -> bool:
    """Whether the tensor repeats a shared layer that an earlier block has. In checkpoints that
    share no weights, each copy holds the adapters of all calls too."""
    found = _SHARED_COPIES.search(name)
    layer = int(found[1]) if found else len(decoder.blocks)
    asks = decoder.blocks[layer].shared_block if layer < len(decoder.blocks) else None
    is_anothers = not decoder.tied and "_adapter_list." in name
    return asks is not None and (asks.call > 0 or is_anothers)


def _is_head(name: str, decoder: Decoder) -> bool:
    """Whether the tensor belongs to the output head."""
    module = name.rpartition(".")[0]
    heads = spellings(decoder.names, "head")
    return any(module == template for head in heads for template in head.templates)
