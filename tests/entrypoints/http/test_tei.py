"""Text Embeddings Inference's routes: compared with the other routes of vectors and ranks."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, scripted_server

TEXTS = ["hi", "hello you"]


@pytest_asyncio.fixture
async def pooled(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(toy_folder, {}, is_pooled=True) as made:
        yield made


async def _vectors(server: ScriptedServer, texts: list[str]) -> list[list[float]]:
    got = (await server.post("/v1/embeddings", input=texts, use_activation=True)).json()
    return [one["embedding"] for one in got["data"]]


@pytest.mark.parametrize("path", ["/embed", "/"])
async def test_vectors_are_those_of_v1_embeddings(pooled: ScriptedServer, path: str) -> None:
    expected = await _vectors(pooled, TEXTS)
    assert (await pooled.post(path, inputs=TEXTS)).json() == expected
    assert (await pooled.post(path, inputs=TEXTS[1], truncate=True)).json() == expected[1:]
    ids = pooled.tokenizer.encode(TEXTS[0])
    assert (await pooled.post(path, inputs=ids)).json() == expected[:1]
    short = (await pooled.post(path, inputs=TEXTS, dimensions=2)).json()
    assert [len(one) for one in short] == [2, 2]


async def test_similarities_are_cosines(pooled: ScriptedServer) -> None:
    first, second = await _vectors(pooled, TEXTS)
    asked = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    dot = sum(x * y for x, y in zip(first, second, strict=True))
    cosine = dot / math.hypot(*first) / math.hypot(*second)
    for path in ("/similarity", "/"):
        got = (await pooled.post(path, inputs=asked, parameters={"truncate": True})).json()
        assert got == pytest.approx([1.0, cosine])


async def test_ranks_of_texts_are_those_of_documents(pooled: ScriptedServer) -> None:
    ranked = (await pooled.post("/rerank", query=TEXTS[0], documents=TEXTS)).json()["results"]
    rows = [{"index": one["index"], "score": one["relevance_score"]} for one in ranked]
    assert (await pooled.post("/rerank", query=TEXTS[0], texts=TEXTS)).json() == rows
    with_text = [row | {"text": TEXTS[row["index"]]} for row in rows]
    asked: dict[str, Any] = {"raw_scores": True, "return_text": True, "truncate": True}
    assert (await pooled.post("/rerank", query=TEXTS[0], texts=TEXTS, **asked)).json() == with_text


async def test_what_is_refused_is_named(pooled: ScriptedServer, server: ScriptedServer) -> None:
    for body, param in (
        ({"inputs": "hi", "truncation_direction": "Left"}, "truncation_direction"),
        ({"inputs": []}, "inputs"),
        ({"inputs": "hi", "prompt_name": "none"}, "prompt_name"),
        ({}, "inputs"),
    ):
        got = await pooled.post("/embed", **body)
        assert got.status_code == 400 and got.json()["param"] == param, got.text
    got = await server.post("/embed", inputs="hi")
    assert got.status_code == 400 and "--is-embedding" in got.text
    assert (await pooled.post("/rerank", query="q")).json()["param"] == "documents"
