"""Role tables: alternatives, prefixes of composite checkpoints, and ignorable tensors."""

from __future__ import annotations

import pytest

from radixlm.arch.hf import describe
from radixlm.arch.names import (
    AnyOf,
    Named,
    is_ignorable,
    layers_left_out,
    prefix_of,
    spellings,
)
from radixlm.arch.recipes import transposed
from radixlm.arch.spec import Decoder

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}


def _decoder(architecture: str = "LlamaForCausalLM", **more: object) -> Decoder:
    return describe({"architectures": [architecture], **SHAPE, **more})


def test_a_role_of_the_family_overrides_the_default() -> None:
    assert spellings({"norm": "x.norm"}, "norm") == (Named(("x.norm",)),)
    assert spellings({}, "norm") == (Named(("model.norm",)),)
    with pytest.raises(KeyError):
        spellings({}, "no.such.role")


def test_spellings_are_flat_and_in_order() -> None:
    fused = Named(("c",), transposed)
    table = {"role": AnyOf(("a", "b"), AnyOf(fused, "d"))}
    assert spellings(table, "role") == (Named(("a", "b")), fused, Named(("d",)))


def test_split_tensors_are_preferred_to_fused_ones() -> None:
    split, fused = spellings(_decoder().names, "mixer.qkv")
    assert [t.rsplit(".", 1)[1] for t in split.templates] == ["q_proj", "k_proj", "v_proj"]
    assert fused.templates == ("model.layers.{i}.self_attn.qkv_proj",)


@pytest.mark.parametrize(
    ("stored", "prefix"),
    [
        ("model.embed_tokens.weight", "model."),
        ("embed_tokens.weight", ""),
        ("language_model.model.embed_tokens.weight", "language_model.model."),
        ("model.language_model.embed_tokens.weight", "model.language_model."),
        ("nowhere", "model."),
    ],
)
def test_prefix_is_where_the_embedding_is(stored: str, prefix: str) -> None:
    assert prefix_of(_decoder(), {stored}) == ("model.", prefix)


def test_prefix_of_a_bare_gpt2() -> None:
    decoder = _decoder("GPT2LMHeadModel")
    assert prefix_of(decoder, {"wte.weight"}) == ("transformer.", "")


def test_ignorable_tensors() -> None:
    tied, untied = _decoder(tie_word_embeddings=True), _decoder()
    assert is_ignorable("lm_head.weight", tied)
    assert not is_ignorable("lm_head.weight", untied)
    assert is_ignorable("model.layers.0.self_attn.rotary_emb.inv_freq", untied)
    assert is_ignorable("transformer.h.1.attn.masked_bias", untied)
    assert is_ignorable("model.layers.2.eh_proj.weight", untied)  # a layer after the last
    assert not is_ignorable("model.layers.1.eh_proj.weight", untied)
    assert is_ignorable("model.mtp_layers.0.input_proj.weight", untied)
    assert is_ignorable("vision_tower.encoder.layers.0.fc1.weight", untied)
    assert not is_ignorable("model.layers.0.visual.weight", untied)
    assert not is_ignorable("model.layers.1.self_attn.q_proj.bias", untied)


def test_extra_layers_are_not_mtp_layers() -> None:
    decoder = _decoder()  # of two layers
    norm, query = "input_layernorm.weight", "self_attn.q_proj.weight"
    behind = [f"model.layers.{i}.{name}" for i in (2, 3, 4) for name in (norm, query)]
    encoders = [f"vision_tower.blocks.7.{norm}", f"mtp.layers.9.{norm}", "lm_head.weight"]
    predicts = "model.layers.4.eh_proj.weight"
    assert layers_left_out([*encoders, *behind, predicts], decoder) == [2, 3]
    assert layers_left_out([*encoders, f"model.layers.1.{norm}"], decoder) == []
