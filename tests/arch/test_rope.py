"""Rotary frequencies against Hugging Face's, over random parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from radixlm.arch.families.builders import rope
from radixlm.arch.hf import load_config
from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import Rope

factors = st.floats(1.0, 64.0)
lengths = st.integers(4, 4096)
DIM = 16
FACTOR_LIST = st.lists(st.floats(0.5, 60.0), min_size=DIM // 2, max_size=DIM // 2)

KINDS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": lengths,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": factors,
            "original_max_position_embeddings": lengths,
        },
        optional={
            "attention_factor": st.floats(0.1, 3.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
        },
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("longrope"),
            "original_max_position_embeddings": lengths,
            "short_factor": FACTOR_LIST,
            "long_factor": FACTOR_LIST,
        },
        optional={"factor": factors, "attention_factor": st.floats(0.1, 3.0)},
    ),
)


def _configs(parameters: dict, theta: float) -> tuple[LlamaConfig, Rope]:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    parameters = {"rope_theta": theta, **parameters}
    theirs = LlamaConfig(**shape, rope_parameters=dict(parameters))
    raw = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
    return theirs, rope(load_config({**raw, **shape, "rope_parameters": parameters}), DIM)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(KINDS, st.floats(100.0, 1e7), st.integers(1, 8192))
def test_frequencies_equal_hugging_face(parameters: dict, theta: float, seq_len: int) -> None:
    theirs, ours = _configs(parameters, theta)
    make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, expected_factor = make(theirs, "cpu", seq_len=seq_len)
    frequencies, factor = inv_freq(ours, seq_len)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-6, atol=1e-7)
    assert factor == pytest.approx(float(expected_factor), rel=1e-12)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.sampled_from(["dynamic", "longrope"]), st.integers(1, 1400))
def test_a_forward_pass_uses_the_set_of_its_longest_position(kind: str, length: int) -> None:
    parameters = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        parameters["short_factor"] = [1.0 + i for i in range(DIM // 2)]
        parameters["long_factor"] = [9.0 + i for i in range(DIM // 2)]
        parameters["original_max_position_embeddings"] = 128
    theirs, ours = _configs(parameters, 10000.0)
    positions = torch.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    frequencies, factor = inv_freq(ours, length)
    angles = positions[0, :, None].float() * torch.from_numpy(frequencies)
    torch.testing.assert_close(cos[0, :, : DIM // 2], angles.cos() * factor, atol=2e-4, rtol=0)
    torch.testing.assert_close(sin[0, :, : DIM // 2], angles.sin() * factor, atol=2e-4, rtol=0)


def test_without_scaling() -> None:
    frequencies, factor = inv_freq(Rope(8, 10000.0))
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    assert factor == 1.0


def test_only_two_kinds_depend_on_the_length() -> None:
    for kind, depends in (("linear", False), ("dynamic", True)):
        _, ours = _configs({"rope_type": kind, "factor": 2.0}, 10000.0)
        assert ours.depends_on_length is depends
    assert not Rope(8, 10000.0).depends_on_length
