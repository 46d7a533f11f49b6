"""Encoders: BERT and its relatives, as embedding models and as cross-encoders. Over 500 lines:
many short functions that vary one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config, is_number
from radixlm.arch.families.builders import (
    activation,
    attention,
    build_decoder,
    family,
    head_dim,
    is_sliding,
    mlp,
    rms,
    rope,
)
from radixlm.arch.families.pools import pooled, scores, vectors
from radixlm.arch.names import AnyOf, Name, Named, Names
from radixlm.arch.recipes import swapped_halves
from radixlm.arch.spec import (
    Attention,
    Decoder,
    Dense,
    Disentangled,
    Encoder,
    Mlp,
    Norm,
    Pool,
    Rope,
    RopeScaling,
)
from radixlm.base.record import replace


def layer_norm(c: Config, key: str = "layer_norm_eps") -> Norm:
    return Norm(getattr(c, key), "layer", bias=True)


def bert_names(prefix: str) -> dict[str, Name]:
    """Hugging Face's names since BERT, under a model's own prefix."""
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
    """BERT unless told otherwise: ``offset`` of the position table (None: there is none);
    ``more`` are fields of Encoder."""
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
    """BERT's body; ``more`` are fields of Encoder."""
    c.refuse("position_embedding_type", "absolute")
    c.refuse("is_decoder", False)
    more.setdefault("token_types", c.type_vocab_size)
    return encoder(c, bert_names(prefix), offset=offset, **more)


def first_token(c: Config, name: str) -> tuple[tuple[Dense, Name], ...]:
    """A layer with tanh between the first token and the scores."""
    return ((Dense(c.hidden_size, c.hidden_size, "tanh"), name),)


def two_layers(c: Config, decoder: Decoder, act: Any = "tanh") -> Decoder:
    """RoBERTa's two layers over the first token."""
    dense = Dense(c.hidden_size, c.hidden_size, act)
    before = ((dense, "classifier.dense"),)
    return scores(c, decoder, "classifier.out_proj", before, pooling="cls", bias=True)


@family("BertModel")
def bert(c: Config) -> Decoder:
    return vectors(c, bert_like(c, "bert"), "cls")


@family("Contriever")
def contriever(c: Config) -> Decoder:
    return vectors(c, bert_like(c, "bert"), "mean")


@family("BertForSequenceClassification")
def bert_classifier(c: Config) -> Decoder:
    before = first_token(c, "bert.pooler.dense")
    return scores(c, bert_like(c, "bert"), "classifier", before, pooling="cls", bias=True)


def _roberta(c: Config) -> Decoder:
    """Positions begin after the padding token's id."""
    pad = c.get("pad_token_id", 1)
    return bert_like(c, "roberta", offset=pad + 1)


@family("RobertaModel", "XLMRobertaModel", "CamembertModel")
def roberta(c: Config) -> Decoder:
    return vectors(c, _roberta(c), "cls")


@family(
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
    "CamembertForSequenceClassification",
)
def roberta_classifier(c: Config) -> Decoder:
    return two_layers(c, _roberta(c))


def _roberta_xl(c: Config) -> Decoder:
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


@family("XLMRobertaXLModel")
def roberta_xl(c: Config) -> Decoder:
    return vectors(c, _roberta_xl(c), "cls")


@family("XLMRobertaXLForSequenceClassification")
def roberta_xl_classifier(c: Config) -> Decoder:
    return two_layers(c, _roberta_xl(c))


def _electra(c: Config) -> Decoder:
    width = c.embedding_size
    return bert_like(c, "electra", embed_dim=0 if width == c.hidden_size else width)


@family("ElectraModel")
def electra(c: Config) -> Decoder:
    return vectors(c, _electra(c), "cls")


@family("ElectraForSequenceClassification")
def electra_classifier(c: Config) -> Decoder:
    return two_layers(c, _electra(c), "gelu")


def _distilbert(c: Config) -> Decoder:
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


@family("DistilBertModel")
def distilbert(c: Config) -> Decoder:
    return vectors(c, _distilbert(c), "cls")


@family("DistilBertForSequenceClassification")
def distilbert_classifier(c: Config) -> Decoder:
    before = ((Dense(c.hidden_size, c.hidden_size, "relu"), "pre_classifier"),)
    return scores(c, _distilbert(c), "classifier", before, pooling="cls", bias=True)


