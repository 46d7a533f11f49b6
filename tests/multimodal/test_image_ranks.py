"""Images in queries and documents of /v1/rerank and /score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from radixlm.entrypoints.http.pooling.rerank import DEFAULT_INSTRUCT, JUDGE
from tests.multimodal.app_server import PARTS, PLACE, Served, file_of, make_image, served, uri
from tests.multimodal.test_image_embeddings import clip, cosine, embed
from tests.multimodal.tiny import qwen2_vl, save

IMAGES = (make_image(40, 30), make_image(28, 28))
URLS = [uri(file_of(one)) for one in IMAGES]


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def ranked(server: Served, **body: Any) -> list[float]:
    """The scores in the order of the request, alike on all routes."""
    answer = await server.post("/v1/rerank", **body)
    assert answer.status_code == 200, answer.text
    scores = [row["score"] for row in sorted(answer.json(), key=lambda row: row["index"])]
    shared = (await server.post("/rerank", **body)).json()["results"]
    assert [row["relevance_score"] for row in shared] == sorted(scores, reverse=True)
    return scores


def test_scores_are_cosines_of_vectors(tmp_path: Path) -> None:
    tiny = qwen2_vl()
    save(tiny, tmp_path)

    async def run() -> None:
        template = PARTS.replace(PLACE, tiny.placeholder)
        async with served(tmp_path, template, is_embedding=True) as server:
            objects = [{"image": URLS[0]}, {"image": URLS[1], "text": "b"}, {"text": "a word"}]
            query, *vectors = await embed(server, [{"text": "find"}, *objects])
            wanted = [cosine(query, vector) for vector in vectors]
            text = {"type": "text", "text": "b"}
            documents = [[part(URLS[0])], {"content": [part(URLS[1]), text]}, "a word"]
            for given in (documents, objects):
                got = await ranked(server, query="find", documents=given)
                assert got == pytest.approx(wanted, abs=1e-6)
            alone = await ranked(server, query="find", documents=documents[1])
            assert alone == pytest.approx([wanted[1]], abs=1e-6)
            answer = await server.post("/score", data_1={"image": URLS[0]}, data_2=["find"])
            [row] = answer.json()["data"]
            assert row["score"] == pytest.approx(wanted[0], abs=1e-6)
            for bad, where in (
                ([[part("file:///etc/passwd")]], "documents[0][0]"),
                (["a", {"content": [{"type": "odd"}]}], "documents[1].content[0]"),
                ([{}], "documents[0]"),
            ):
                answer = await server.post("/v1/rerank", query="find", documents=bad)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == where

    asyncio.run(run())


def test_a_generating_model_is_asked_about_images(tmp_path: Path) -> None:
    tiny = qwen2_vl()
    tiny.processor.tokenizer.add_tokens(["yes", "no"])
    yes_no = tiny.processor.tokenizer.convert_tokens_to_ids(["yes", "no"])
    model, place = save(tiny, tmp_path), tiny.placeholder

    def wanted(query: str, document: str, *images: Any) -> float:
        asked = f"<Instruct>: {DEFAULT_INSTRUCT}\n<Query>: {query}\n<Document>: {document}"
        written = f"<system>{JUDGE}\n<user>{asked}\n<assistant>"
        given = tiny.processor(text=[written], images=list(images) or None, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**given).logits[0, -1, yes_no]
        return float(logits.softmax(-1)[0])

    async def run() -> None:
        async with served(tmp_path, PARTS.replace(PLACE, place)) as server:
            documents = [{"image": URLS[1]}, "a word"]
            got = await ranked(server, query=[part(URLS[0])], documents=documents)
            both = wanted(place, place, *IMAGES), wanted(place, "a word", IMAGES[0])
            assert got == pytest.approx(both, abs=1e-4)
            got = await ranked(server, query="find", documents=["a word"])
            assert got == pytest.approx([wanted("find", "a word")], abs=1e-4)

    asyncio.run(run())


def test_models_that_embed_images_rank_them(tmp_path: Path) -> None:
    clip(tmp_path)

    async def run() -> None:
        async with served(tmp_path) as server:
            query, *vectors = await embed(
                server, [{"text": "a"}, {"image": URLS[0]}, {"text": "b"}]
            )
            got = await ranked(server, query="a", documents=[{"image": URLS[0]}, "b"])
            assert got == pytest.approx([cosine(query, one) for one in vectors], abs=1e-6)

    asyncio.run(run())
