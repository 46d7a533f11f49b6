"""Embeddings, scores, reranking, and the routes that parse text."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.fakes.http_server import EMBED_DIM, ScriptedServer, scripted_server

from radixlm.arch.spec import Pool
from radixlm.entrypoints.http.pooling import cohere, token_rows
from radixlm.entrypoints.http.pooling.packed import packed
from radixlm.entrypoints.http.pooling.pool import activated
from radixlm.step.plan import StepPlan


@pytest_asyncio.fixture
async def pooled(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(toy_folder, {}, is_pooled=True) as made:
        yield made


async def test_unsupported_routes_of_a_model_are_refused_by_name(
    server: ScriptedServer, pooled: ScriptedServer
) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "hi"}),
        ("/encode", {"text": "hi"}),
        ("/api/embed", {"model": "tiny", "input": "hi"}),
    ):
        got = await server.post(path, **body)
        assert got.status_code == 400 and "--is-embedding" in got.text, path
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/generate", {"text": "hi"}),
        ("/v1/completions", {"prompt": "hi", "model": "tiny"}),
        ("/v1/chat/completions", {"messages": messages, "model": "tiny"}),
        ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [1]}),
    ):
        got = await pooled.post(path, **body)
        assert got.status_code == 400 and "/v1/embeddings" in got.text, path
    assert (await pooled.client.get("/health_generate")).status_code == 200
    shown = [(await app.client.get("/get_model_info")).json() for app in (server, pooled)]
    assert [info["is_generation"] for info in shown] == [True, False]


async def test_hidden_states_come_where_a_head_is(
    server: ScriptedServer, pooled: ScriptedServer
) -> None:
    got = (await pooled.post("/encode", text=["a", "b"], return_pooled_hidden_states=True)).json()
    plain = (await pooled.post("/encode", text=["a", "b"])).json()
    for row, other in zip(got, plain, strict=True):
        assert row["pooled_hidden_state"] == [0.5] * EMBED_DIM
        assert row["embedding"] == other["embedding"] and "pooled_hidden_state" not in other
    asked = {"query": "q", "items": ["a"], "label_token_ids": [1]}
    for app, path, body in ((server, "/v1/score", asked | {"return_pooled_hidden_states": True}),):
        refused = await app.post(path, **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] in set(body) - set(asked)


async def test_embeddings_in_both_forms(pooled: ScriptedServer) -> None:
    got = (await pooled.post("/v1/embeddings", input=["hi", "you"], model="tiny")).json()
    assert [row["index"] for row in got["data"]] == [0, 1]
    assert got["id"].startswith("embd-") and got["created"] > 0
    first = pooled.tokenizer.encode("hi")[0]
    assert got["data"][0]["embedding"] == [3.0, 4.0 + first]
    assert got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"] > 0
    coded = await pooled.post("/v1/embeddings", input="hi", encoding_format="base64")
    raw = base64.b64decode(coded.json()["data"][0]["embedding"])
    assert list(struct.unpack("<2f", raw)) == got["data"][0]["embedding"]


async def test_base64_has_the_numbers_that_are_asked_for(pooled: ScriptedServer) -> None:
    body = {"input": "hi", "encoding_format": "base64"}
    wanted = (await pooled.post("/v1/embeddings", input="hi")).json()["data"][0]["embedding"]
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        for fields, kind in (
            ({"embed_dtype": "float16"}, "<f2"),
            ({"endianness": "big"}, ">f4"),
            ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
        ):
            raw = base64.b64decode(
                (await pooled.post(path, **body, **fields)).json()["data"][0][name]
            )
            assert np.frombuffer(raw, kind).tolist() == np.asarray(wanted, kind).tolist()
    refused = await pooled.post("/v1/embeddings", **body, embed_dtype="fp4")
    assert refused.json()["error"]["param"] == "embed_dtype"


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_eight_bits_are_rounded_as_by_torch(name: Any) -> None:
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    exact = torch.arange(128, dtype=torch.uint8).view(kind).float()
    exact = exact[exact.isfinite()]
    values = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.linspace(-2, 2, 4099),
                        torch.tensor([1e9, 463.0, 465.0, 61439.0, 61441.0, 1e-9])))  # fmt: skip
    for one in (values, -values):
        raw = base64.b64decode(packed(one.tolist(), name, "big"))
        assert np.frombuffer(raw, np.uint8).tolist() == one.to(kind).view(torch.uint8).tolist()


async def test_bytes_are_the_numbers_and_the_header_tells_their_places(
    pooled: ScriptedServer,
) -> None:
    body = {"input": ["hi", "you"], "embed_dtype": "float16", "endianness": "big"}
    whole = (await pooled.post("/v1/embeddings", input=body["input"])).json()
    wanted = [row["embedding"] for row in whole["data"]]
    for path in ("/v1/embeddings", "/pooling"):
        got = await pooled.post(path, **body, encoding_format="bytes")
        assert got.headers["content-type"] == "application/octet-stream"
        told = json.loads(got.headers["metadata"])
        assert told["usage"] == whole["usage"] and {"id", "created", "model"} <= told.keys()
        for one, vector in zip(told["data"], wanted, strict=True):
            part = got.content[one["start"] : one["end"]]
            assert one["shape"] == [2] and one["embed_dtype"] == "float16"
            assert np.frombuffer(part, ">f2").tolist() == vector
        only = await pooled.post(path, **body, encoding_format="bytes_only")
        assert only.content == got.content and "metadata" not in only.headers


def test_bfloat16_is_rounded_as_by_torch() -> None:
    values = [1.0, -3.14159, 1.00390625, 1.01171875, 65504.0, 1e-30, 0.0]
    raw = base64.b64decode(packed(values, "bfloat16", "little"))
    wanted = torch.tensor(values).to(torch.bfloat16).view(torch.int16).tolist()
    assert np.frombuffer(raw, "<i2").tolist() == wanted


async def test_dimensions_cut_and_scale(pooled: ScriptedServer) -> None:
    got = (await pooled.post("/v1/embeddings", input=[1, 2], dimensions=1)).json()
    assert got["data"][0]["embedding"] == [1.0]
    refused = await pooled.post("/v1/embeddings", input="hi", dimensions=3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"


@pytest.mark.parametrize("value", [[], "", [[]], {}, [1.5], ["a", 1], [10**9], 5])
async def test_bad_inputs_are_named(pooled: ScriptedServer, value: Any) -> None:
    got = await pooled.post("/v1/embeddings", input=value)
    assert got.status_code == 400 and got.json()["error"]["param"] == "input", got.text


async def test_inputs_are_truncated_and_pooled_as_in_vllm(pooled: ScriptedServer) -> None:
    long = [5, 6, 7, 8, 9]
    short = (await pooled.post("/v1/embeddings", input=long[:2])).json()
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        got = (await pooled.post(path, input=long, truncate_prompt_tokens=2)).json()
        assert got["data"][0][name] == short["data"][0]["embedding"]
        assert got["usage"] == short["usage"]
    whole = (
        await pooled.post("/v1/embeddings", input=[5] * 9000, truncate_prompt_tokens=-1)
    ).json()
    assert whole["usage"]["prompt_tokens"] == 2048
    text = "one " * 50_000  # more characters than the context's tokens can have
    assert (await pooled.post("/v1/embeddings", input=text)).status_code == 400
    for path, body in (
        ("/v1/embeddings", {"input": text}),
        ("/v1/rerank", {"query": "a", "documents": [text]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        refused = await pooled.post(path, **body, truncate_prompt_tokens=2049)
        assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.text
    for path, body in (
        ("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 2}),
        ("/v2/embed", {"texts": [text], "truncate": "START", "max_tokens": 2}),
        ("/v2/embed", {"texts": [text], "truncate": "END", "max_tokens": 2}),
    ):
        assert (await pooled.post(path, **body)).status_code == 200, path
    refused = await pooled.post("/pooling", input="a", task="classify")
    assert refused.json()["error"]["param"] == "task"


async def test_tokens_have_rows_as_in_vllm(
    pooled: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unit(token: int, size: int = EMBED_DIM) -> list[float]:
        row = [float(token + place + 1) for place in range(size)]
        return [x / math.hypot(*row) for x in row]

    inputs, asked = [[5, 6, 7], [8] * 700], {"task": "token_embed"}
    got = (await pooled.post("/pooling", input=inputs, use_activation=True, **asked)).json()
    for one, ids in zip(got["data"], inputs, strict=True):
        assert one["object"] == "pooling" and len(one["data"]) == len(ids)
        assert one["data"][-1] == [float(ids[-1] + place + 1) for place in range(EMBED_DIM)]
    assert got["usage"]["prompt_tokens"] == 703
    short = (await pooled.post("/pooling", input=[5, 6], dimensions=2, **asked)).json()
    assert short["data"][0]["data"] == [pytest.approx(unit(token, 2)) for token in (5, 6)]
    coded = await pooled.post("/pooling", input=[5, 6], encoding_format="base64", **asked)
    raw = np.frombuffer(base64.b64decode(coded.json()["data"][0]["data"]), np.float32)
    packed_ = await pooled.post("/pooling", input=[5, 6], encoding_format="bytes", **asked)
    assert json.loads(packed_.headers["metadata"])["data"][0]["shape"] == [2, EMBED_DIM]
    assert packed_.content == raw.tobytes() and raw[EMBED_DIM] == 7.0
    refused = await pooled.post("/pooling", input="a", task="token_classify")
    assert refused.json()["error"]["param"] == "task" and "token_embed" in refused.text
    monkeypatch.setattr(token_rows, "MAX_NUMBERS", 2 * EMBED_DIM)
    for ids, status in (([5, 6], 200), ([5, 6, 7], 400)):
        assert (await pooled.post("/pooling", input=ids, **asked)).status_code == status


async def test_pairs_are_scored_as_in_vllm(pooled: ScriptedServer) -> None:
    ranked = await pooled.post("/v1/rerank", query="hi", documents=["hi", "hi there you"])
    wanted = {row["index"]: row["score"] for row in ranked.json()}
    for first in ("hi", ["hi", "hi"]):
        got = (await pooled.post("/score", text_1=first, text_2=["hi", "hi there you"])).json()
        assert {row["index"]: row["score"] for row in got["data"]} == wanted
    names = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
    for one, many in names:
        same = await pooled.post("/score", **{one: "hi", many: ["hi", "hi there you"]})
        assert {row["index"]: row["score"] for row in same.json()["data"]} == wanted
    for wrong in ({"text_1": "a"}, {"text_1": ["a", "b"], "text_2": ["c"]}, {"text_2": "a"}):
        refused = await pooled.post("/v1/score", **wrong)
        assert refused.status_code == 400 and "text_1" in refused.text


async def test_vectors_in_coheres_form(pooled: ScriptedServer) -> None:
    texts, kinds = ["hi", "hi there"], ["float", "base64"]
    same = (await pooled.post("/v1/embeddings", input=texts)).json()
    wanted = [one["embedding"] for one in same["data"]]
    got = (await pooled.post("/v2/embed", texts=texts, embedding_types=kinds)).json()
    assert got["embeddings"]["float"] == wanted and got["texts"] == texts
    packed = [base64.b64decode(one) for one in got["embeddings"]["base64"]]
    assert [np.frombuffer(one, "<f4").tolist() for one in packed] == wanted
    billed = got["meta"]["billed_units"]
    assert billed == {"input_tokens": same["usage"]["prompt_tokens"], "image_tokens": 0}
    known = await pooled.post("/v2/embed", texts=texts, input_type="search_query")
    assert known.json()["embeddings"]["float"] == wanted
    for wrong, where in (
        ({}, "images"),
        ({"texts": texts, "images": ["x"]}, "texts"),
        ({"texts": texts, "input_type": "poem"}, "input_type"),
        ({"texts": texts, "embedding_types": ["binary"]}, "embedding_types"),
    ):
        refused = await pooled.post("/v2/embed", **wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == where
    # the last ids of a text that is cut at its start
    ids = (await pooled.post("/tokenize", prompt="hi there")).json()["tokens"]
    last = (await pooled.post("/v1/embeddings", input=ids[-1:])).json()["data"][0]["embedding"]
    cut = await pooled.post("/v2/embed", texts=texts[1:], truncate="START", max_tokens=1)
    assert cut.json()["embeddings"]["float"] == [last]


def test_the_score_of_a_pair_is_activated_as_asked() -> None:
    def state(after: str) -> Any:
        pool = SimpleNamespace(gives="scores", after=after)
        return SimpleNamespace(info=SimpleNamespace(decoder=SimpleNamespace(pool=pool)))

    assert [activated(state("none"), 2.0, use) for use in (None, False)] == [2.0, 2.0]
    assert activated(state("none"), 2.0, True) == pytest.approx(1 / (1 + math.exp(-2)))
    for use in (None, True, False):
        assert activated(state("sigmoid"), 0.7, use) == 0.7


def test_signs_are_packed_into_bytes() -> None:
    vector = [1.0, -1, 1, 1, -1, -1, -1, 0]
    assert cohere._as("ubinary", [vector]) == [[0b10110001]]
    assert cohere._as("binary", [vector]) == [[0b10110001 - 128]]


async def test_a_conversation_is_an_input_too(pooled: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for adds in (False, True):
        asked = {"messages": messages, "add_generation_prompt": adds}
        ids = (await pooled.post("/tokenize", **asked)).json()["tokens"]
        for path in ("/v1/embeddings", "/pooling", "/invocations"):
            got = (await pooled.post(path, **asked)).json()
            row = got["data"][0]
            assert got["usage"]["prompt_tokens"] == len(ids), path
            assert row.get("embedding", row.get("data")) == [3.0, 4.0 + ids[0]]
    given = "the opening"
    ended = [*messages, {"role": "assistant", "content": given}]
    asked = {"messages": ended, "continue_final_message": True, "add_generation_prompt": False}
    ids = (await pooled.post("/tokenize", **asked)).json()["tokens"]
    got = (await pooled.post("/v1/embeddings", **asked, truncate_prompt_tokens=-1)).json()
    assert got["usage"]["prompt_tokens"] == len(ids)
    pooled.state.info.decoder.pool = Pool(gives="scores", labels=("no", "yes"))
    for path in ("/classify", "/v1/classify", "/invocations"):
        got = (await pooled.post(path, messages=messages)).json()
        assert got["data"][0]["label"] == "yes", path


async def test_what_a_conversation_cannot_be_is_refused_by_name(pooled: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for body, param in (
        ({}, "input"),
        ({"input": "hi", "messages": messages}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": image}, "messages[0].content[0]"),
        ({"messages": messages, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": messages, "continue_final_message": True}, "messages"),
        ({"input": "hi", "add_generation_prompt": True}, "add_generation_prompt"),
    ):
        got = await pooled.post("/v1/embeddings", **body)
        assert got.status_code == 400 and got.json()["error"]["param"] == param, (body, got.text)


@pytest.mark.parametrize(("path", "name"), [("/pooling", "data"), ("/v1/embeddings", "embedding")])
async def test_vectors_are_normalized_or_not_as_asked(
    pooled: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    own, raw, _ = await _vectors_as_asked(pooled, path, name)
    assert raw == [2 * x for x in own]  # what the engine gives without the end of the head
    short = await pooled.post(path, input="hi", use_activation=False, dimensions=1)
    assert short.json()["data"][0][name] == raw[:1]
    monkeypatch.setattr(pooled.state.info.decoder, "pool", Pool())
    own, raw, unit = await _vectors_as_asked(pooled, path, name)
    assert raw == [2 * x for x in own] and math.hypot(*own) > 1
    assert unit == pytest.approx([x / math.hypot(*own) for x in own])


async def _vectors_as_asked(pooled: ScriptedServer, path: str, name: str) -> list[list[float]]:
    """With ``use_activation`` unset, false and true."""
    answers = [
        await pooled.post(path, input="hi", use_activation=asked) for asked in (None, False, True)
    ]
    return [answer.json()["data"][0][name] for answer in answers]


async def test_texts_may_come_without_special_tokens(
    pooled: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def encode(text: str, adds: bool = True) -> list[int]:
        seen.append(adds)
        return [7]

    monkeypatch.setattr(pooled.tokenizer, "encode", encode)
    for adds in (None, True, False):
        seen.clear()
        body = {"input": "hi", "add_special_tokens": adds}
        assert (await pooled.post("/v1/embeddings", **body)).status_code == 200
        assert seen[0] is (adds is not False)


async def test_native_encode(pooled: ScriptedServer) -> None:
    one = (await pooled.post("/encode", text="hi")).json()
    assert len(one["embedding"]) == 2 and one["meta_info"]["prompt_tokens"] > 0
    two = (await pooled.post("/encode", input_ids=[[1], [2]])).json()
    assert [answer["embedding"][1] for answer in two] == [5.0, 6.0]
    for path, body in (("/classify", {"text": "hi"}), ("/v1/classify", {"input": "hi"})):
        refused = await pooled.post(path, **body)
        assert refused.status_code == 400 and "score head" in refused.text
    assert (await pooled.post("/encode", text="hi", image_data="x")).status_code == 400


async def test_a_classifier_answers_in_vllms_form_too(pooled: ScriptedServer) -> None:
    pooled.state.info.decoder.pool = Pool(gives="scores", labels=("no", "yes"))
    wanted = (await pooled.post("/v1/classify", input=["hi"])).json()["data"]
    assert wanted[0]["label"] == "yes" and wanted[0]["num_classes"] == 2
    for path in ("/classify", "/invocations"):
        assert (await pooled.post(path, input=["hi"])).json()["data"] == wanted
    native = (await pooled.post("/classify", text="hi")).json()
    raw = (await pooled.post("/classify", input="hi", use_activation=False)).json()
    assert raw["data"][0]["probs"] == [2 * x for x in native["embedding"]] != wanted[0]["probs"]


async def test_scores_are_probabilities_of_the_labels(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"query": "q ", "items": ["a", "b"], "label_token_ids": [2, 1]}
    got = (await server.post("/v1/score", **body)).json()
    assert got["object"] == "scoring"
    assert got["scores"] == [[math.exp(-2), math.exp(-1)]] * 2 and "token_logprobs" not in got
    got = (await server.post("/v1/score", **body, return_token_logprobs=True)).json()
    assert got["token_logprobs"] == [[-2.0, -1.0]] * 2
    refused = await server.post("/v1/score", **body, score_extraction_token="x")
    assert refused.json()["error"]["param"] == "score_extraction_token"
    soft = (await server.post("/v1/score", **body, apply_softmax=True)).json()["scores"][0]
    assert soft == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])
    none = (await server.post("/v1/score", **body | {"items": []})).json()
    assert none["scores"] == [] and none["usage"]["prompt_tokens"] == 0
    mixed = await server.post("/v1/score", query="q", items=[[1]], label_token_ids=[1])
    assert mixed.json()["error"]["param"] == "items"
    bad = await server.post("/v1/score", query="q", items="a", label_token_ids=[10**9])
    assert bad.json()["error"]["param"] == "label_token_ids"


async def test_generative_scores_are_of_the_first_label(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"query": "q ", "items": ["a", "b"], "label_token_ids": [2, 1]}
    got = (await server.post("/generative_scoring", **body)).json()
    assert got["object"] == "list" and got["id"].startswith("generative-scoring-")
    assert [(one["index"], one["object"]) for one in got["data"]] == [(0, "score"), (1, "score")]
    assert got["data"][0]["score"] == pytest.approx(1 / (1 + math.e))
    usage = got["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2 and usage["completion_tokens"] == 2
    plain = (await server.post("/generative_scoring", **body, apply_softmax=False)).json()
    assert plain["data"][1]["score"] == pytest.approx(math.exp(-2))
    for wrong in ({"items": []}, {"label_token_ids": []}, {"label_token_ids": [10**9]}):
        refused = await server.post("/generative_scoring", **body | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))


async def test_a_score_head_reads_query_and_item_one_after_the_other(
    pooled: ScriptedServer,
) -> None:
    pooled.state.info.decoder.pool = Pool(gives="scores")
    # the engine of these tests gives 3 and 4 + the first token
    ids = (await pooled.post("/v1/score", query=[5, 6], items=[[7], [8, 9]])).json()
    assert ids["scores"] == [[3.0, 9.0]] * 2 and ids["usage"]["prompt_tokens"] == 3 + 4
    turned = await pooled.post("/v1/score", query=[5, 6], items=[[7]], item_first=True)
    assert turned.json()["scores"] == [[3.0, 11.0]]
    text = (await pooled.post("/v1/score", query="hi ", items="you")).json()
    whole = (await pooled.post("/classify", text="hi you")).json()
    assert text["scores"] == [whole["embedding"]]
    assert text["usage"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    for query, item in (("q", [7]), ([5], "a"), ([5], [4096])):
        refused = await pooled.post("/v1/score", query=query, items=[item])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "items"


async def test_rerank_sorts_by_likeness(pooled: ScriptedServer) -> None:
    got = (await pooled.post("/v1/rerank", query="hi", documents=["a", "hi", "z"])).json()
    assert got[0]["document"] == "hi" and got[0]["index"] == 1
    assert got[0]["score"] == pytest.approx(1.0)
    scores = [row["score"] for row in got]
    assert scores == sorted(scores, reverse=True)
    body: dict[str, Any] = {"query": "hi", "documents": ["a", "b"], "top_n": 1}
    one = (await pooled.post("/v1/rerank", **body, return_documents=False)).json()
    assert len(one) == 1 and one[0]["document"] is None
    assert (await pooled.post("/v1/rerank", query="hi", documents=[])).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [{"User-Agent": "cohere/7.3.1"}, {"User-Agent": "litellm/1.1"}, {"X-Fern-SDK-Name": "cohere"}],
)
async def test_rerank_of_clients_that_read_the_form_of_cohere(
    pooled: ScriptedServer, headers: dict[str, str]
) -> None:
    body = {"query": "hi", "documents": ["a", "hi"], "model": "tiny", "top_n": 1}
    same = (await pooled.client.post("/v2/rerank", json=body)).json()
    got = (await pooled.client.post("/v1/rerank", json=body, headers=headers)).json()
    assert got["results"] == same["results"]
    assert isinstance((await pooled.client.post("/v1/rerank", json=body)).json(), list)


async def test_rerank_in_the_shape_of_other_clients(pooled: ScriptedServer) -> None:
    body: dict[str, Any] = {"query": "hi", "documents": ["a", {"text": "hi"}], "model": "tiny"}
    for path in ("/rerank", "/v2/rerank"):
        got = (await pooled.post(path, **body)).json()
        assert [row["index"] for row in got["results"]] == [1, 0] and got["model"] == "tiny"
        assert got["results"][0]["document"] == {"text": "hi"}
        assert got["results"][0]["relevance_score"] == pytest.approx(1.0)
        assert got["usage"]["total_tokens"] > 0
    body["return_documents"] = False
    few = (await pooled.post("/rerank", **body, top_n=1)).json()["results"]
    assert len(few) == 1 and "document" not in few[0]
    assert (await pooled.post("/rerank", query="", documents=["a"])).status_code == 400
    assert (await pooled.post("/rerank", query="q", documents=[{"x": 1}])).status_code == 400


async def test_reranked_documents_are_read_from_their_beginning(pooled: ScriptedServer) -> None:
    body: dict[str, Any] = {"query": "one", "documents": ["one two three"]}
    whole = (await pooled.post("/rerank", **body, max_tokens_per_doc=0)).json()
    short = (await pooled.post("/rerank", **body, max_tokens_per_doc=1)).json()
    assert short["usage"]["total_tokens"] < whole["usage"]["total_tokens"]
    assert short["results"][0]["document"] == {"text": "one two three"}
    assert (await pooled.post("/rerank", **body, max_tokens_per_doc=-1)).status_code == 400


async def test_inputs_as_objects(pooled: ScriptedServer) -> None:
    plain = (await pooled.post("/v1/embeddings", input=["hi"])).json()["data"]
    same = (await pooled.post("/v1/embeddings", input=[{"text": "hi"}])).json()["data"]
    assert plain == same
    mixed = await pooled.post("/v1/embeddings", input=["hi", {"text": "hi"}, "hi"])  # of Jina
    assert [row["embedding"] for row in mixed.json()["data"]] == [plain[0]["embedding"]] * 3
    refused = await pooled.post("/v1/embeddings", input=[{"text": "hi", "image": "x"}])
    assert refused.status_code == 400
    unknown = await pooled.post("/v1/embeddings", input="hi", prompt_name="query")
    assert unknown.json()["error"]["param"] == "prompt_name"


async def test_a_generative_model_scores_by_yes_or_no(server: ScriptedServer) -> None:
    """The fake's log-probability of a token is minus its id."""
    body = {"query": "q", "documents": ["a", "b"]}
    yes, no = (server.tokenizer.encode(word, False)[0] for word in ("yes", "no"))
    asked: list[str] = []
    forward = server.engine.executor.forward

    def listen(plan: StepPlan) -> StepPlan:
        asked.extend(server.tokenizer.decode(a.prompt_ids.tolist()) for a in plan.admissions)
        return forward(plan)

    server.engine.executor.forward = listen  # type: ignore[method-assign]
    rows = (await server.post("/v1/rerank", **body, instruct="find it")).json()
    share = 1 / (1 + math.exp(yes - no))
    assert [row["score"] for row in rows] == pytest.approx([share, share])
    assert [row["index"] for row in rows] == [0, 1]
    assert "<Instruct>: find it\n<Query>: q\n<Document>: a" in asked[0]
    assert "Judge whether" in asked[0] and asked[0].endswith("<think>\n\n</think>\n\n")


