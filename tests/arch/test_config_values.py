"""A config.json with an unknown value is refused by that value, not read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.configuration_utils import _LEGACY_LAYER_TYPE_REMAP, ALLOWED_LAYER_TYPES
from transformers.utils.quantization_config import QuantizationMethod

from radixlm.arch.config_values import DTYPES, LAYER_TYPES
from radixlm.arch.hf import load_config
from radixlm.arch.quant_methods import KNOWN_METHODS
from radixlm.base.errors import CheckpointError

TINY = json.loads(Path("src/radixlm/assets/radix-tiny/config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"torch_dtype": "bfloat17"}, "'dtype' = 'bfloat17'.*did you mean 'bfloat16'"),
        ({"dtype": "fp4000"}, "'dtype' = 'fp4000'"),
        ({"torch_dtype": 16}, "'dtype' = 16"),
        (
            {"layer_types": ["full_attention"] * 5 + ["sliding_attn"]},
            r"\[5\] = 'sliding_attn'",
        ),
        ({"layer_types": [1, 2, 3, 4, 5, 6]}, r"'layer_types'\[0\] = 1"),
        ({"layer_types": "abcdef"}, "'layer_types' = 'abcdef' must be a list"),
        ({"quantization_config": {"quant_method": "awk"}}, "'awk'.*did you mean 'awq'"),
        ({"quantization_config": {"quant_method": 4}}, "'quant_method' = 4"),
        ({"quantization_config": "fp8"}, "'quantization_config' = 'fp8' must be an object"),
    ],
)
def test_an_unknown_value_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        load_config(TINY | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": None},
        {"torch_dtype": "torch.float16"},
        {"dtype": "auto"},
        {"layer_types": None},
        {"layer_types": ["full_attention"] * 6},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"quantization_config": {"quant_method": "FP8"}},
    ],
)
def test_values_of_checkpoints_are_accepted(changes: dict[str, Any]) -> None:
    assert load_config(TINY | changes).num_hidden_layers == 6


def test_every_value_of_transformers_is_known() -> None:
    assert {*ALLOWED_LAYER_TYPES, *_LEGACY_LAYER_TYPE_REMAP} <= LAYER_TYPES
    assert {method.value for method in QuantizationMethod} <= KNOWN_METHODS
    assert {"float32", "bfloat16", "float16", "float64"} <= DTYPES
