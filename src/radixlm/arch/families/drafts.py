"""Draft models: EAGLE and EAGLE-3 heads (arXiv:2401.15077, 2503.01840), and the
multi-token-prediction layers of DeepSeek, GLM, ERNIE, MiMo, Bailing, LongCat and Qwen3-Next
checkpoints."""

from typing import Any, NoReturn

from radixlm.arch.config import Config
from radixlm.arch.draft import STEP, Draft, renamed
from radixlm.arch.families.builders import activation, mlp, rms
from radixlm.arch.families.deepseek import latent
from radixlm.arch.families.llama import llama
from radixlm.arch.families.qwen import qwen2
from radixlm.arch.names import DEFAULT, LAYER, AnyOf, Name
from radixlm.arch.registry import DRAFTS, MTP_LAYERS, family_function, find
from radixlm.arch.spec import Attention, Block, Decoder, LatentAttention, Mlp
from radixlm.base.record import replace

_NEXT_N = ("eh_proj", "enorm", "hnorm")  # DeepSeek's names, which others took over


def draft_of(c: Config) -> Draft | None:
    """The draft that the checkpoint is or has, or None."""
    row = DRAFTS.get(c.architecture) or MTP_LAYERS.get(c.architecture)
    made: Draft | None = family_function(row)(c) if row else None
    return made


def refuse_draft(c: Config) -> NoReturn:
    """CheckpointError: a draft cannot be served as a model."""
    raise c.error(
        "architectures",
        f"= {c.architecture!r} is a draft, which only guesses for the model it was made for",
    )


def _moved(decoder: Decoder, layer: str, **own: Name) -> dict[str, Any]:
    """The decoder's names with its layers at ``layer``; ``own`` are roles that differ ("draft_join"
    for "draft.join")."""
    names: dict[str, Any] = {**DEFAULT, **decoder.names}
    moved = {role: renamed(name, LAYER, layer) for role, name in names.items()}
    return moved | {role.replace("_", ".", 1): name for role, name in own.items()}


def _joint(
    decoder: Decoder, layer: str, at: str, joint: tuple[str, str, str], **own: Name
) -> dict[str, Any]:
    """As ``_moved``, with ``joint``: the names below ``at`` of the projection, the norm of the
    embedding and the norm of the hidden state."""
    roles = ("draft_join", "draft_embed_norm", "draft_hidden_norm")
    named = {role: at + name for role, name in zip(roles, joint, strict=True)}
    return _moved(decoder, layer, **named, **own)


def _normed(c: Config, module: Decoder, count: int, first: int = 0, **fields: Any) -> Draft:
    """A draft that normalizes both inputs as the model's layers do."""
    return Draft(module, count, first, embed_norm=rms(c), hidden_norm=rms(c), **fields)


def _count(c: Config) -> int:
    """Modules in the checkpoint: as in the config; a draft whose config does not say has one."""
    return int(c.get("num_nextn_predict_layers", c.architecture in DRAFTS))


def _target(c: Config) -> Decoder:
    """The target model, described by its own family."""
    if c.architecture in MTP_LAYERS:
        return find(c.architecture)(c)
    row = DRAFTS[c.architecture]
    targets = [name for name, other in MTP_LAYERS.items() if other == row]
    alike = [name for name in targets if c.architecture.startswith(name)]
    return find((alike or targets)[0])(c)


def _module(decoder: Decoder, block: Block, names: dict[str, Any]) -> Decoder:
    return replace(decoder, blocks=(block,), names=names)


def next_n(c: Config) -> Draft:
    """Layers after the last one, with their own token table and head, and with their own indexer
    where the model has indexers."""
    decoder, at = _target(c), f"model.layers.{STEP}."
    block = decoder.blocks[-1]
    if isinstance(block.mixer, LatentAttention) and block.mixer.indexer is not None:
        index = replace(block.mixer.indexer, is_shared=False)
        block = replace(block, mixer=replace(block.mixer, indexer=index))
    names = _joint(
        decoder,
        at,
        at,
        _NEXT_N,
        embed=at + "embed_tokens",
        norm=at + "shared_head.norm",
        head=at + "shared_head.head",
    )
    module = replace(_module(decoder, block, names), tied=False)
    return _normed(c, module, _count(c), c.num_hidden_layers, owns_embed=True, owns_head=True)


def bailing(c: Config) -> Draft:
    decoder, at = _target(c), f"model.layers.{STEP}."
    names = _joint(decoder, at, at, _NEXT_N, norm=at + "final_layernorm")
    module = _module(decoder, decoder.blocks[-1], names)
    return _normed(c, module, _count(c), c.num_hidden_layers)