async def test_texts_are_parsed_by_the_named_parser(server: ScriptedServer) -> None:
    text = 'Well. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    for name in ("hermes", "qwen25", None):
        body = {"text": text, "tools": tools, "tool_call_parser": name}
        got = (await server.post("/parse_function_call", **body)).json()
        assert got["normal_text"].strip() == "Well."
        assert got["calls"] == [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}]
    bad = await server.post("/parse_function_call", text="x", tool_call_parser="no")
    assert bad.json()["error"]["param"] == "tool_call_parser"
    split = await server.post(
        "/separate_reasoning", text="why</think>so", reasoning_parser="deepseek-r1"
    )
    assert split.json() == {"reasoning_text": "why", "text": "so"}


async def test_cloud_routes(server: ScriptedServer) -> None:
    body = {"instances": [{"text": "hi"}, {"text": "stop me"}], "parameters": {"temperature": 0}}
    got = (await server.post("/vertex_generate", **body)).json()["predictions"]
    assert [answer["text"] for answer in got] == ["Hello there.", "one two STOP three"]
    assert (await server.post("/vertex_generate", instances=[{"x": 1}])).status_code == 400
    messages = [{"role": "user", "content": "hi"}]
    invoked = (await server.post("/invocations", messages=messages)).json()
    assert invoked["choices"][0]["message"]["content"] == "Hello there."
    done = (await server.post("/invocations", prompt="hi")).json()
    assert done["object"] == "text_completion" and done["choices"][0]["text"]
    neither = await server.post("/invocations", model="tiny")
    assert neither.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/rerank", {"query": "hi", "documents": ["hi", "a"]}),
        ("/score", {"text_1": "hi", "text_2": "a"}),
        ("/score", {"queries": "hi", "documents": "a"}),
    ],
)
async def test_invocations_of_pooling_models(
    pooled: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    own = (await pooled.post(path, **body)).json()
    got = (await pooled.post("/invocations", **body)).json()
    key = "results" if path == "/rerank" else "data"
    assert got[key] == own[key] and got[key]
