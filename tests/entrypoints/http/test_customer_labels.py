"""Labels of customers on the metrics: those that are allowed, and no more of them than fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.http_server import scripted_server

from radixlm.observe.metrics import MAX_LABEL_SETS, Buckets, Ended, Metrics

CHAT = "/v1/chat/completions"
HEADER = "x-customer-labels"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
END = Ended(1.0, 0.1, 5, 3, 2, has_grammar=False, is_aborted=False)


def values(text: str, sample: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Values of these labels -> what ``sample`` counts."""
    return {
        tuple(found.labels[label] for label in labels): found.value
        for family in text_string_to_metric_families(text)
        for found in family.samples
        if found.name == sample
    }


async def test_a_header_labels_the_metrics_of_its_requests(toy_folder: Any) -> None:
    options = {"enable_metrics": True, "collect_tokens_histogram": True}
    allowed = ["team", "tier"]
    async with scripted_server(
        toy_folder, {}, **options, tokenizer_metrics_allowed_customer_labels=allowed
    ) as made:
        for label in ({"team": "red", "tier": 2, "secret": "x"}, {"team": "red", "tier": 2}, {}):
            headers = {HEADER.title(): json.dumps(label)}
            assert (await made.client.post(CHAT, json=BODY, headers=headers)).is_success
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "n": 2}, "stream": True}
        headers = {HEADER: json.dumps({"team": "blue"})}
        assert (await made.client.post("/generate", json=body, headers=headers)).is_success
        text = (await made.client.get("/metrics")).text
    assert "secret" not in text
    wanted = {("red", "2"): 2.0, ("", ""): 1.0, ("blue", ""): 2.0}
    times = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    for name in (
        "num_requests_total",
        *(f"{n}_count" for n in (*times, "prompt_tokens_histogram")),
    ):
        assert values(text, f"sglang:{name}", "team", "tier") == wanted, name
    tokens = values(text, "sglang:generation_tokens_total", "team", "tier")
    later = values(text, "sglang:inter_token_latency_seconds_count", "team", "tier")
    assert later == {labels: tokens[labels] - wanted[labels] for labels in wanted}
    assert values(text, "sglang:num_running_reqs", "model_name").keys() == {("tiny",)}


async def test_requests_are_counted_by_priority(toy_folder: Any) -> None:
    options: dict[str, Any] = {"enable_metrics": True, "enable_priority_scheduling": True}
    async with scripted_server(toy_folder, {}, **options) as made:
        for asked in ({"priority": 5}, {"priority": 5}, {}):
            assert (await made.client.post(CHAT, json=BODY | asked)).is_success
        text = (await made.client.get("/metrics")).text
    for name in ("num_requests_total", "time_to_first_token_seconds_count"):
        found = values(text, f"sglang:{name}", "priority")
        assert found == {("",): 0.0, ("5",): 2.0, ("0",): 1.0}, name
    extra = '{"priority": "mine"}'
    async with scripted_server(toy_folder, {}, **options, extra_metric_labels=extra) as made:
        assert (await made.client.post(CHAT, json=BODY)).is_success
        text = (await made.client.get("/metrics")).text
    assert values(text, "sglang:num_requests_total", "priority") == {("mine",): 1.0}


@pytest.mark.parametrize(
    "header",
    ["", "no json", "[]", "[" * 3000, '{"team": ["a"]}', '{"team": null}', '{"other": "a"}',
     json.dumps({"team": "a" * 5000}), '{"team": NaN', "\xff"],
)  # fmt: skip
async def test_what_is_no_label_is_left_out(toy_folder: Any, header: str) -> None:
    async with scripted_server(
        toy_folder, {}, enable_metrics=True, tokenizer_metrics_allowed_customer_labels=["team"],
        tokenizer_metrics_custom_labels_header="x-mine",
    ) as made:  # fmt: skip
        headers = [(b"x-mine", header.encode("latin-1"))]
        assert (await made.client.post(CHAT, json=BODY, headers=headers)).is_success
        text = (await made.client.get("/metrics")).text
    assert values(text, "sglang:num_requests_total", "team") == {("",): 1.0}


def test_clients_cannot_fill_the_memory() -> None:
    metrics = Metrics({"model_name": "m"}, Buckets(), ("team", "tier"))
    for number in range(3 * MAX_LABEL_SETS):
        metrics.ended(END, metrics.series({"team": f"t{number}", "tier": "a"}))
    for bad in ("x" * 65, "\ud800"):
        metrics.ended(END, metrics.series({"team": bad, "tier": "\ud800"}))
    text = metrics.exposition({}).decode()
    found = values(text, "sglang:num_requests_total", "team", "tier")
    assert len(found) == MAX_LABEL_SETS + 2  # no labels, and other
    assert found["t0", "a"] == 1
    assert found["other", "other"] == 2 * MAX_LABEL_SETS + 2
    assert sum(found.values()) == 3 * MAX_LABEL_SETS + 2
