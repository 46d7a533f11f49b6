"""Reading config.json: Hugging Face's defaults, keys of transformers 4 and 5, and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from radixlm.arch.config_defaults import ALIASES, defaults
from radixlm.arch.hf import (
    context_len,
    describe,
    eos_token_ids,
    load_config,
    load_generation_config,
)
from radixlm.arch.registry import ARCHITECTURES, find
from radixlm.base.errors import CheckpointError

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}


def _without(key: str) -> dict[str, object]:
    return {name: value for name, value in LLAMA.items() if name != key}


# classes whose defaults are not a valid model (heads that do not divide, no experts, no vocabulary)
INCOMPLETE = {"dots1", "glm4_moe", "dbrx", "deberta-v2", "falcon_h1", "cohere_compass_text", "esm"}
# classes that derive further keys, which all published checkpoints contain
WORKED_OUT = {
    *("bamba", "embedding_gemma2_text", "eurobert", "gemma4_text", "gemma4_unified_text"),
    *("granitemoehybrid", "hrm_text", "mamba2", "ministral3", "nemotron_h", "olmo_hybrid"),
    "qwen4_exp_text",
}


@pytest.mark.parametrize(
    "model_type",
    [name for name in defaults() if name in CONFIG_MAPPING and name not in INCOMPLETE | WORKED_OUT],
)
def test_an_empty_config_has_the_defaults_of_its_class(model_type: str) -> None:
    if defaults()[model_type]["architecture"] not in ARCHITECTURES:
        pytest.skip("defaults of a text model whose family reads another architecture")
    theirs = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    if model_type == "deepseek_v2":
        theirs["num_experts_per_tok"] = 6  # the class has no valid default
    theirs["architectures"] = [defaults()[model_type]["architecture"]]
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    spellings = {one for key in keys for one in (key, *ALIASES.get(key, ()))}
    short = {k: v for k, v in theirs.items() if k in spellings or k == "architectures"}
    if model_type == "deepseek_v2":
        short["num_experts_per_tok"] = 6
    assert describe(short) == describe(theirs)
    assert load_config(theirs).model_type == model_type


def test_old_and_new_rope_keys_give_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    oldest = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    assert describe(LLAMA | new) == describe(LLAMA | old) == describe(LLAMA | oldest)
    plain = {"rope_theta": 5e5, "rope_scaling": None}
    assert describe(LLAMA | plain).blocks[0].mixer.rope.scaling is None
    assert describe(LLAMA | plain).blocks[0].mixer.rope.theta == 5e5


def test_gemma3_has_one_rope_for_each_layer_type() -> None:
    base = {"model_type": "gemma3_text", **SHAPE, "num_hidden_layers": 6, "head_dim": 16}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    blocks = describe(base | new).blocks
    assert blocks == describe(base | old).blocks
    assert [b.mixer.rope.theta for b in blocks] == [1e4] * 5 + [1e6]
    assert [b.mixer.rope.scaling is None for b in blocks] == [True] * 5 + [False]
    assert describe(base | {**old, "rope_local_base_freq": 7.0}).blocks[0].mixer.rope.theta == 7.0


def test_phi3_reads_yarn_and_su_as_longrope() -> None:
    raw = {"model_type": "phi3", **SHAPE, "original_max_position_embeddings": 32}
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    ropes = [
        describe(raw | {"rope_scaling": {"type": kind, **lists}}).blocks[0].mixer.rope
        for kind in ("su", "yarn", "longrope")
    ]
    assert ropes[0].scaling.kind == "longrope"
    assert ropes[0] == ropes[1] == ropes[2]


def test_a_nested_text_config_takes_the_composites_tied_embeddings() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    c = load_config({**raw, "text_config": text, "torch_dtype": "bfloat16"})
    assert (c.model_type, c.hidden_size, c.dtype) == ("gemma3_text", 64, "bfloat16")
    # the default of the class, because text configs omit many keys
    assert c.num_attention_heads == 8
    assert describe(c).tied
    ended = load_config({**raw, "text_config": text, "eos_token_id": [1, 106]})
    assert eos_token_ids(ended, {}) == (1, 106)
    untied = load_config({**raw, "text_config": text, "tie_word_embeddings": False})
    assert not describe(untied).tied


def test_dtype_is_found_under_both_names() -> None:
    assert load_config(LLAMA | {"torch_dtype": "float16"}).dtype == "float16"
    assert load_config(LLAMA | {"dtype": "bfloat16"}).dtype == "bfloat16"
    assert load_config(LLAMA).dtype is None


def test_architecture_and_model_type_imply_each_other() -> None:
    no_type, no_name = _without("model_type"), _without("architectures")
    assert describe(no_type) == describe(no_name) == describe(LLAMA)


def test_context_length() -> None:
    def length(**changes: object) -> int:
        return context_len(load_config(LLAMA | {"max_position_embeddings": 512} | changes))

    assert length() == 512
    assert length(rope_scaling={"type": "linear", "factor": 4.0}) == 2048
    assert length(rope_scaling={"type": "dynamic", "factor": 2.0}) == 1024
    before = {"original_max_position_embeddings": 128}
    assert length(rope_scaling={"type": "yarn", "factor": 4.0, **before}) == 512
    assert length(rope_scaling={"type": "yarn", "factor": 4.0}) == 2048


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2], "top_k": 7}')
    generation = load_generation_config(tmp_path)
    assert generation["top_k"] == 7
    assert eos_token_ids(load_config(LLAMA | {"eos_token_id": 2}), generation) == (5, 2)
    assert eos_token_ids(load_config(LLAMA | {"eos_token_id": None}), {}) == ()
    silent = load_config({key: value for key, value in LLAMA.items() if key != "eos_token_id"})
    assert eos_token_ids(silent, {}) == (2,), "the class's default"
    assert eos_token_ids(silent, {"eos_token_id": 9}) == (9,), "which no file says"


BAD_FILES = [
    (None, "does not exist"),
    ('{"hidden_size": 64, "archi', "not valid JSON"),
    ("[1, 2]", "JSON object"),
    ("{}", "architectures"),
    (json.dumps({"model_type": "no_such"}), "no_such"),
    (json.dumps({"architectures": "LlamaForCausalLM"}), "must be a list"),
    (json.dumps(LLAMA | {"hidden_size": -1}), "'hidden_size' = -1"),
    (json.dumps(LLAMA | {"hidden_size": True}), "hidden_size"),
    (json.dumps(LLAMA | {"num_hidden_layers": "2"}), "num_hidden_layers"),
    (json.dumps(LLAMA | {"num_attention_heads": 7}), "num_attention_heads"),
    (json.dumps(LLAMA | {"num_key_value_heads": 3}), "not a multiple of the 3"),
    (json.dumps(LLAMA | {"rms_norm_eps": "tiny"}), "rms_norm_eps"),
    (json.dumps(LLAMA | {"rope_theta": 0}), "rope_theta"),
    (json.dumps(LLAMA | {"rope_scaling": 3}), "rope_parameters"),
    (json.dumps(LLAMA | {"rope_parameters": {"factor": [], "rope_type": "linear"}}), "factor"),
    (json.dumps(LLAMA | {"intermediate_size": 1.5}), "intermediate_size"),
    (
        json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}),
        "'hidden_size' is missing",
    ),
    (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "'vocab_size' is missing"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_files_are_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        describe(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_invalid_utf8_and_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_bytes(b'{"x": "\xff\xfe"}')
    (tmp_path / "b" / "config.json").mkdir(parents=True)
    for folder in ("a", "b"):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            describe(tmp_path / folder)


def test_unknown_architectures_suggest_the_nearest_name() -> None:
    with pytest.raises(CheckpointError, match="nearest: Qwen3ForCausalLM"):
        find("Qwen3ForCausalLm")
    with pytest.raises(CheckpointError, match=r"unknown architecture 'Zzz'; docs"):
        find("Zzz")


DESCRIBED = ("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "PhiForCausalLM")
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.sampled_from(DESCRIBED), st.data())
def test_nonsense_in_any_key_is_an_error_of_the_checkpoint(architecture: str, data: Any) -> None:
    c = load_config({"architectures": [architecture], **SHAPE})
    raw = {key: c.get(key) for key in c}
    keys = st.sampled_from([*sorted(raw), "rope_scaling", "text_config", "torch_dtype"])
    for key, value in data.draw(st.dictionaries(keys, NONSENSE, min_size=1, max_size=3)).items():
        raw[key] = value
    try:
        c = load_config(raw)
        describe(c), context_len(c), eos_token_ids(c, {})
    except CheckpointError as error:
        assert "config.json" in str(error)
