"""Hugging Face's own models on the paged cache: the same tokens as its own cache gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.entrypoints.offline import Engine

tf = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "gemma2": lambda: tf.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=8, query_pre_attn_scalar=16
    ),
    "cohere": lambda: tf.CohereConfig(**SIZES),
}
PROMPTS = ([*range(5, 45)], [*range(5, 30), 7, 8, 9])


def saved(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08)
    model.save_pretrained(folder)
    return model


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(
        model_path=str(folder), dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
        max_running_requests=4, chunked_prefill_size=16, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_in_chunks_and_from_the_prefix_cache(name: str, tmp_path: Path) -> None:
    model = saved(CONFIGS[name](), tmp_path)
    engine = engine_of(tmp_path, model_impl="transformers")
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    try:
        alone = []
        for ids in PROMPTS:
            want = model.generate(
                torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            got = engine.generate(input_ids=ids, sampling_params=sampling)
            assert got["output_ids"] == want[0, len(ids) :].tolist()
            alone.append(got["output_ids"])
        together = engine.generate(input_ids=list(PROMPTS), sampling_params=sampling)
        assert [one["output_ids"] for one in together] == alone
        assert all(one["meta_info"]["cached_tokens"] >= 16 for one in together)
    finally:
        engine.shutdown()


def test_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    saved(CONFIGS["llama"](), tmp_path)
    with pytest.raises(ConfigError, match="quantization"):
        engine_of(tmp_path, model_impl="transformers", quantization="int8wo")


def test_what_nobody_knows_stays_unknown(tmp_path: Path) -> None:
    saved(CONFIGS["llama"](), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["NobodysForCausalLM"], "model_type": "nobodys"
    }  # fmt: skip
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="NobodysForCausalLM"):
        engine_of(tmp_path)
