"""Encoders as embedding models and as cross-encoders: one row each.

``<stem>Model`` and ``<stem>ForMaskedLM`` give vectors, ``<stem>ForSequenceClassification``
scores, ``<stem>ForTokenClassification`` scores of each token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import bert
from radixlm.arch.families import rotary_encoders as rotary
from radixlm.arch.families.builders import activation
from radixlm.arch.families.pools import scores, vectors
from radixlm.arch.names import AnyOf
from radixlm.arch.registry import Family
from radixlm.arch.spec import Decoder, Dense, Norm
from radixlm.base.record import Record

Head = Callable[[Config, Decoder], Decoder]


class Row(Record):
    """An encoder: what its vector is made of (see ``spec.Pool``), and its classification head."""

    body: Family
    pooling: str
    head: Head


def _pooler(name: str) -> Head:
    """BERT's head: the layer ``name`` with tanh over the first token, then a score a label."""
    return partial(_first_token, name=name)


def _first_token(
    c: Config, decoder: Decoder, name: str, act: Any = "tanh", out: str = "classifier"
) -> Decoder:
    """A layer ``name`` with an activation over the first token, then a score a label."""
    before = ((Dense(c.hidden_size, c.hidden_size, act), name),)
    return scores(c, decoder, out, before, pooling="cls", bias=True)


def _gte_head(c: Config, decoder: Decoder) -> Decoder:
    return _first_token(c, decoder, f"{rotary.gte_prefix(c)}.pooler.dense")


def _deberta_head(c: Config, decoder: Decoder) -> Decoder:
    return _first_token(c, decoder, "pooler.dense", activation(c, "pooler_hidden_act"))


def _roformer_head(c: Config, decoder: Decoder) -> Decoder:
    return _TWO_LAYERS(c, decoder, act=activation(c))


def _modernbert_layers(c: Config) -> Any:
    """The layers before the classifier."""
    act = activation(c, "classifier_activation")
    dense = Dense(c.hidden_size, c.hidden_size, act, c.classifier_bias)
    return (dense, "head.dense"), (Norm(c.norm_eps, "layer", bias=c.norm_bias), "head.norm")


def _modernbert_head(c: Config, decoder: Decoder) -> Decoder:
    before, pooling = _modernbert_layers(c), c.classifier_pooling
    return scores(c, decoder, "classifier", before, pooling=pooling, bias=True)


def _eurobert_head(c: Config, decoder: Decoder) -> Decoder:
    c.refuse("classifier_pooling", "bos", "mean", "late")
    pooling = {"bos": "cls"}.get(c.classifier_pooling, c.classifier_pooling)
    before = ((Dense(c.hidden_size, c.hidden_size, "gelu"), "dense"),)
    return scores(c, decoder, "classifier", before, pooling=pooling, bias=True)


_TWO_LAYERS = partial(_first_token, name="classifier.dense", out="classifier.out_proj")  # RoBERTa's
_ROBERTA = Row(bert.roberta, "cls", _TWO_LAYERS)
_GTE = Row(rotary.gte, "cls", _gte_head)

ENCODERS: Mapping[str, Row] = {
    "Albert": Row(bert.albert, "cls", _pooler("albert.pooler")),
    "Bert": Row(partial(bert.bert_like, prefix="bert"), "cls", _pooler("bert.pooler.dense")),
    "Camembert": _ROBERTA,
    "Data2VecText": Row(bert.data2vec, "cls", _TWO_LAYERS),
    "DebertaV2": Row(bert.deberta, "mean", _deberta_head),
    "DistilBert": Row(
        bert.distilbert, "cls", partial(_first_token, name="pre_classifier", act="relu")
    ),
    "Electra": Row(bert.electra, "cls", partial(_TWO_LAYERS, act="gelu")),
    "Ernie": Row(bert.ernie, "cls", _pooler("ernie.pooler.dense")),
    "Esm": Row(rotary.esm, "mean", _TWO_LAYERS),
    "Esmc": Row(rotary.esmc, "mean", _TWO_LAYERS),
    "EuroBert": Row(rotary.eurobert, "mean", _eurobert_head),
    "Gte": _GTE,
    "GteNew": _GTE,
    "JinaEmbeddingsV3": Row(rotary.jina, "mean", _TWO_LAYERS),
    "MegatronBert": Row(bert.megatron, "cls", _pooler("bert.pooler.dense")),
    "ModernBert": Row(rotary.modernbert, "cls", _modernbert_head),
    "MPNet": Row(bert.mpnet, "mean", _TWO_LAYERS),
    "New": _GTE,
    "NomicBert": Row(rotary.nomic, "mean", _pooler("nomic_bert.pooler.dense")),
    "RemBert": Row(bert.rembert, "cls", _pooler("rembert.pooler.dense")),
    "Roberta": _ROBERTA,
    "RobertaPreLayerNorm": Row(bert.pre_norm, "cls", _TWO_LAYERS),
    "RoFormer": Row(rotary.roformer, "cls", _roformer_head),
    "XLMRoberta": _ROBERTA,
    "XLMRobertaXL": Row(bert.roberta_xl, "cls", _TWO_LAYERS),
}


def embedding(c: Config) -> Decoder:
    """<stem>Model or <stem>ForMaskedLM: vectors of unit length."""
    row = _row(c)
    return vectors(c, row.body(c), row.pooling)


def classifier(c: Config) -> Decoder:
    """<stem>ForSequenceClassification: scores."""
    row = _row(c)
    return row.head(c, row.body(c))


def token_classifier(c: Config) -> Decoder:
    """<stem>ForTokenClassification: scores of each token."""
    row = _row(c)
    before = _modernbert_layers(c) if row.head is _modernbert_head else ()
    head = AnyOf("classifier", "score")
    return scores(c, row.body(c), head, before, pooling="steps", bias=True)


def _row(c: Config) -> Row:
    ends = "(Model|ForMaskedLM|ForSequenceClassification|ForTokenClassification)$"
    stem = re.sub(ends, "", c.architecture)
    if stem not in ENCODERS:  # the text model of a multimodal checkpoint
        raise c.error("model_type", f"= {c.model_type!r} is an encoder, not a language model")
    return ENCODERS[stem]
