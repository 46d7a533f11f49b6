"""The families of `families/sparse.py`: published spellings of their configs, and refused
values."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import transformers

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from tests.fakes.text_models import class_of
from tests.fakes.tiny_checkpoint import ARCHITECTURES, TINY
from tests.models import random_decoder_configs

OURS = [
    *("HYV4ForCausalLM", "Dots3NoteForCausalLM", "MiniMaxM3VLForCausalLM"),
    *("Glm5NextForCausalLM", "DeepseekV4ForCausalLM"),
]


def _raw(architecture: str, **changes: Any) -> dict[str, Any]:
    settings = {**TINY, **ARCHITECTURES[architecture], **changes}
    given = {key: value for key, value in settings.items() if value is not None}
    return {"architectures": [architecture], **given}


@pytest.mark.parametrize("architecture", OURS)
@pytest.mark.parametrize("seed", range(12))
def test_a_published_config_equals_its_class(architecture: str, seed: int) -> None:
    raw = _raw(architecture, **random_decoder_configs.draw(architecture, random.Random(seed)))
    made = class_of(architecture).config_class(**raw)
    assert describe(raw) == describe({**json.loads(made.to_json_string()), **_name(architecture)})


def _name(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]}


@pytest.mark.parametrize("architecture", OURS)
def test_omitted_keys_have_the_defaults_of_the_class(architecture: str) -> None:
    made = class_of(architecture).config_class()
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
    ("HYV4ForCausalLM", {"hc_mult": 0}, "hc_mult"),
    ("HYV4ForCausalLM", {"index_head_dim": 4}, "index_head_dim"),
    ("HYV4ForCausalLM", {"q_lora_rank": None}, "q_lora_rank"),
    ("Dots3NoteForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("Dots3NoteForCausalLM", {"per_layer_config": {"0": {"index_topk": 4}}}, "per_layer_config"),
    ("Dots3NoteForCausalLM", {"swa_num_key_value_heads": 1}, "num_key_value_heads"),
    ("Dots3NoteForCausalLM", {"index_topk": 0}, "index_topk"),
    ("DeepseekV4ForCausalLM", {"scoring_func": "softplus"}, "scoring_func"),
    ("DeepseekV4ForCausalLM", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("DeepseekV4ForCausalLM", {"compress_ratios": [4, 0, 8, 128], "layer_types": None}, "8 tokens"),
    ("DeepseekV4ForCausalLM", {"compress_rate_hca": 0}, "compress_rates"),
    ("DeepseekV4ForCausalLM", {"o_groups": 3}, "o_groups"),
    ("DeepseekV4ForCausalLM", {"index_head_dim": 4}, "index_head_dim"),
    ("DeepseekV4ForCausalLM", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
    (
        "DeepseekV4ForCausalLM",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "rope_parameters",
    ),
    ("Glm5NextForCausalLM", {"indexer_types": ["shared"] * 5}, "indexer_types"),
    (
        "Glm5NextForCausalLM",
        {"layer_types": ["indexed_attention", "linear_attention", "indexed_attention"] + [""] * 2},
        "indexer_types",
    ),
    ("Glm5NextForCausalLM", {"layer_types": ["sliding_attention"] * 5}, "layer_types"),
    ("Glm5NextForCausalLM", {"index_kpool": 4}, "index_kpool"),
    ("Glm5NextForCausalLM", {"index_kpool": 0}, "index_kpool"),
    ("Glm5NextForCausalLM", {"index_kpool_always_select_tail": False}, "always_select_tail"),
    ("Glm5NextForCausalLM", {"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
    ("Glm5NextForCausalLM", {"linear_lower_bound": 0.0}, "linear_lower_bound"),
    ("MiniMaxM3VLForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    ("MiniMaxM3VLForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit"),
    ("MiniMaxM3VLForCausalLM", {"index_n_heads": 3}, "num_attention_heads"),
    ("MiniMaxM3VLForCausalLM", {"index_head_dim": 8}, "index_head_dim"),
    ("MiniMaxM3VLForCausalLM", {"index_block_size": 0}, "index_block_size"),
    ("MiniMaxM3VLForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("MiniMaxM3VLForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
]


@pytest.mark.parametrize(("architecture", "changes", "key"), REFUSED)
def test_unsupported_settings_are_refused_by_name(
    architecture: str, changes: dict[str, Any], key: str
) -> None:
    raw = {**_raw(architecture), **changes}
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key}"):
        describe(raw)


def test_minimax_m3_as_published() -> None:
    sparse = {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 15,
        "sparse_block_size": 3,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 2,
        "sparse_attention_freq": [0, 1, 1, 0],
    }
    own = [key for key in ARCHITECTURES[_M3] if key.startswith("index_") or key.endswith("_types")]
    raw = _raw(
        _M3, **dict.fromkeys(own), sparse_attention_config=sparse, moe_layer_freq=[0, 1, 1, 0]
    )
    raw["hidden_act"] = "swigluoai"
    made = transformers.MiniMaxM3VLTextConfig(**raw)
    assert describe(raw) == describe({**json.loads(made.to_json_string()), **_name(_M3)})


_M3 = "MiniMaxM3VLForCausalLM"
