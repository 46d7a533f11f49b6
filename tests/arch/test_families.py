"""Every architecture against Hugging Face: tiny random models, our records run by the eager
driver."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from radixlm.arch.hf import describe, load_config
from radixlm.arch.registry import ARCHITECTURES
from radixlm.base.errors import CheckpointError
from tests.arch import oracle, random_configs, test_custom
from tests.fakes.decoder_configs import DECODER_CONFIGS

MOST_ERROR = 2e-5


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", oracle.TINY_CONFIGS)
def test_logits_equal_hugging_face(architecture: str, tmp_path: Path) -> None:
    model = oracle.make(architecture, tmp_path)
    error, left_over, nudged = oracle.compare(model, tmp_path)
    assert left_over == []
    assert error < MOST_ERROR
    assert nudged > 20 * MOST_ERROR  # the comparison sees a single changed weight


@pytest.mark.parametrize("architecture", random_configs.FLAGS)
@pytest.mark.parametrize("seed", range(2))
def test_random_configs_equal_hugging_face(architecture: str, seed: int, tmp_path: Path) -> None:
    _check_random(architecture, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", random_configs.FLAGS)
def test_many_random_configs_equal_hugging_face(architecture: str, tmp_path: Path) -> None:
    for seed in range(100, 130):
        _check_random(architecture, seed, tmp_path / str(seed))


def _check_random(architecture: str, seed: int, folder: Path) -> None:
    rng = random.Random(f"{architecture}{seed}")
    changes = random_configs.draw(architecture, rng)
    model = oracle.make(architecture, folder, seed, **changes)
    error, left_over, _ = oracle.compare(model, folder, rng.choice([12, 40]))
    assert left_over == [], changes
    assert error < MOST_ERROR, changes


def test_every_family_has_a_tiny_config() -> None:
    tiny = set(oracle.TINY_CONFIGS) | set(DECODER_CONFIGS)
    # tests/models/test_pooling_heads, tests/multimodal
    elsewhere = (
        "bert",
        "encoders",
        "heads",
        "media.composite",
        *(
            "chameleon",
            "deepseek_ocr",
            "mllama",
            "molmo",
            "moondream",
            "whisper",
        ),  # tests/multimodal
        "published",  # tests/models/test_remote_code_models
        "drafts",  # test_draft
        "own_code",  # tests/models/test_own_code_models
        *(
            "sarvam",
            "plamo",
            "jet_nemotron",
            "k2_spark",
            "minicpm_sala",
        ),  # tests/models/test_sarvam and so on
    )
    modules = {name: row.partition(":")[0] for name, row in ARCHITECTURES.items()}
    writers = {n for n, module in modules.items() if module not in elsewhere}
    in_multimodal = ("Ernie4_5_VL", "GLM4V")  # tests/multimodal
    writers -= {name for name in writers if name.startswith(in_multimodal)}
    writers -= {"BailingMoeV3ForCausalLM", "NemotronHPuzzleForCausalLM"}  # tests/models
    compared = tiny | set(test_custom.CASES)
    writers |= {name for name in compared if modules[name] in ("media.composite", "own_code")}
    assert writers == compared | oracle.ALIASES


REFUSED = [
    ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("GptOssForCausalLM", {"swiglu_limit": -1.0}, "swiglu_limit"),
    ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method"),
    ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_attention_heads"),
    ("LlamaForCausalLM", {"hidden_size": 66}, "hidden_size"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "spiral", "factor": 2}}, "rope_parameters"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "rope_parameters"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_parameters"),
    ("GlmForCausalLM", {"partial_rotary_factor": 0.3, "head_dim": 10}, "rope_parameters"),
    ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
    (
        "Gemma2ForCausalLM",
        {"layer_types": ["linear_attention"] * 3, "sliding_window": 4},
        "layer_types",
    ),
]


@pytest.mark.parametrize(("architecture", "changes", "key"), REFUSED)
def test_unsupported_settings_are_refused_by_name(architecture, changes, key) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        describe({"architectures": [architecture], **oracle.TINY, **changes})
    assert "config.json" in str(caught.value)


def test_a_loaded_config_may_be_described_directly() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **oracle.TINY}
    assert describe(load_config(raw)) == describe(raw)
