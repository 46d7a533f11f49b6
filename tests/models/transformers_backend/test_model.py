"""Hugging Face models on the paged cache give the same tokens as with their own cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.newer_references import CHECKPOINT, skip_if_older

from radixlm.arch.generic import describe_generic, load_generic
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.entrypoints.offline import Engine
from radixlm.kernels.dispatch import bind
from radixlm.models.transformers_backend.model import TransformersModel

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


def test_quantization_is_refused_by_name(tmp_path: Path) -> None:
    saved(CONFIGS["llama"](), tmp_path)
    with pytest.raises(ConfigError, match="quantization"):
        engine_of(tmp_path, model_impl="transformers", quantization="int8wo")


ODD = {
    # chunked attention; values narrower than keys; sinks and windows; a head of several layers
    "chunks": lambda: tf.Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "latent": lambda: tf.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    "sinks": lambda: tf.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "head of layers": lambda: tf.ModernBertDecoderConfig(
        **{**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, local_attention=8
    ),
}  # fmt: skip
REFUSED = {
    "has a mask of its own": (lambda: tf.DogeConfig(**SIZES), "DogeAttention adds another mask"),
    "has a state": (lambda: tf.MambaConfig(**SIZES), "MambaForCausalLM has an attention or a"),
    "counts places otherwise": (
        lambda: tf.RobertaConfig(**{**SIZES, "pad_token_id": 1}, is_decoder=True),
        "RobertaForCausalLM .* numbers its positions in another way",
    ),
}


def _tried(folder: Path) -> TransformersModel:
    decoder = describe_generic(load_generic(folder, {}))
    return TransformersModel(folder, decoder, torch.device("cpu"), torch.float32, bind("cpu"))


@pytest.mark.parametrize("name", ODD)
def test_odd_attentions_pass_their_trial(name: str, tmp_path: Path) -> None:
    saved(ODD[name](), tmp_path)
    model = _tried(tmp_path)  # compares step by step with all at once
    assert len(model.decoder.blocks) == 2
    groups = {(group.window, group.v_dim) for group in model.kv_groups}
    assert groups == {
        "chunks": {(0, 16)}, "latent": {(0, 12)}, "sinks": {(0, 16), (8, 16)},
        "head of layers": {(0, 16), (4, 16)},
    }[name]  # fmt: skip


def test_layers_that_run_again_have_their_own_cache(tmp_path: Path) -> None:
    skip_if_older("DoryForCausalLM", CHECKPOINT)
    loops = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}
    sizes = {**SIZES, **loops, "num_hidden_layers": 3, "n_recurrent_loops": 3, "head_dim": 16}
    saved(tf.DoryConfig(**sizes), tmp_path)
    assert len(_tried(tmp_path).decoder.blocks) == 5


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_need_another_cache_are_refused(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    saved(config(), tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        _tried(tmp_path)


def test_replaced_layers_return_their_weights(tmp_path: Path) -> None:
    model = saved(CONFIGS["llama"](), tmp_path)
    ours = _tried(tmp_path)
    for name in ("model.layers.0.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"):
        got = ours.weight(name)
        assert got is not None
        torch.testing.assert_close(got, model.get_parameter(name))


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    saved(CONFIGS["llama"](), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["NobodysForCausalLM"], "model_type": "nobodys"
    }  # fmt: skip
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="NobodysForCausalLM"):
        engine_of(tmp_path)
