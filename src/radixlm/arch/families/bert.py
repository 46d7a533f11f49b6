"""Encoders with BERT's layers: BERT, RoBERTa, ALBERT, ELECTRA, MPNet, DeBERTa and others; the
encoder of T5 and the text side of CLIP."""

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import activation, attention, build_decoder, head_dim, mlp
from radixlm.arch.families.pools import pooled, vectors
from radixlm.arch.names import AnyOf, Name, Named, Names
from radixlm.arch.recipes import JoinedTables
from radixlm.arch.spec import Attention, Decoder, Dense, Disentangled, Encoder, Mlp, Norm, Pool
from radixlm.base.record import replace


def layer_norm(c: Config, key: str = "layer_norm_eps") -> Norm:
    return Norm(getattr(c, key), "layer", bias=True)


def bert_names(prefix: str) -> dict[str, Name]:
    """The tensor names of Hugging Face's BERT below ``prefix``."""
    tables, layer = f"{prefix}.embeddings.", prefix + ".encoder.layer.{i}."
    qkv = tuple(f"{layer}attention.self.{part}" for part in ("query", "key", "value"))
    return {
        "embed": tables + "word_embeddings",
        "positions": tables + "position_embeddings",
        "types": tables + "token_type_embeddings",
        "embed_norm": tables + "LayerNorm",
        "embed_proj": f"{prefix}.embeddings_project",
        "mixer.qkv": qkv,
        "mixer.o": layer + "attention.output.dense",
        "norm1": layer + "attention.output.LayerNorm",
        "ffn.up1": layer + "intermediate.dense",
        "ffn.down": layer + "output.dense",
        "norm2": layer + "output.LayerNorm",
    }


def encoder(
    c: Config,
    names: Names,
    *,
    mixer: Attention | Callable[[int], Attention] | None = None,
    ffn: Mlp | None = None,
    norm: Norm | None = None,
    offset: int | None = 0,
    layout: Any = "post_sum",
    **more: Any,
) -> Decoder:
    """A BERT encoder; arguments say what differs. ``offset`` of the position table, None = no
    table; ``more`` are fields of ``spec.Encoder``."""
    norm = norm or layer_norm(c)
    more.setdefault("has_final_norm", layout != "post_sum")
    decoder = build_decoder(
        c,
        mixer or attention(c, rope=None, qkv_bias=True, o_bias=True),
        ffn or mlp(c, gated=False, bias=True),
        norm,
        layout,
        embed_norm=norm,
        tied=True,
        positions=None if offset is None else (c.max_position_embeddings, offset),
        encoder=Encoder(**more),
        names=names,
    )
    longest = c.max_position_embeddings - (offset or 0)
    if longest < 1:
        raise c.error("max_position_embeddings", f"leaves no place after the offset {offset}")
    return replace(decoder, max_positions=longest)


def bert_like(c: Config, prefix: str, offset: int = 0, **more: Any) -> Decoder:
    """BERT's body; ``more`` are fields of ``spec.Encoder``."""
    c.refuse("position_embedding_type", "absolute")
    c.refuse("is_decoder", False)
    more.setdefault("token_types", c.type_vocab_size)
    return encoder(c, bert_names(prefix), offset=offset, **more)


def roberta(c: Config) -> Decoder:
    """Positions start after the padding token's id."""
    pad = c.get("pad_token_id", 1)
    return bert_like(c, "roberta", offset=pad + 1)


def roberta_xl(c: Config) -> Decoder:
    layer = "roberta.encoder.layer.{i}."
    names = {
        **bert_names("roberta"),
        "norm1": layer + "attention.self_attn_layer_norm",
        "norm2": layer + "LayerNorm",
        "norm": "roberta.encoder.LayerNorm",
    }
    decoder = encoder(
        c, names, offset=c.pad_token_id + 1, layout="pre", token_types=c.type_vocab_size
    )
    return replace(decoder, embed_norm=None)


def electra(c: Config) -> Decoder:
    width = c.embedding_size
    return bert_like(c, "electra", embed_dim=0 if width == c.hidden_size else width)


def distilbert(c: Config) -> Decoder:
    layer = "distilbert.transformer.layer.{i}."
    qkv = tuple(f"{layer}attention.{part}_lin" for part in "qkv")
    names = {
        **bert_names("distilbert"),
        "mixer.qkv": qkv,
        "mixer.o": layer + "attention.out_lin",
        "norm1": layer + "sa_layer_norm",
        "ffn.up1": layer + "ffn.lin1",
        "ffn.down": layer + "ffn.lin2",
        "norm2": layer + "output_layer_norm",
    }
    feed_forward = mlp(c, gated=False, bias=True, act="activation")
    return encoder(c, names, ffn=feed_forward, norm=Norm(1e-12, "layer", bias=True))


