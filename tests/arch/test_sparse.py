"""Families of ``families/sparse.py``: published spellings of their configs, and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import transformers

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from tests.fakes.tiny_checkpoint import ARCHITECTURES, TINY
from tests.models import later_fuzz


def _raw(architecture: str, **changes: Any) -> dict[str, Any]:
    settings = {**TINY, **ARCHITECTURES[architecture], **changes}
    given = {key: value for key, value in settings.items() if value is not None}
    return {"architectures": [architecture], **given}


@pytest.mark.parametrize("architecture", ["HYV4ForCausalLM", "Dots3NoteForCausalLM"])
@pytest.mark.parametrize("seed", range(12))
def test_a_config_as_published_means_what_its_class_makes_of_it(
    architecture: str, seed: int
) -> None:
    raw = _raw(architecture, **later_fuzz.draw(architecture, random.Random(seed)))
    made = getattr(transformers, architecture).config_class(**raw)
    assert describe(raw) == describe({**json.loads(made.to_json_string()), **_name(architecture)})


def _name(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]}


@pytest.mark.parametrize("architecture", ["HYV4ForCausalLM", "Dots3NoteForCausalLM"])
def test_what_a_config_leaves_out_is_as_its_class_says(architecture: str) -> None:
    made = getattr(transformers, architecture).config_class()
    needed = {key: made.to_dict()[key] for key in (*_NEEDED, *_name(architecture)) if key in _SIZES}
    assert describe({**needed, **_name(architecture)}) == describe(
        {**json.loads(made.to_json_string()), **_name(architecture)}
    )


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SIZES = set(_NEEDED)

REFUSED = [
    ("HYV4ForCausalLM", {"indexer_types": ["shared"] * 4}, "indexer_types"),
    ("HYV4ForCausalLM", {"indexer_types": ["full"]}, "indexer_types"),
    ("HYV4ForCausalLM", {"indexer_types": ["half"] * 4}, "indexer_types"),
    ("HYV4ForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit"),
    ("HYV4ForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
    ("HYV4ForCausalLM", {"hc_mult": 0}, "hc_mult"),
    ("HYV4ForCausalLM", {"index_head_dim": 4}, "index_head_dim"),
    ("HYV4ForCausalLM", {"q_lora_rank": None}, "q_lora_rank"),
    ("Dots3NoteForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("Dots3NoteForCausalLM", {"per_layer_config": {"0": {"index_topk": 4}}}, "per_layer_config"),
    ("Dots3NoteForCausalLM", {"swa_num_key_value_heads": 1}, "num_key_value_heads"),
    ("Dots3NoteForCausalLM", {"index_topk": 0}, "index_topk"),
]


@pytest.mark.parametrize(("architecture", "changes", "key"), REFUSED)
def test_what_no_record_can_say_is_refused_by_name(
    architecture: str, changes: dict[str, Any], key: str
) -> None:
    raw = {**_raw(architecture), **changes}
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        describe(raw)
