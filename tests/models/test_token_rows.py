"""vLLM's tasks token_embed and token_classify through the engine, and models that classify tokens:
a row for each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.fakes.pooled_checkpoint import ENCODERS, HEADS, SHAPE, made, oracle
from tests.fakes.tiny_checkpoint import TINY, cached_tiny, copy_tiny
from tests.models.test_pooling import engine, prompts
from tests.models.test_pooling_heads import (
    BESIDE_A_TOWER,
    MARK,
    VALUE,
    apply,
    hidden,
    rebuilt,
    steps,
)

import radixlm
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.pooling.embeddings import (
    ClassifyRequest,
    PoolingRequest,
    answer_classify,
    answer_pooling,
)
from radixlm.entrypoints.request_model import make


def rows(served: radixlm.Engine, ids: list[list[int]], **fields: Any) -> list[Any]:
    """The data of /pooling for each prompt."""
    body = make(PoolingRequest, {"input": ids, **fields})
    answer = served._wait(answer_pooling(served._route_calls().state, body))
    return [one["data"] for one in answer["data"]]


def test_vectors_of_a_decoders_tokens_come_in_chunks_and_from_no_cache() -> None:
    texts = prompts("rows")  # the longest in two chunks
    with engine(cached_tiny("Qwen3ForCausalLM"), is_embedding=True) as served:
        pooled = [one["embedding"] for one in served.encode(input_ids=texts)]
        got = rows(served, texts, task="token_embed")
        assert rows(served, texts, task="embed") == pooled
    for ids, found, last in zip(texts, got, pooled, strict=True):
        wanted = F.normalize(hidden("Qwen3ForCausalLM", ids), dim=-1).numpy()
        assert np.asarray(found).shape == wanted.shape
        assert np.allclose(found, wanted, atol=1e-4) and np.allclose(found[-1], last, atol=1e-6)


def test_an_encoder_gives_vectors_or_classes_of_tokens() -> None:
    folder, text = made("BertModel"), prompts("bert")[0]
    with engine(folder) as served:
        (got,) = rows(served, [text], task="token_embed")
    with torch.inference_mode():
        states = oracle(folder)(input_ids=torch.tensor([text])).last_hidden_state[0]
    assert np.allclose(got, F.normalize(states, dim=-1).numpy(), atol=1e-4)
    with engine(made("BertForSequenceClassification")) as served:
        (classes,) = rows(served, [text], task="token_classify")
        (whole,) = rows(served, [text], task="classify")
    assert np.asarray(classes).shape == (len(text), 3)
    assert classes[0] == pytest.approx(whole, abs=1e-6)  # it pools the first token


def test_rewards_of_tokens_and_of_steps(tmp_path: Path) -> None:
    text = prompts("reward")[2]
    text[3] = text[40] = MARK
    with engine(rebuilt("LlamaForRewardModel", tmp_path / "reward")) as served:
        (got,) = rows(served, [text], task="token_classify", use_activation=False)
    wanted = apply(VALUE, "v_head", hidden("LlamaForCausalLM", text))
    assert np.allclose(got, wanted.numpy(), atol=1e-4)
    with engine(rebuilt("Qwen2ForProcessRewardModel", tmp_path / "steps")) as served:
        (got,) = rows(served, [text], task="token_classify")
    assert np.allclose(got, steps(hidden("Qwen2ForCausalLM", text), text)[:, None], atol=1e-4)


TOKEN_CLASSES = ("Bert", "ModernBert", "DistilBert", "Qwen3")
SLOW_TOKEN_CLASSES = ("Albert", "DebertaV2", "Electra", "EuroBert", "NomicBert", "Gte", "RoFormer")
SLOW_TOKEN_CLASSES += (
    "XLMRobertaXL",
    "Esm",
    "Esmc",
    "MPNet",
    "GPT2",
    "Falcon",
    "Phi3",
    "Bloom",
    "Apertus",
    "Beam",
)


@pytest.mark.parametrize(
    "stem", [*TOKEN_CLASSES, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_TOKEN_CLASSES)]
)
def test_classes_of_tokens_equal_hugging_face(stem: str) -> None:
    """Without a task too; a text has none."""
    same = (ENCODERS | HEADS)[f"{stem}Model"]
    folder = made(f"{stem}ForTokenClassification", **same, num_labels=5)
    texts = prompts("tokens")
    with engine(folder) as served:
        got = rows(served, texts, use_activation=False)
        (shares,) = rows(served, texts[:1], task="token_classify")
        with pytest.raises(InvalidRequest, match="ask /pooling"):
            body = make(ClassifyRequest, {"input": texts[0]})
            served._wait(answer_classify(served._route_calls().state, body))
    for ids, found in zip(texts, got, strict=True):
        with torch.inference_mode():
            wanted = oracle(folder)(input_ids=torch.tensor([ids])).logits[0]
        assert np.asarray(found).shape == (len(ids), 5)
        assert np.allclose(found, wanted.numpy(), atol=1e-4)
    assert np.allclose(shares, F.softmax(torch.tensor(got[0]), -1).numpy(), atol=1e-5)


def test_classes_of_tokens_of_a_composite_text_model() -> None:
    text = {**SHAPE, **HEADS["Qwen3_5TextForSequenceClassification"]}
    beside = BESIDE_A_TOWER["Qwen3_5ForSequenceClassification"]
    nested = {**beside, "text_config": text, "num_labels": 3}
    folder = cached_tiny("Qwen3_5ForTokenClassification", **dict.fromkeys(TINY), **nested)
    ids = prompts("nested")[0]
    with engine(folder) as served:
        (got,) = rows(served, [ids], use_activation=False)
    with torch.inference_mode():
        wanted = oracle(folder)(input_ids=torch.tensor([ids])).logits[0]
    assert np.allclose(got, wanted.numpy(), atol=1e-4)


def test_colbert_projects_each_token(tmp_path: Path) -> None:
    bert, ids = made("BertModel"), prompts("colbert")[0]
    tensors = {f"bert.{n}": t for n, t in load_file(bert / "model.safetensors").items()}
    linear = torch.randn(24, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(3))
    folder = copy_tiny(bert, tmp_path / "colbert")
    save_file({**tensors, "linear.weight": linear}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["HF_ColBERT"], "colbert_dim": 24}
    (folder / "config.json").write_text(json.dumps(config))
    with engine(folder) as served:
        (got,) = rows(served, [ids], task="token_embed")
    with torch.inference_mode():
        states = oracle(bert)(input_ids=torch.tensor([ids])).last_hidden_state[0]
    assert np.allclose(got, F.normalize(states @ linear.T, dim=-1).numpy(), atol=1e-4)