def _albert(c: Config) -> Decoder:
    """All layers share the weights of one."""
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


@family("AlbertModel")
def albert(c: Config) -> Decoder:
    return vectors(c, _albert(c), "cls")


@family("AlbertForSequenceClassification")
def albert_classifier(c: Config) -> Decoder:
    before = first_token(c, "albert.pooler")
    return scores(c, _albert(c), "classifier", before, pooling="cls", bias=True)


def _mpnet(c: Config) -> Decoder:
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


@family("MPNetModel")
def mpnet(c: Config) -> Decoder:
    return vectors(c, _mpnet(c), "mean")


@family("MPNetForSequenceClassification")
def mpnet_classifier(c: Config) -> Decoder:
    return two_layers(c, _mpnet(c))


@family("T5EncoderModel")
def t5_encoder(c: Config) -> Decoder:
    """No positions but a bias by distance; scores are not scaled."""
    layer = "encoder.block.{i}.layer."
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
        "distances": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        **up,
    }
    mixer = attention(c, rope=None, scale=1.0, head_dim=c.d_kv)
    buckets = (c.relative_attention_num_buckets, c.relative_attention_max_distance)
    distances = (*buckets, c.num_attention_heads)
    ffn = Mlp(c.intermediate_size, act, gated=bool(gated))
    norm = Norm(c.layer_norm_epsilon)
    decoder = encoder(
        c, names, mixer=mixer, ffn=ffn, norm=norm, offset=None, layout="pre", distances=distances
    )
    return vectors(c, replace(decoder, embed_norm=None), "mean")


def _modernbert(c: Config) -> Decoder:
    """Most layers see their neighbourhood only; the first has no norm of its own before it."""
    norm = Norm(c.norm_eps, "layer", bias=c.norm_bias)
    every, thetas = (
        c.get("global_attn_every_n_layers", 3),
        ("global_rope_theta", "local_rope_theta"),
    )
    names: Names = {
        "embed": "model.embeddings.tok_embeddings",
        "embed_norm": "model.embeddings.norm",
        "norm": "model.final_norm",
        "norm1": AnyOf("model.layers.{i}.attn_norm", "model.layers.{i}.mlp_norm"),
        "norm2": "model.layers.{i}.mlp_norm",
        "mixer.qkv": "model.layers.{i}.attn.Wqkv",
        "mixer.o": "model.layers.{i}.attn.Wo",
        "ffn.up": "model.layers.{i}.mlp.Wi",
        "ffn.down": "model.layers.{i}.mlp.Wo",
    }

    def mixer(i: int) -> Attention:
        slides = is_sliding(c, i) if c.layer_types else bool(i % every)
        turn = rope(c, head_dim(c), "sliding_attention" if slides else "full_attention")
        theta = c.get(thetas[slides])
        turn = replace(turn, theta=float(theta)) if theta else turn
        span = c.local_attention // 2 + 1 if slides else 0
        return attention(
            c, rope=turn, qkv_bias=c.attention_bias, o_bias=c.attention_bias, window=span
        )

    ffn = mlp(c, act="hidden_activation", bias=c.mlp_bias)
    decoder = encoder(c, names, mixer=mixer, ffn=ffn, norm=norm, offset=None, layout="pre")
    first = replace(decoder.blocks[0], layout="prenorm_ffn_only")
    return replace(decoder, blocks=(first, *decoder.blocks[1:]))


@family("ModernBertModel")
def modernbert(c: Config) -> Decoder:
    return vectors(c, _modernbert(c), "cls")


@family("ModernBertForSequenceClassification")
def modernbert_classifier(c: Config) -> Decoder:
    act = activation(c, "classifier_activation")
    dense = Dense(c.hidden_size, c.hidden_size, act, c.classifier_bias)
    norm = Norm(c.norm_eps, "layer", bias=c.norm_bias)
    before = ((dense, "head.dense"), (norm, "head.norm"))
    pooling = c.classifier_pooling
    return scores(c, _modernbert(c), "classifier", before, pooling=pooling, bias=True)


def _rotary(c: Config, prefix: str, layer: str, names: Names, **parts: Any) -> Decoder:
    """BERT with rotary positions; ``names`` are those below ``layer`` that differ in each."""
    tables = f"{prefix}.embeddings."
    named: Names = {
        "embed": tables + "word_embeddings",
        "types": tables + "token_type_embeddings",
        "embed_norm": tables + "LayerNorm",
        "norm1": layer + "norm1",
        "norm2": layer + "norm2",
        **names,
    }
    types = c.get("type_vocab_size", 0)
    return encoder(c, named, offset=None, token_types=types, **parts)