def ernie(c: Config) -> Draft:
    """A dense block; the target's final norm and head."""
    decoder = _target(c)
    joint = (f"linear_proj.{STEP}", f"emb_norm.{STEP}", f"hidden_norm.{STEP}")
    names = _joint(decoder, f"model.mtp_block.{STEP}.", "model.mtp_", joint)
    block = replace(decoder.blocks[0], ffn=mlp(c, bias=c.use_bias))
    module = _module(decoder, block, names)
    return _normed(c, module, _count(c), join_bias=c.use_bias, owns_norm=False)


def mimo(c: Config) -> Draft:
    decoder, at = _target(c), f"model.mtp_layers.{STEP}."
    joint = ("input_proj", "token_layernorm", "hidden_layernorm")
    names = _joint(decoder, at, at, joint, norm=at + "final_layernorm")
    module = _module(decoder, decoder.blocks[-1], names)
    return _normed(c, module, _count(c), order="hidden embed", blanks_first=True)


def qwen3_next(c: Config) -> Draft:
    """A layer of full attention; norms store weight - 1."""
    decoder = _target(c)
    full = [block for block in decoder.blocks if isinstance(block.mixer, Attention)]
    if not full:
        raise c.error("layer_types", "has no layer of full attention for the draft to be like")
    joint = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    names = _joint(decoder, "mtp.layers.{i}.", "mtp.", joint, norm="mtp.norm")
    count, norm = c.get("mtp_num_hidden_layers", 1), rms(c, offset=1.0)
    module = replace(decoder, blocks=(full[-1],) * count, names=names)
    return Draft(module, embed_norm=norm, hidden_norm=norm)


def longcat(c: Config) -> Draft:
    """A dense layer with one attention, and its own token table."""
    decoder, at = _target(c), "model.mtp.layers.0."
    feed, attn, roles = at + "transformer_layer.mlp.", at + "self_attn.", dict(decoder.names)
    names = _joint(
        decoder,
        at,
        at,
        ("eh_proj", "enorm.m", "hnorm.m"),
        embed="model.mtp.embed_tokens",
        norm="model.mtp.norm",
        norm1=at + "input_layernorm",
        norm2=at + "post_attention_layernorm",
        ffn_up=(feed + "gate_proj", feed + "up_proj"),
        ffn_down=feed + "down_proj",
    )
    old = "model.layers.{half}.self_attn.{odd}."
    mixer: dict[str, Any] = {role: name for role, name in roles.items() if role.startswith("mixer")}
    names |= {role: renamed(name, old, attn) for role, name in mixer.items()}
    block = Block(latent(c, interleaved=True), Mlp(c.ffn_hidden_size, activation(c)), rms(c))
    return _normed(c, _module(decoder, block, names), _count(c), owns_embed=True)


def _eagle(c: Config, decoder: Decoder) -> Draft:
    """The first block has no norm before its attention; there is no final norm."""
    names = _moved(decoder, "layers.{i}.", embed="embed_tokens", draft_join="fc")
    first, *rest = decoder.blocks
    if isinstance(first.mixer, LatentAttention):
        raise c.error("architectures", "latent attention has no published head of this kind")
    blocks = (replace(first, layout="prenorm_ffn_only"), *rest)
    before, behind = names["norm1"], names["norm2"]
    module = replace(decoder, blocks=blocks, names={**names, "norm1": AnyOf(before, behind)})
    return Draft(module, join_bias=c.get("bias", True), owns_embed=True, owns_norm=False)


def llama_eagle(c: Config) -> Draft:
    return _eagle(c, llama(c))


def qwen2_eagle(c: Config) -> Draft:
    return _eagle(c, qwen2(c))


def llama_eagle3(c: Config) -> Draft:
    """One block that reads the concatenated inputs, hidden states of three target layers, and a
    smaller vocabulary."""
    decoder = llama(c)
    at = "midlayer."
    names = _moved(
        decoder,
        at,
        embed="embed_tokens",
        norm="norm",
        head="lm_head",
        norm1=at + "post_attention_layernorm",
        draft_embed_norm=at + "input_layernorm",
        draft_hidden_norm=at + "hidden_norm",
        draft_taps="fc",
        draft_vocab="d2t",
    )
    block = replace(decoder.blocks[0], layout="prenorm_ffn_only")
    vocab = c.get("draft_vocab_size", c.vocab_size)
    module = replace(decoder, blocks=(block,), names=names, vocab=vocab, tied=False)
    return Draft(
        module,
        embed_norm=rms(c),
        hidden_norm=rms(c),
        is_projected=False,
        target_dim=c.get("target_hidden_size", 0),
        taps=3,
        owns_head=True,
        has_vocab_map=vocab != c.vocab_size,
    )
