"""More encoders after BERT: the same layers under other names, or with norms elsewhere."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family
from radixlm.arch.families.encoder import bert_like, bert_names, encoder, first_token, two_layers
from radixlm.arch.families.pools import scores, vectors
from radixlm.arch.names import Name
from radixlm.arch.spec import Decoder
from radixlm.base.record import replace


def _classified(c: Config, decoder: Decoder, prefix: str) -> Decoder:
    """BERT's scores: a layer with tanh over the first token, then one a label."""
    before = first_token(c, f"{prefix}.pooler.dense")
    return scores(c, decoder, "classifier", before, pooling="cls", bias=True)


def _ernie(c: Config) -> Decoder:
    c.refuse("use_task_id", False)
    return bert_like(c, "ernie")


@family("ErnieModel")
def ernie(c: Config) -> Decoder:
    return vectors(c, _ernie(c), "cls")


@family("ErnieForSequenceClassification")
def ernie_classifier(c: Config) -> Decoder:
    return _classified(c, _ernie(c), "ernie")


def _data2vec(c: Config) -> Decoder:
    return bert_like(c, "data2vec_text", offset=c.get("pad_token_id", 1) + 1)


@family("Data2VecTextModel")
def data2vec(c: Config) -> Decoder:
    return vectors(c, _data2vec(c), "cls")


@family("Data2VecTextForSequenceClassification")
def data2vec_classifier(c: Config) -> Decoder:
    return two_layers(c, _data2vec(c))


def _before(c: Config, prefix: str, offset: int, **norms: str) -> Decoder:
    """Norms stand before the parts of a layer, and one behind the last; ``norms``: their names."""
    layer = prefix + ".encoder.layer.{i}."
    names: dict[str, Name] = {
        **bert_names(prefix),
        "norm1": layer + norms["first"],
        "norm2": layer + norms["second"],
        "norm": f"{prefix}.{norms['last']}",
    }
    return encoder(c, names, offset=offset, layout="pre", token_types=c.type_vocab_size)


def _megatron(c: Config) -> Decoder:
    decoder = _before(c, "bert", 0, first="attention.ln", second="ln", last="encoder.ln")
    return replace(decoder, embed_norm=None)


@family("MegatronBertModel")
def megatron(c: Config) -> Decoder:
    return vectors(c, _megatron(c), "cls")


@family("MegatronBertForSequenceClassification")
def megatron_classifier(c: Config) -> Decoder:
    return _classified(c, _megatron(c), "bert")


def _pre_norm(c: Config) -> Decoder:
    names = {"first": "attention.LayerNorm", "second": "intermediate.LayerNorm"}
    offset = c.get("pad_token_id", 1) + 1
    return _before(c, "roberta_prelayernorm", offset, **names, last="LayerNorm")


@family("RobertaPreLayerNormModel")
def roberta_pre_norm(c: Config) -> Decoder:
    return vectors(c, _pre_norm(c), "cls")


@family("RobertaPreLayerNormForSequenceClassification")
def roberta_pre_norm_classifier(c: Config) -> Decoder:
    return two_layers(c, _pre_norm(c))


def _rembert(c: Config) -> Decoder:
    names = {
        **bert_names("rembert"),
        "embed_proj": "rembert.encoder.embedding_hidden_mapping_in",
    }
    return encoder(c, names, token_types=c.type_vocab_size, embed_dim=c.input_embedding_size)


@family("RemBertModel")
def rembert(c: Config) -> Decoder:
    return vectors(c, _rembert(c), "cls")


@family("RemBertForSequenceClassification")
def rembert_classifier(c: Config) -> Decoder:
    return _classified(c, _rembert(c), "rembert")
