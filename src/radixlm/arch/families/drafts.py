"""Draft models: the multi-token-prediction layers of DeepSeek (V4 too), GLM, dots 3, ERNIE, EXAONE,
MiMo, MiniMax M3, Bailing, LongCat, Nemotron-H, Qwen3, Qwen4Exp and Step checkpoints; assistants of
Gemma 4. EAGLE heads are in ``eagle.py``."""

from typing import Any, NoReturn

from radixlm.arch.config import Config
from radixlm.arch.draft import STEP, Draft, renamed
from radixlm.arch.families.builders import activation, mlp, rms
from radixlm.arch.families.deepseek import latent
from radixlm.arch.families.gemma import gemma4, gemma4_unified
from radixlm.arch.names import DEFAULT, LAYER, AnyOf, Name
from radixlm.arch.registry import DRAFTS, MTP_LAYERS, family_function, find, predicted
from radixlm.arch.spec import Attention, Block, Decoder, LatentAttention, Mlp, Norm
from radixlm.base.record import replace

NO_NORM = Norm(0.0, kind="none", affine=False)
_KEY = "num_nextn_predict_layers"
_NEXT_N = ("eh_proj", "enorm", "hnorm")  # DeepSeek's names, which others took over
_PRE_FC = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")  # Qwen's
_SPECULATED = {  # model types of the heads of ``speculators`` -> their targets
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


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


def moved(decoder: Decoder, layer: str, **own: Name) -> dict[str, Any]:
    """The decoder's names with its layers at ``layer``; ``own`` are roles that differ ("draft_join"
    for "draft.join")."""
    names: dict[str, Any] = {**DEFAULT, **decoder.names}
    out = {role: renamed(name, LAYER, layer) for role, name in names.items()}
    return out | {role.replace("_", ".", 1): name for role, name in own.items()}


def _joint(
    decoder: Decoder, layer: str, at: str, joint: tuple[str, str, str], **own: Name
) -> dict[str, Any]:
    """As ``moved``, with ``joint``: the names below ``at`` of the projection, the norm of the
    embedding and the norm of the hidden state."""
    roles = ("draft_join", "draft_embed_norm", "draft_hidden_norm")
    named = {role: at + name for role, name in zip(roles, joint, strict=True)}
    return moved(decoder, layer, **named, **own)


def _normed(c: Config, module: Decoder, count: int, first: int = 0, **fields: Any) -> Draft:
    """A draft that normalizes both inputs as the model's layers do."""
    return Draft(module, count, first, embed_norm=rms(c), hidden_norm=rms(c), **fields)


def _count(c: Config) -> int:
    """Modules in the checkpoint: as in the config; a draft whose config does not say has one."""
    return int(c.get(_KEY, c.architecture in DRAFTS))


def _target(c: Config) -> Decoder:
    """The target model, described by its own family."""
    return find(predicted(c.architecture))(c)


def _module(decoder: Decoder, block: Block, names: dict[str, Any]) -> Decoder:
    return replace(decoder, blocks=(block,), names=names)


def _last_attending(c: Config, decoder: Decoder) -> Block:
    attends = [block for block in decoder.blocks if block.state is None]
    if not attends:
        raise c.error("layer_types", "has no layer of full attention for the draft to be like")
    return attends[-1]


def _sliding(c: Config, decoder: Decoder) -> Block:
    """The first layer that attends to a window."""
    for block in decoder.blocks:
        if isinstance(block.mixer, Attention | LatentAttention) and block.mixer.window:
            return block
    raise c.error("layer_types", "has no window layer for the draft to be like")


def next_n(c: Config) -> Draft:
    """Layers after the last one, with their own indexer where the model has indexers. Their token
    table and head (``shared_head.head``) are copies of the model's."""
    decoder, at = _target(c), f"model.layers.{STEP}."
    names = _joint(decoder, at, at, _NEXT_N, norm=at + "shared_head.norm")
    return _normed(c, _module(decoder, _choosing(decoder), names), _count(c), c.num_hidden_layers)


def _choosing(decoder: Decoder) -> Block:
    """The last block; if it uses the choice of an earlier one, with an indexer of its own."""
    block = decoder.blocks[-1]
    if not isinstance(block.mixer, LatentAttention) or block.mixer.indexer is None:
        return block
    index = replace(block.mixer.indexer, is_shared=False)
    return replace(block, mixer=replace(block.mixer, indexer=index))


def hy_v4(c: Config) -> Draft:
    """Layers without hyper-connections."""
    decoder, at = replace(_target(c), streams=None), f"model.mtp_layers.{STEP}."
    names = _joint(decoder, at, at, _NEXT_N, norm=at + "final_layernorm")
    return _normed(c, _module(decoder, _choosing(decoder), names), _count(c))


def glm5_next(c: Config) -> Draft:
    """A layer with experts and an indexer, without hyper-connections."""
    one: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"]}
    one |= {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
    decoder, at = _target(c.replace(**one)), f"model.layers.{STEP}."
    names = _joint(decoder, at, at, _NEXT_N, norm=at + "shared_head.norm")
    module = replace(decoder, names=names, streams=None)
    return _normed(c, module, _count(c), c.num_hidden_layers)


def minimax_m3(c: Config) -> Draft:
    """Layers with experts that read the blocks an indexer chooses."""
    one: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"]}
    decoder, at = _target(c.replace(**one, mlp_layer_types=["sparse"])), f"model.mtp.layers.{STEP}."
    names = _joint(decoder, at + "transformer_layer.", at, _NEXT_N, norm=at + "final_layernorm")
    count, norm = c.get("num_mtp_modules", int(c.architecture in DRAFTS)), decoder.norm
    fields: dict[str, Any] = {"before_norm": True, "passes_normed": False, "blanks_first": True}
    module = replace(decoder, names=names)
    return Draft(module, count, embed_norm=norm, hidden_norm=norm, **fields)


def dots3_note(c: Config) -> Draft:
    """A window layer with a dense feed-forward; it may have a token table of its own."""
    decoder, at = _target(c), f"model.layers.{STEP}."
    own: dict[str, Name] = {"norm": at + "shared_head.norm", "embed": "model.mtp.embed_tokens"}
    names, block = _joint(decoder, at, at, _NEXT_N, **own), _sliding(c, decoder)
    module = _module(decoder, replace(block, ffn=mlp(c)), names)
    return _normed(c, module, _count(c), c.num_hidden_layers, owns_table=True)


def deepseek_v4(c: Config) -> Draft:
    """A layer on several residual streams, which attends to a window only. Its table and head are
    the model's."""
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    decoder, at = _target(c.replace(**one, mlp_layer_types=["moe"])), f"mtp.{STEP}."
    names = v4_names(decoder, at, last=at)
    parts = {"join_embed": "e_proj", "join_hidden": "h_proj"}
    parts |= {"embed_norm": "enorm", "hidden_norm": "hnorm"}
    names |= {f"draft.{role}": at + stored for role, stored in parts.items()}
    module = replace(decoder, names=names)
    return _normed(c, module, _count(c), before_norm=True, passes_normed=False)


def v4_names(decoder: Decoder, layer: str, last: str) -> dict[str, Any]:
    """DeepSeek V4's names with its layers at ``layer``, and what is behind them at ``last``."""
    roles: dict[str, Any] = dict(decoder.names)
    names = {
        role: renamed(renamed(name, LAYER.removeprefix("model."), layer), "model.mtp.", "mtp.")
        for role, name in roles.items()
    }
    for part in ("fn", "base", "scale"):
        names[f"streams.end_weights.{part}"] = f"{last}hc_head_{part}"
    return names | {"norm": last + "norm"}


def bailing(c: Config) -> Draft:
    """Layers after the last one, of the kind of the last that attends."""
    decoder, at = _target(c), f"model.layers.{STEP}."
    names = _joint(decoder, at, at, _NEXT_N, norm=at + "final_layernorm")
    module = _module(decoder, _last_attending(c, decoder), names)
    return _normed(c, module, _count(c), c.num_hidden_layers)


def ernie(c: Config) -> Draft:
    """A dense block without a last norm."""
    decoder = _target(c)
    joint = (f"linear_proj.{STEP}", f"emb_norm.{STEP}", f"hidden_norm.{STEP}")
    names = _joint(decoder, f"model.mtp_block.{STEP}.", "model.mtp_", joint)
    block = replace(decoder.blocks[0], ffn=mlp(c, bias=c.use_bias))
    module = replace(_module(decoder, block, names), norm=NO_NORM)
    return _normed(c, module, _count(c), join_bias=c.use_bias, blanks_first=True)


def mimo(c: Config) -> Draft:
    decoder, at = _target(c), f"model.mtp_layers.{STEP}."
    joint = ("input_proj", "token_layernorm", "hidden_layernorm")
    names = _joint(decoder, at, at, joint, norm=at + "final_layernorm")
    module = _module(decoder, decoder.blocks[-1], names)
    return _normed(c, module, _count(c), order="hidden embed", blanks_first=True)


def mimo_v2(c: Config) -> Draft:
    """A window layer with a dense feed-forward. Configs do not say that there are modules."""
    decoder, at = _target(c), f"model.mtp.layers.{STEP}."
    norms: dict[str, Name] = {"norm": at + "final_layernorm", "norm2": at + "pre_mlp_layernorm"}
    names = _joint(decoder, at, at, _NEXT_N, **norms)
    block = replace(_sliding(c, decoder), ffn=mlp(c))
    fields: dict[str, Any] = {"before_norm": True, "passes_normed": False}
    return _normed(c, _module(decoder, block, names), c.get(_KEY, 3), **fields)


def step(c: Config) -> Draft:
    """Layers after the last one, of the kinds that follow in the config's lists."""
    count, num = c.num_hidden_layers, _count(c)
    dense = ["dense"] * min(3, count) + ["sparse"] * (count - 3)
    whole = {"layer_types": c.layer_types, "mlp_layer_types": c.mlp_layer_types or dense}
    whole |= {key: c.get(key) for key in ("swiglu_limits", "swiglu_limits_shared")}
    lists: dict[str, Any] = {}
    for key, none in zip(whole, ("full_attention", "dense", 0.0, 0.0), strict=True):
        if (listed := whole[key]) is not None:
            more = c.get("mtp_" + key) or [none] * num
            lists[key] = [*listed, *more][: count + num]
    at = f"model.layers.{STEP}."
    decoder = _target(c.replace(num_hidden_layers=count + num, **lists))
    blocks = decoder.blocks[count:]
    if any(block != blocks[0] for block in blocks):
        raise c.error("layer_types", "prediction layers that differ in kind are not supported")
    heads = (at + "transformer.shared_head.norm", at + "shared_head.norm")
    names = _joint(decoder, at, at, _NEXT_N, norm=AnyOf(*heads))
    module, norm = replace(decoder, blocks=blocks[:1], names=names), rms(c, offset=1.0)
    fields: dict[str, Any] = {"before_norm": True, "passes_normed": False}
    return Draft(module, num, count, embed_norm=norm, hidden_norm=norm, **fields)


def nemotron_h(c: Config) -> Draft:
    """A module of several layers of one branch each, as ``mtp_layers_block_type`` says."""
    if (count := _count(c)) > 1:
        raise c.error(_KEY, f"= {count} is not supported (must be 0 or 1)")
    kinds = c.get("mtp_layers_block_type") or c.get("mtp_hybrid_override_pattern") or "*E"
    decoder = find("NemotronHForCausalLM")(
        c.replace(layers_block_type=None, hybrid_override_pattern=list(kinds))
    )
    roles: dict[str, Any] = {**DEFAULT, **decoder.names}
    names = {role: renamed(name, "backbone.layers.", "mtp.layers.") for role, name in roles.items()}
    joint = zip(("join", "embed_norm", "hidden_norm"), _NEXT_N, strict=True)
    names |= {f"draft.{role}": "mtp.layers.0." + stored for role, stored in joint}
    names["norm"] = f"mtp.layers.{len(decoder.blocks) - 1}.final_layernorm"
    norm = decoder.norm
    return Draft(replace(decoder, names=names), count, embed_norm=norm, hidden_norm=norm)


def qwen3_next(c: Config) -> Draft:
    """A layer of full attention; norms store weight - 1."""
    decoder = _target(c)
    names = _joint(decoder, "mtp.layers.{i}.", "mtp.", _PRE_FC, norm="mtp.norm")
    count, norm = c.get("mtp_num_hidden_layers", 1), rms(c, offset=1.0)
    blocks = (_last_attending(c, decoder),) * count
    return Draft(replace(decoder, blocks=blocks, names=names), embed_norm=norm, hidden_norm=norm)


def qwen4_exp(c: Config) -> Draft:
    """A layer of chosen attention on several residual streams."""
    if (count := c.get("mtp_num_hidden_layers", 1)) > 1:
        raise c.error("mtp_num_hidden_layers", f"= {count} is not supported (must be 0 or 1)")
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []}
    decoder = _target(c.replace(**one))
    parts = {"join_embed": "fc_embedding", "join_hidden": "fc_hidden"}
    parts |= {"embed_norm": _PRE_FC[1], "hidden_norm": _PRE_FC[2]}
    own = {f"draft_{role}": "mtp." + stored for role, stored in parts.items()}
    placed = moved(decoder, "mtp.layers.{i}.", **own)
    names = {role: renamed(name, "model.hyper_", "mtp.hyper_") for role, name in placed.items()}
    norm = rms(c, offset=1.0)
    fields: dict[str, Any] = {"before_norm": True, "passes_normed": False}
    return Draft(replace(decoder, names=names), count, embed_norm=norm, hidden_norm=norm,
                 norms_all_streams=True, **fields)  # fmt: skip


def mtp_speculator(c: Config) -> Draft:
    """Qwen's prediction layer with the names of ``speculators``."""
    if c.model_type not in _SPECULATED:
        known = ", ".join(_SPECULATED)
        raise c.error("transformer_layer_config", f"is of {c.model_type!r}; known: {known}")
    decoder, at = find(_SPECULATED[c.model_type])(c), "mtp_layers.0."
    joint = ("input_proj", "token_layernorm", "hidden_layernorm")
    names = _joint(decoder, "mtp_layers.{i}.", at, joint, norm=at + "final_layernorm")
    module = _module(decoder, _last_attending(c, decoder), names)
    return Draft(module, embed_norm=decoder.norm, hidden_norm=decoder.norm)


def qwen3_moe(c: Config) -> Draft:
    """Layers like the model's last one."""
    decoder = _target(c)
    names = _joint(decoder, "mtp.layers.{i}.", "mtp.", _PRE_FC, norm="mtp.norm")
    count = c.get("mtp_num_hidden_layers", c.get(_KEY, 1))
    blocks = decoder.blocks[-1:] * count
    return _normed(c, replace(decoder, blocks=blocks, names=names), int(count > 0))


def exaone_moe(c: Config) -> Draft:
    """A dense layer of the kind that ``mtp_layer_types`` says, else of the model's first layer."""
    if (count := _count(c)) > 1:
        raise c.error(_KEY, f"= {count} is not supported (must be 0 or 1)")
    kinds = c.get("mtp_layer_types") or c.layer_types or ["full_attention"]
    decoder = _target(
        c.replace(num_hidden_layers=1, layer_types=kinds[:1], mlp_layer_types=["dense"])
    )
    names = _joint(decoder, "mtp.layers.{i}.", "mtp.", _PRE_FC, norm="mtp.norm")
    return _normed(c, replace(decoder, names=names), count)


def mellum(c: Config) -> Draft:
    """A layer of the kinds that ``mtp_layer_types`` and ``mtp_mlp_layer_types`` say."""
    if (count := _count(c)) > 1:
        raise c.error(_KEY, f"= {count} is not supported (must be 0 or 1)")
    one: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": c.get("mtp_layer_types") or ["sliding_attention"],
        "mlp_layer_types": c.get("mtp_mlp_layer_types") or ["sparse"],
    }
    decoder = _target(c.replace(**one))
    names = _joint(decoder, "mtp.layers.{i}.", "mtp.", _PRE_FC, norm="mtp.norm")
    return _normed(c, replace(decoder, names=names), count)


