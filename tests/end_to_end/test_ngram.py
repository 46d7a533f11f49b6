"""A server with --speculative-algorithm NGRAM: the same tokens as without, its counts, corpora."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer

LINES = "\n".join(f"{i}. the cat sat on the mat and the dog sat on the rug" for i in range(6))
PROMPTS = (f"Repeat:\n{LINES}\nRepeat:\n{LINES}\nRepeat:\n", "Once upon a time there was")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    args = "--speculative-algorithm NGRAM --enable-metrics --decode-log-interval 8".split()
    with RunningServer(*args, "--max-total-tokens", "16384") as running:
        yield running
        assert "Traceback" not in "".join(running.log)


def generate(url: str, prompt: str, **sampling: Any) -> dict[str, Any]:
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 96, "ignore_eos": True}}
    body["sampling_params"] |= sampling  # type: ignore[operator]
    answer = httpx.post(url + "/generate", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def metric(server: RunningServer, name: str) -> float:
    text = server.client.get("/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "sampling_seed": 7}])
def test_the_tokens_are_those_of_a_server_without(
    server: RunningServer, client_url: str, sampling: dict[str, Any]
) -> None:
    for prompt in PROMPTS:
        plain, drafted = (generate(url, prompt, **sampling) for url in (client_url, server.url))
        assert drafted["output_ids"] == plain["output_ids"]
        assert not {name for name in plain["meta_info"] if name.startswith("spec_")}
        meta = drafted["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        correct = sum(count * times for count, times in enumerate(histogram))
        assert correct == meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
        assert correct + meta["spec_verify_ct"] <= 96
    assert meta["completion_tokens"] == 96


def test_fewer_steps_than_tokens_where_text_repeats(server: RunningServer) -> None:
    meta = generate(server.url, PROMPTS[0], temperature=0)["meta_info"]
    assert meta["spec_accept_length"] > 1.5
    state = server.client.get("/get_server_info").json()
    assert state["speculative_num_draft_tokens"] == 12
    assert state["internal_states"][0]["avg_spec_accept_length"] > 1
    assert any("accept len: " in line for line in server.log)


def test_the_load_tells_the_accepted_length(server: RunningServer) -> None:
    def is_told() -> bool:  # the engine reports its load once a second
        generate(server.url, PROMPTS[0], temperature=0)
        load = server.client.get("/v1/loads?include=spec").json()["loads"][0]
        return bool(load["spec_accept_length"] > 1)

    server.wait_for(is_told)


def test_metrics(server: RunningServer) -> None:
    names = ("sglang:spec_verify_calls_total", "radixlm:spec_drafted_tokens_total")
    before = [metric(server, name) for name in names]
    meta = generate(server.url, PROMPTS[0], temperature=0)["meta_info"]
    # the engine reports its load once a second
    for _ in range(100):
        after = [metric(server, name) for name in names]
        if after[0] - before[0] >= meta["spec_verify_ct"]:
            break
        generate(server.url, "x", max_new_tokens=40)
    assert after[1] - before[1] >= meta["spec_num_proposed_drafts"]
    assert 0 < metric(server, "sglang:spec_accept_rate") <= 1
    assert metric(server, "sglang:spec_num_steps") == 11
    assert metric(server, "radixlm:spec_draft_seconds_total") > 0


def test_details_for_openai_clients(server: RunningServer) -> None:
    body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 96, "temperature": 0}
    body["ignore_eos"] = True
    assert "sglext" not in server.post("/v1/completions", **body).json()
    body["return_spec_tokens_details"] = True
    details = server.post("/v1/completions", **body).json()["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] > 0
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        chunks = [
            json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")
        ]
    (streamed,) = [chunk for chunk in chunks if "sglext" in chunk]
    assert streamed["choices"] == []
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    chat |= {"return_spec_tokens_details": True, "return_meta_info": True, "n": 2}
    found = server.post("/v1/chat/completions", **chat).json()
    counts = [choice["meta_info"]["spec_verify_ct"] for choice in found["choices"]]
    details = found["sglext"]["spec_tokens_details"]
    assert [one["spec_verify_ct"] for one in details] == counts


def test_a_corpus_makes_drafts(server: RunningServer) -> None:
    """As the reference tests it: outputs as a corpus at least double the accept length."""
    server.post("/flush_cache")
    prompt = "The largest planet in our solar system is"
    first = generate(server.url, prompt, temperature=0)
    server.post("/flush_cache")  # forgets the answer, and begins the mean again
    text = "The largest planet in our solar system is" + first["text"]
    added = server.post("/add_external_corpus", corpus_id="bench", documents=[text, text[:40]])
    assert added.status_code == 200
    assert added.json()["success"] is True
    assert added.json()["corpus_id"] == "bench"
    count = added.json()["loaded_token_count"]
    assert count > 50
    listed = server.client.get("/list_external_corpora").json()
    assert listed == {"success": True, "corpus_token_counts": {"bench": count}, "message": ""}
    again = generate(server.url, prompt, temperature=0)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["spec_accept_length"] > 2
    named = server.post("/add_external_corpus", documents=["a text"]).json()["corpus_id"]
    for name in ("bench", named):
        assert server.post("/remove_external_corpus", corpus_id=name).json()["success"] is True
    assert server.client.get("/list_external_corpora").json()["corpus_token_counts"] == {}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/remove_external_corpus", {}, "corpus_id"),
        ("/remove_external_corpus", {"corpus_id": "none"}, "'none' is not loaded"),
        ("/add_external_corpus", {}, "send texts in documents"),
        ("/add_external_corpus", {"file_path": "/none.jsonl"}, "file_path: .*No such file"),
        ("/add_external_corpus", {"documents": ["", ""]}, "hold no token"),
        ("/add_external_corpus", {"documents": 3}, "documents"),
    ],
)
def test_faults_of_clients(
    server: RunningServer, path: str, body: dict[str, Any], message: str
) -> None:
    answer = server.post(path, **body)
    assert answer.status_code == 400
    assert re.search(message, answer.text), answer.text


def test_a_server_without_ngram_has_no_corpora(client_url: str) -> None:
    answer = httpx.post(client_url + "/add_external_corpus", json={"documents": ["a"]})
    assert answer.status_code == 400
    assert "--speculative-algorithm NGRAM" in answer.text