def albert(c: Config) -> Decoder:
    """All layers share one layer's weights."""
    c.refuse("num_hidden_groups", 1)
    c.refuse("inner_group_num", 1)
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    names = {
        **bert_names("albert"),
        "embed_proj": "albert.encoder.embedding_hidden_mapping_in",
        "mixer.qkv": tuple(f"{layer}attention.{part}" for part in ("query", "key", "value")),
        "mixer.o": layer + "attention.dense",
        "norm1": layer + "attention.LayerNorm",
        "ffn.up1": layer + "ffn",
        "ffn.down": layer + "ffn_output",
        "norm2": layer + "full_layer_layer_norm",
    }
    types, width = c.type_vocab_size, c.embedding_size
    return encoder(c, names, token_types=types, embed_dim=width, is_shared=True)


def mpnet(c: Config) -> Decoder:
    layer = "mpnet.encoder.layer.{i}.attention."
    names = {
        **bert_names("mpnet"),
        "mixer.qkv": tuple(f"{layer}attn.{part}" for part in "qkv"),
        "mixer.o": layer + "attn.o",
        "norm1": layer + "LayerNorm",
        "distances": "mpnet.encoder.relative_attention_bias",
    }
    c.refuse("relative_attention_num_buckets", 32)
    return encoder(c, names, offset=2, distances=(32, 128, c.num_attention_heads))


def deberta(c: Config) -> Decoder:
    """Scores depend on relative positions, where the config says so. They are divided by the root
    of so many times the head's width as ``pos_att_type`` has parts, and one."""
    c.refuse("conv_kernel_size", 0)
    c.refuse("embedding_size", c.hidden_size)
    kinds = c.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    kinds = {str(kind).strip() for kind in kinds} & {"c2p", "p2c"}
    relative = _distances(c, kinds) if c.get("relative_attention") and kinds else None
    layer = "deberta.encoder.layer.{i}.attention.self."
    names: Names = {
        **bert_names("deberta"),
        "mixer.qkv": tuple(f"{layer}{part}_proj" for part in ("query", "key", "value")),
        "relative": "deberta.encoder.rel_embeddings",
        "relative_norm": "deberta.encoder.LayerNorm",
        "beside": r"(deberta\.)?encoder\.(rel_embeddings|LayerNorm)\.",  # where none are read
    }
    scale = ((1 + len(kinds)) * head_dim(c)) ** -0.5
    mixer = attention(c, rope=None, qkv_bias=True, o_bias=True, scale=scale)
    offset = 0 if c.get("position_biased_input", True) else None
    types = c.type_vocab_size
    return encoder(c, names, mixer=mixer, offset=offset, token_types=types, disentangled=relative)


def _distances(c: Config, kinds: set[str]) -> Disentangled:
    c.refuse("share_att_key", True)
    farthest = c.get("max_relative_positions", -1)
    farthest = farthest if farthest > 0 else c.max_position_embeddings
    norm = layer_norm(c) if "layer_norm" in str(c.get("norm_rel_ebd", "none")) else None
    sides = {"has_keys": "c2p" in kinds, "has_queries": "p2c" in kinds}
    return Disentangled(max(0, c.get("position_buckets", -1)), farthest, norm, **sides)


def ernie(c: Config) -> Decoder:
    """Texts are of task 0."""
    decoder = bert_like(c, "ernie")
    if not c.get("use_task_id"):
        return decoder
    tables = tuple(f"ernie.embeddings.{one}_type_embeddings" for one in ("token", "task"))
    types = Named(tables, JoinedTables(c.type_vocab_size))
    return replace(decoder, names={**decoder.names, "types": types})


def data2vec(c: Config) -> Decoder:
    return bert_like(c, "data2vec_text", offset=c.get("pad_token_id", 1) + 1)


def before(c: Config, prefix: str, offset: int, **norms: str) -> Decoder:
    """A pre-norm encoder with a final norm; ``norms`` are the names of its norms."""
    layer = prefix + ".encoder.layer.{i}."
    names: dict[str, Name] = {
        **bert_names(prefix),
        "norm1": layer + norms["first"],
        "norm2": layer + norms["second"],
        "norm": f"{prefix}.{norms['last']}",
    }
    return encoder(c, names, offset=offset, layout="pre", token_types=c.type_vocab_size)


def megatron(c: Config) -> Decoder:
    decoder = before(c, "bert", 0, first="attention.ln", second="ln", last="encoder.ln")
    return replace(decoder, embed_norm=None)


def pre_norm(c: Config) -> Decoder:
    names = {"first": "attention.LayerNorm", "second": "intermediate.LayerNorm"}
    offset = c.get("pad_token_id", 1) + 1
    return before(c, "roberta_prelayernorm", offset, **names, last="LayerNorm")