def longcat(c: Config) -> Draft:
    """A dense layer with one attention. Its token table is a copy of the model's."""
    decoder, at = _target(c), "model.mtp.layers.0."
    feed, attn, roles = at + "transformer_layer.mlp.", at + "self_attn.", dict(decoder.names)
    names = _joint(
        decoder,
        at,
        at,
        ("eh_proj", "enorm.m", "hnorm.m"),
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
    return _normed(c, _module(decoder, block, names), _count(c))


def gemma4_assistant(c: Config) -> Draft:
    return _reading(c, gemma4(c.replace(num_kv_shared_layers=0)))


def gemma4_unified_assistant(c: Config) -> Draft:
    return _reading(c, gemma4_unified(c.replace(num_kv_shared_layers=0)))


def _reading(c: Config, decoder: Decoder) -> Draft:
    """Layers that read the keys and values of Gemma 4, and a table of their own as the head."""
    blocks = []
    for block in decoder.blocks:
        mixer = block.mixer
        assert isinstance(mixer, Attention) and mixer.extras is not None
        extras = replace(mixer.extras, kv_from=-1, k_is_v=False)
        blocks.append(replace(block, mixer=replace(mixer, extras=extras)))
    parts = {"join": "pre_projection", "back": "post_projection", "table": "model.embed_tokens"}
    parts |= {role: "masked_embedding." + role for role in ("centroids", "token_ordering")}
    names = {**decoder.names, "head": AnyOf("lm_head", "model.embed_tokens")}
    names |= {f"draft.{role}": name for role, name in parts.items()}
    has_clusters, clusters = bool(c.get("use_ordered_embeddings")), (0, 0)
    if has_clusters:
        clusters = c.get("num_centroids", 2048), c.get("centroid_intermediate_top_k", 32)
    module = replace(decoder, blocks=tuple(blocks), names=names, logit_softcap=0.0, tied=False)
    target_dim = c.get("backbone_hidden_size", 1536)
    return Draft(module, target_dim=target_dim, owns_head=not has_clusters, reads_target=True,
                 clusters=clusters)  # fmt: skip