def _nomic(c: Config) -> Decoder:
    """Config keys and names of the published checkpoints, which Hugging Face's class writes too."""
    c.refuse("prenorm", False)
    c.refuse("num_experts", 0)
    c.refuse("rotary_emb_interleaved", False)
    c.refuse("rotary_emb_fraction", 0, 1, 1.0)
    layer = "nomic_bert.encoder.layers.{i}."
    names: Names = {
        "embed_norm": "nomic_bert.emb_ln",
        "mixer.qkv": layer + "attn.Wqkv",
        "mixer.o": layer + "attn.out_proj",
        "ffn.up": (layer + "mlp.fc12", layer + "mlp.fc11"),
        "ffn.down": layer + "mlp.fc2",
    }
    turn = rope(c, head_dim(c))
    theta = c.get("rotary_emb_base")
    mixer = attention(c, rope=replace(turn, theta=float(theta)) if theta else turn)
    act = "silu" if c.get("activation_function") == "swiglu" else activation(c)
    ffn = Mlp(c.get("n_inner") or c.intermediate_size, act)
    norm = Norm(c.get("layer_norm_epsilon") or c.layer_norm_eps, "layer", bias=True)
    return _rotary(c, "nomic_bert", layer, names, mixer=mixer, ffn=ffn, norm=norm)


@family("NomicBertModel")
def nomic(c: Config) -> Decoder:
    return vectors(c, _nomic(c), "mean")


@family("NomicBertForSequenceClassification")
def nomic_classifier(c: Config) -> Decoder:
    before = first_token(c, "nomic_bert.pooler.dense")
    return scores(c, _nomic(c), "classifier", before, pooling="cls", bias=True)


def _ntk(turn: Rope, factor: float) -> Rope:
    """A larger base and slower turns by one fixed factor, as the first GTE checkpoints have it."""
    slower = RopeScaling("linear", (("factor", factor ** (2 / turn.dim)),))
    return replace(turn, theta=turn.theta * factor, scaling=slower)


def _gte(c: Config, prefix: str) -> Decoder:
    layer = prefix + ".encoder.layer.{i}."
    names: Names = {
        "mixer.qkv": layer + "attention.qkv_proj",
        "mixer.o": layer + "attention.o_proj",
        "norm1": layer + "attn_ln",
        "ffn.up": Named((layer + "mlp.up_gate_proj",), swapped_halves),
        "ffn.down": layer + "mlp.down_proj",
        "norm2": layer + "mlp_ln",
    }
    given = c.get("rope_scaling") or {}
    if given.get("type") == "ntk" and is_number(given.get("factor")) and not given.get("mixed_b"):
        turn = _ntk(Rope(head_dim(c), float(c.rope_theta)), float(given["factor"]))
    else:
        turn = rope(c, head_dim(c))
    mixer = attention(c, rope=turn, qkv_bias=True, o_bias=True)
    ffn = replace(mlp(c), down_bias=True)
    return _rotary(c, prefix, layer, names, mixer=mixer, ffn=ffn)


def _gte_prefix(c: Config) -> str:
    """The published checkpoints call the model "new"."""
    return "new" if c.architecture.startswith("New") else "gte"


@family("GteModel", "NewModel")
def gte(c: Config) -> Decoder:
    return vectors(c, _gte(c, _gte_prefix(c)), "cls")


@family("GteForSequenceClassification", "NewForSequenceClassification")
def gte_classifier(c: Config) -> Decoder:
    prefix = _gte_prefix(c)
    before = first_token(c, prefix + ".pooler.dense")
    return scores(c, _gte(c, prefix), "classifier", before, pooling="cls", bias=True)


def _jina(c: Config) -> Decoder:
    layer = "roberta.encoder.layers.{i}."
    names: Names = {
        "embed_norm": "roberta.emb_ln",
        "mixer.qkv": layer + "mixer.Wqkv",
        "mixer.o": layer + "mixer.out_proj",
        "ffn.up1": layer + "mlp.fc1",
        "ffn.down": layer + "mlp.fc2",
    }
    return _rotary(c, "roberta", layer, names, mixer=attention(c, qkv_bias=True, o_bias=True))


