"""BERT's layers as a causal language model (``is_decoder``), without cross-attention."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import bert
from radixlm.arch.families.builders import activation
from radixlm.arch.names import AnyOf, Named
from radixlm.arch.recipes import JoinedTables
from radixlm.arch.spec import Decoder, HeadLayer, Norm
from radixlm.base.record import replace


def causal(c: Config, encoder: Decoder, head: tuple[str, str, str], act: Any = "gelu") -> Decoder:
    """``encoder`` with causal attention and a head of two layers. ``head``: the names of its dense
    layer, of its norm, and of the module with its bias. Every token is of type 0, whose embedding
    joins the table of positions."""
    dense, norm, bias = head
    assert encoder.positions is not None and encoder.encoder is not None
    names: dict[str, Any] = {**encoder.names, "head_dense": dense, "head_norm": norm}
    names["head"] = AnyOf(bias + ".decoder", bias)
    if encoder.encoder.token_types:
        types, further = names["types"], 0
        if isinstance(types, Named):  # they are joined with a table of tasks
            types, further = types.templates, encoder.encoder.token_types
        tables = (names["positions"], *(types if further else (types,)))
        names["positions"] = Named(tables, JoinedTables(encoder.positions[0], further))
    return replace(
        encoder,
        encoder=None,
        tied=c.tie_word_embeddings,
        head_bias=True,
        head_layer=HeadLayer(act, bert.layer_norm(c), bias=True),
        norm=encoder.norm if encoder.encoder.has_final_norm else Norm(0.0, "none", affine=False),
        names=names,
    )


def _as_decoder(c: Config) -> Config:
    c.refuse("is_decoder", True)
    c.refuse("add_cross_attention", False)
    return c.replace(is_decoder=False)


def _cls(c: Config, encoder: Decoder) -> Decoder:
    """With BERT's head."""
    head, layer = "cls.predictions", "cls.predictions.transform."
    return causal(c, encoder, (layer + "dense", layer + "LayerNorm", head), activation(c))


def _lm_head(c: Config, encoder: Decoder) -> Decoder:
    """With RoBERTa's head."""
    return causal(c, encoder, ("lm_head.dense", "lm_head.layer_norm", "lm_head"))


def bert_decoder(c: Config) -> Decoder:
    return _cls(c, bert.bert_like(_as_decoder(c), "bert"))


def ernie(c: Config) -> Decoder:
    return _cls(c, bert.ernie(_as_decoder(c)))


def megatron(c: Config) -> Decoder:
    return _cls(c, bert.megatron(_as_decoder(c)))


def roberta(c: Config) -> Decoder:
    return _lm_head(c, bert.roberta(_as_decoder(c)))


def data2vec(c: Config) -> Decoder:
    return _lm_head(c, bert.data2vec(_as_decoder(c)))


def pre_norm(c: Config) -> Decoder:
    return _lm_head(c, bert.pre_norm(_as_decoder(c)))


def roberta_xl(c: Config) -> Decoder:
    return _lm_head(c, bert.roberta_xl(_as_decoder(c)))