def rembert(c: Config) -> Decoder:
    names = {
        **bert_names("rembert"),
        "embed_proj": "rembert.encoder.embedding_hidden_mapping_in",
    }
    return encoder(c, names, token_types=c.type_vocab_size, embed_dim=c.input_embedding_size)


def umt5_encoder(c: Config) -> Decoder:
    """T5's with a position bias of its own in every layer."""
    return t5_encoder(c, c.num_hidden_layers)


def t5_encoder(c: Config, num_biases: int = 1) -> Decoder:
    """A relative position bias in place of positions; scores are not scaled."""
    layer = "encoder.block.{i}.layer."
    bias = layer + "0.SelfAttention.relative_attention_bias"
    gated, _, name = c.get("feed_forward_proj", "relu").rpartition("-")
    act = activation(Config({"hidden_act": "gelu_new" if gated and name == "gelu" else name}))
    up: Names = {"ffn.up": (layer + "1.DenseReluDense.wi_0", layer + "1.DenseReluDense.wi_1")}
    names: Names = {
        "embed": AnyOf("encoder.embed_tokens", "shared"),
        "norm": "encoder.final_layer_norm",
        "norm1": layer + "0.layer_norm",
        "norm2": layer + "1.layer_norm",
        "mixer.qkv": tuple(f"{layer}0.SelfAttention.{part}" for part in "qkv"),
        "mixer.o": layer + "0.SelfAttention.o",
        "ffn.up1": layer + "1.DenseReluDense.wi",
        "ffn.down": layer + "1.DenseReluDense.wo",
        "distances": tuple(bias.replace("{i}", str(i)) for i in range(num_biases)),
        **up,
    }
    mixer = attention(c, rope=None, scale=1.0, head_dim=c.d_kv)
    buckets = (c.relative_attention_num_buckets, c.relative_attention_max_distance)
    distances = (*buckets, c.num_attention_heads)
    ffn = Mlp(c.intermediate_size, act, gated=bool(gated))
    norm = Norm(c.layer_norm_epsilon)
    more = {"distances": distances, "has_distances_each": num_biases > 1}
    decoder = encoder(c, names, mixer=mixer, ffn=ffn, norm=norm, offset=None, layout="pre", **more)
    return vectors(c, replace(decoder, embed_norm=None), "mean")


_CLIP_LAYER = "text_model.encoder.layers.{i}."
_CLIP: Names = {
    "embed": "text_model.embeddings.token_embedding",
    "positions": "text_model.embeddings.position_embedding",
    "norm": "text_model.final_layer_norm",
    "norm1": _CLIP_LAYER + "layer_norm1",
    "norm2": _CLIP_LAYER + "layer_norm2",
    "mixer.qkv": tuple(f"{_CLIP_LAYER}self_attn.{part}_proj" for part in "qkv"),
    "mixer.o": _CLIP_LAYER + "self_attn.out_proj",
    "ffn.up1": _CLIP_LAYER + "mlp.fc1",
    "ffn.down": _CLIP_LAYER + "mlp.fc2",
}


def clip(c: Config) -> Decoder:
    """The text encoder: a causal decoder, pooled at its end token."""
    mixer = attention(c, rope=None, qkv_bias=True, o_bias=True)
    ffn = mlp(c, gated=False, bias=True)
    rows = (c.max_position_embeddings, 0)
    decoder = build_decoder(c, mixer, ffn, layer_norm(c), positions=rows, names=_CLIP, tied=True)
    # configs from before the end token was right: it is the last of the vocabulary
    end = c.vocab_size - 1 if c.eos_token_id == 2 else c.eos_token_id
    head = (Dense(c.hidden_size, c.projection_dim, bias=False),)
    return pooled(decoder, Pool("marked", head, "unit", marks=(end,)), pool_0="text_projection")


def siglip(c: Config) -> Decoder:
    """The text encoder: an encoder pooled at its last token, which may be padding."""
    decoder = replace(encoder(c, _CLIP, layout="pre", is_padded=True), embed_norm=None)
    head = (Dense(c.hidden_size, c.projection_size or c.hidden_size),)
    return pooled(decoder, Pool("last", head, "unit"), pool_0="text_model.head")


def contriever(c: Config) -> Decoder:
    return vectors(c, bert_like(c, "bert"), "mean")


def colbert(c: Config) -> Decoder:
    """BERT whose tokens have a short vector each (``token_embed`` of /pooling), of unit length. The
    vector of a whole text is made of their mean."""
    width = c.get("colbert_dim") or c.get("dim") or c.get("projection_dim") or 128
    pool = Pool("mean", (Dense(c.hidden_size, width, bias=False),), "unit")
    return pooled(bert_like(c, "bert"), pool, pool_0=AnyOf("linear", "colbert_linear"))