@family("JinaEmbeddingsV3Model")
def jina(c: Config) -> Decoder:
    return vectors(c, _jina(c), "mean")


@family("JinaEmbeddingsV3ForSequenceClassification")
def jina_classifier(c: Config) -> Decoder:
    return two_layers(c, _jina(c))


@family("CLIPModel", "CLIPTextModelWithProjection")
def clip(c: Config) -> Decoder:
    """The text side: a causal decoder whose end token carries the text."""
    layer = "text_model.encoder.layers.{i}."
    names: Names = {
        "embed": "text_model.embeddings.token_embedding",
        "positions": "text_model.embeddings.position_embedding",
        "norm": "text_model.final_layer_norm",
        "norm1": layer + "layer_norm1",
        "norm2": layer + "layer_norm2",
        "mixer.qkv": tuple(f"{layer}self_attn.{part}_proj" for part in "qkv"),
        "mixer.o": layer + "self_attn.out_proj",
        "ffn.up1": layer + "mlp.fc1",
        "ffn.down": layer + "mlp.fc2",
    }
    mixer = attention(c, rope=None, qkv_bias=True, o_bias=True)
    ffn = mlp(c, gated=False, bias=True)
    rows = (c.max_position_embeddings, 0)
    decoder = build_decoder(c, mixer, ffn, layer_norm(c), positions=rows, names=names, tied=True)
    # configs from before the end token was right: it is the last of the vocabulary
    end = c.vocab_size - 1 if c.eos_token_id == 2 else c.eos_token_id
    head = (Dense(c.hidden_size, c.projection_dim, bias=False),)
    return pooled(decoder, Pool("marked", head, "unit", marks=(end,)), pool_0="text_projection")


def _deberta(c: Config) -> Decoder:
    """Distances take part in every score; the tables know no positions."""
    c.refuse("relative_attention", True)
    c.refuse("share_att_key", True)
    c.refuse("position_biased_input", False)
    c.refuse("conv_kernel_size", 0)
    c.refuse("embedding_size", c.hidden_size)
    kinds = c.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if {str(kind).strip() for kind in kinds} != {"c2p", "p2c"}:
        raise c.error("pos_att_type", f"= {kinds!r} is not supported (must be c2p and p2c)")
    layer = "deberta.encoder.layer.{i}.attention.self."
    names: Names = {
        **bert_names("deberta"),
        "mixer.qkv": tuple(f"{layer}{part}_proj" for part in ("query", "key", "value")),
        "relative": "deberta.encoder.rel_embeddings",
        "relative_norm": "deberta.encoder.LayerNorm",
    }
    farthest = c.get("max_relative_positions", -1)
    farthest = farthest if farthest > 0 else c.max_position_embeddings
    norm = layer_norm(c) if "layer_norm" in str(c.get("norm_rel_ebd", "none")) else None
    relative = Disentangled(max(0, c.get("position_buckets", -1)), farthest, norm)
    scale = (3 * head_dim(c)) ** -0.5
    mixer = attention(c, rope=None, qkv_bias=True, o_bias=True, scale=scale)
    types = c.type_vocab_size
    return encoder(c, names, mixer=mixer, offset=None, token_types=types, disentangled=relative)


@family("DebertaV2Model")
def deberta(c: Config) -> Decoder:
    return vectors(c, _deberta(c), "mean")


@family("DebertaV2ForSequenceClassification")
def deberta_classifier(c: Config) -> Decoder:
    act = activation(c, "pooler_hidden_act")
    before = ((Dense(c.hidden_size, c.hidden_size, act), "pooler.dense"),)
    return scores(c, _deberta(c), "classifier", before, pooling="cls", bias=True)


def _eurobert(c: Config) -> Decoder:
    decoder = build_decoder(
        c, attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias), mlp(c)
    )
    return replace(decoder, encoder=Encoder(), norm=rms(c))


@family("EuroBertModel")
def eurobert(c: Config) -> Decoder:
    return vectors(c, _eurobert(c), "mean")


@family("EuroBertForSequenceClassification")
def eurobert_classifier(c: Config) -> Decoder:
    c.refuse("classifier_pooling", "bos", "mean", "late")
    pooling = {"bos": "cls"}.get(c.classifier_pooling, c.classifier_pooling)
    before = ((Dense(c.hidden_size, c.hidden_size, "gelu"), "dense"),)
    return scores(c, _eurobert(c), "classifier", before, pooling=pooling, bias=True)
