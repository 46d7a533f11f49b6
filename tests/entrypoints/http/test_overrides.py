"""Vectors in the place of tokens, on engines: those of a token are that token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.fakes.pooled_checkpoint import made
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.multimodal.app_server import Served, served

MARK = 99
GAPS, WHOLE = [5, MARK, 9, MARK, 11], [5, 7, 9, 60, 11]
LONG = [3] * 60
FIELDS = {"embed_override_token_id": MARK}


def vectors(folder: Path, *tokens: int) -> list[list[float]]:
    """The embeddings of tokens."""
    table = next(
        tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("embed_tokens.weight")
    )
    rows: list[list[float]] = table[list(tokens)].float().tolist()
    return rows


async def post(server: Served, path: str, **body: Any) -> Any:
    got = await server.post(path, **body)
    assert got.status_code == 200, got.text
    return got.json()


async def test_vectors_of_tokens_are_those_tokens() -> None:
    folder = made("Qwen3ForSequenceClassification")
    rows = vectors(folder, 7, 60)
    async with served(folder, is_embedding=True) as server:
        whole = [one["embedding"] for one in await post(server, "/encode", input_ids=[WHOLE, GAPS])]
        asked = {"input_ids": [GAPS, LONG + GAPS, GAPS], **FIELDS}
        got = await post(server, "/encode", embed_overrides=[rows, rows, None], **asked)
        longer = await post(server, "/encode", input_ids=LONG + WHOLE)
        assert [one["embedding"] for one in got] == [whole[0], longer["embedding"], whole[1]]
        alone = {"embed_overrides": rows, **FIELDS}
        got = await post(server, "/v1/embeddings", input=GAPS, **alone)
        assert got["data"][0]["embedding"] == whole[0]
        scored = await post(
            server, "/v1/score", query=GAPS[:3], items=[GAPS[3:], [11]], **FIELDS,
            query_embed_overrides=rows[:1], item_embed_overrides=[rows[1:], None],
        )  # fmt: skip
        plain = await post(server, "/v1/score", query=WHOLE[:3], items=[WHOLE[3:], [11]])
        assert scored["scores"] == plain["scores"]


async def test_models_that_generate_score_them() -> None:
    folder = cached_tiny("Qwen3ForCausalLM")
    rows = vectors(folder, 7, 60)
    labels = {"label_token_ids": [1, 2], "item_first": True, "apply_softmax": True}
    async with served(folder) as server:
        got = await post(
            server, "/v1/score", query=GAPS[3:], items=[GAPS[:3]], **labels, **FIELDS,
            query_embed_overrides=rows[1:], item_embed_overrides=[rows[:1]],
        )  # fmt: skip
        whole = await post(server, "/v1/score", query=WHOLE[3:], items=[WHOLE[:3]], **labels)
        other = await post(server, "/v1/score", query=GAPS[3:], items=[GAPS[:3]], **labels)
        assert got["scores"] == whole["scores"] != other["scores"]


async def test_errors_name_the_field() -> None:
    folder = made("Qwen3ForSequenceClassification")
    rows = vectors(folder, 7, 60)
    given = {"input_ids": GAPS, **FIELDS}
    async with served(folder, is_embedding=True) as server:
        for body, param in (
            ({"input_ids": GAPS, "embed_overrides": rows}, "embed_override_token_id"),
            (given, "embed_override_token_id"),
            ({**given, "embed_overrides": rows[:1]}, "embed_overrides"),
            ({**given, "embed_overrides": [rows, rows]}, "embed_overrides"),
            ({**given, "embed_overrides": [row[1:] for row in rows]}, "embed_overrides"),
            ({**given, "embed_overrides": [[[1.0], "a"]]}, "embed_overrides"),
            ({**given, "embed_overrides": [[["a"], ["b"]]]}, "embed_overrides"),
            ({**given, "embed_overrides": [1, 2]}, "embed_overrides"),
        ):
            got = await server.post("/encode", **body)
            assert (got.status_code, got.json()["error"]["param"]) == (400, param), body
        asked = {"query": GAPS, "items": [GAPS], **FIELDS}
        for fields, param in (
            ({"item_embed_overrides": [rows, rows]}, "item_embed_overrides"),
            ({"query_embed_overrides": rows}, "query_embed_overrides"),
            ({"query_embed_overrides": [[1.0]], "item_embed_overrides": [rows]},
             "item_embed_overrides"),
        ):  # fmt: skip
            got = await server.post("/v1/score", **asked, **fields)
            assert (got.status_code, got.json()["error"]["param"]) == (400, param), fields


@pytest.mark.parametrize("architecture", ["BertModel"])
async def test_encoders_read_tokens_only(architecture: str) -> None:
    async with served(made(architecture), is_embedding=True) as server:
        got = await server.post("/encode", input_ids=GAPS, embed_overrides=[[1.0]] * 2, **FIELDS)
        assert got.status_code == 400 and "reads tokens only" in got.text
