"""Routes of the control plane: workers, health, models, spread requests; asked without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from radixlm.base.errors import RequestError
from radixlm.router.admin import PARSERS
from radixlm.router.app import Gateway
from radixlm.router.call import Call
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.worker import State, Worker
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools
from tests.router.fakes import Servers, joined, until

A, B = "http://a:1", "http://b:2"


class Front:
    """A gateway with fake servers; ``ask`` calls a route's handler."""

    def __init__(self, **options: Any) -> None:
        self.servers = Servers()
        self.gateway = Gateway(Options(**options), ("radixlm.router.control:attach",))
        self.registry: Registry = self.gateway.registry
        self.registry.fetch = self.servers.fetch

    async def add(self, url: str, **facts: Any) -> Worker:
        self.servers.up(url, **facts)
        worker = self.registry.add(Worker(url))
        await joined(self.registry, worker)
        return worker

    async def ask(
        self,
        method: str,
        target: str,
        body: Any = None,
        key: str = "",
        header: tuple[bytes, bytes] | None = None,
    ) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        headers += [header] if header else []
        sent = b"" if body is None else orjson.dumps(body)
        call = Call(method, path, query, headers, sent)
        route = self.gateway.routes.find(call)
        assert route is not None, target
        try:
            if route.access != "open" and (check := self.gateway.auth(call, route.access)):
                await check
            answer = await route.handler(call)
        except RequestError as error:
            return error.status, error.message
        assert isinstance(answer.body, bytes)
        is_json = answer.content_type == "application/json"
        return answer.status, orjson.loads(answer.body) if is_json else answer.body.decode()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    yield front
    await front.gateway.stop()


async def test_a_worker_is_added_shown_changed_and_deleted(front: Front) -> None:
    front.servers.up(A, served_model_name="qwen", tp_size=2)
    body = {"url": A, "priority": 7, "labels": {"zone": "x"}, "worker_type": "prefill"}
    status, said = await front.ask("POST", "/workers", body | {"bootstrap_port": 9})
    assert (status, said["status"], said["url"]) == (202, "accepted", A)
    assert said["location"] == f"/workers/{said['worker_id']}"
    where = said["location"]
    assert (await front.ask("GET", where))[1]["job_status"]["status"] == "processing"
    await joined(front.registry, *front.registry)
    status, shown = await front.ask("GET", where)
    assert shown["metadata"] == {
        "served_model_name": "qwen",
        "model_path": "p",
        "tp_size": "2",
        "model_type": "llama",
        "architectures": '["L"]',
        "zone": "x",
    }
    assert (shown["priority"], shown["bootstrap_port"], shown["is_healthy"]) == (7, 9, True)
    assert "job_status" not in shown and shown["connection_mode"] == "HTTP"
    assert (await front.ask("PATCH", where, {"priority": 1}))[0] == 202
    assert (await front.ask("PUT", where, {"cost": 2}))[0] == 202
    for model, total in (("qwen", 1), ("other", 0)):
        assert (await front.ask("GET", f"/workers?model={model}"))[1]["total"] == total
    listed = (await front.ask("GET", "/workers"))[1]
    assert (listed["workers"][0]["priority"], listed["workers"][0]["cost"]) == (1, 2.0)
    assert listed["stats"] == {"prefill_count": 1, "decode_count": 0, "regular_count": 0}
    by_url = "/workers/" + A.replace(":", "%3A").replace("/", "%2F")
    assert (await front.ask("GET", by_url))[1]["id"] == said["worker_id"]
    assert (await front.ask("DELETE", where))[0] == 202
    assert (await front.ask("GET", where))[0] == 404 and len(front.registry) == 0


async def test_a_worker_that_is_there_is_changed(front: Front) -> None:
    worker = await front.add(A)
    status, said = await front.ask("POST", "/workers", {"url": A, "priority": 3})
    assert (status, said["worker_id"], worker.priority) == (202, worker.id, 3)
    assert (await front.ask("POST", "/workers", {"url": A, "worker_type": "decode"}))[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/workers", {"url": "nope"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {}, 400, "BAD_REQUEST"),
        ("POST", "/workers", [1], 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": A, "priority": "x"}, 400, "BAD_REQUEST"),
        ("GET", "/workers/zzz", None, 400, "BAD_REQUEST"),
        ("GET", f"/workers/{'0' * 32}", None, 404, "WORKER_NOT_FOUND"),
        ("DELETE", f"/workers/{'0' * 32}", None, 404, "WORKER_NOT_FOUND"),
        ("PUT", "/workers/http%3A%2F%2Fq%3A1", {}, 404, "WORKER_NOT_FOUND"),
    ],
)
async def test_a_wrong_request_is_told(
    front: Front, method: str, path: str, body: Any, status: int, code: str
) -> None:
    got, said = await front.ask(method, path, body)
    assert (got, said["code"]) == (status, code) and said["error"]


async def test_a_worker_that_did_not_join_is_told(front: Front) -> None:
    front.registry.options = Options(worker_startup_timeout_secs=0)
    _, said = await front.ask("POST", "/workers", {"url": A})
    await until(lambda: len(front.registry) == 0)
    status, shown = await front.ask("GET", said["location"])
    assert (status, shown["job_status"]["status"], shown["is_healthy"]) == (200, "failed", False)


async def test_the_routes_of_before_wait_for_the_worker(front: Front) -> None:
    front.servers.up(A)
    assert await front.ask("POST", f"/add_worker?url={A}") == (
        200,
        f"Successfully added worker: {A}",
    )
    assert await front.ask("GET", "/list_workers") == (200, {"urls": [A]})
    assert (await front.ask("POST", f"/remove_worker?url={A}"))[0] == 200
    assert (await front.ask("POST", f"/remove_worker?url={A}"))[0] == 404
    front.registry.options = Options(worker_startup_timeout_secs=0)
    status, said = await front.ask("POST", f"/add_worker?url={B}")
    assert status == 503 and "refused" in said


async def test_health_and_readiness(front: Front) -> None:
    assert await front.ask("GET", "/health") == await front.ask("GET", "/liveness") == (200, "OK")
    assert (await front.ask("GET", "/readiness"))[0] == 503
    assert (await front.ask("GET", "/health_generate"))[0] == 503
    worker = await front.add(A)
    ready = {"status": "ready", "healthy_workers": 1, "total_workers": 1}
    assert await front.ask("GET", "/readiness") == (200, ready)
    assert (await front.ask("GET", "/health_generate"))[0] == 200
    front.registry.move(worker, State.SUSPECT)  # an open breaker: nothing could be served
    assert (await front.ask("GET", "/readiness"))[0] == 503


async def test_both_types_are_needed_for_prefill_and_decode() -> None:
    front = Front(pd_disaggregation=True)
    for url, kind in ((A, "prefill"), (B, "decode")):
        assert (await front.ask("GET", "/readiness"))[0] == 503
        front.servers.up(url)
        await front.ask("POST", "/workers", {"url": url, "worker_type": kind})
        await joined(front.registry, *front.registry)
    assert (await front.ask("GET", "/readiness"))[0] == 200
    prefill, decode = front.registry
    front.registry.move(prefill, State.UNHEALTHY)
    assert (await front.ask("GET", "/readiness"))[0] == 503
    decode.facts["resume_digest"] = "a server that computes whole requests"
    assert (await front.ask("GET", "/readiness"))[0] == 200
    await front.gateway.stop()


async def test_models_and_infos(front: Front) -> None:
    assert (await front.ask("GET", "/v1/models"))[0] == 503
    assert (await front.ask("GET", "/get_model_info"))[0] == 503
    inner = {"internal_states": [{"api_key": "secret", "load": 1}]}  # as SGLang tells
    await front.add(A, served_model_name="x", api_key="secret", hf_token="t", max_tokens=5, **inner)
    await front.add(B, served_model_name="org/y")
    listed = (await front.ask("GET", "/v1/models"))[1]
    assert [one["id"] for one in listed["data"]] == ["x", "org/y"]
    assert listed["data"][0] == {"id": "x", "object": "model", "owned_by": "local"}
    for name in ("org/y", "org%2Fy"):
        assert (await front.ask("GET", f"/v1/models/{name}"))[1]["id"] == "org/y"
    assert (await front.ask("GET", "/v1/models/z"))[0] == 404
    claude = (b"anthropic-version", b"2023-06-01")
    listed = (await front.ask("GET", "/v1/models", header=claude))[1]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("x", "org/y", False)
    card = (await front.ask("GET", "/v1/models/x", header=claude))[1]
    assert (card["type"], card["display_name"]) == ("model", "x") and card == listed["data"][0]
    assert (await front.ask("GET", "/get_model_info"))[1]["model_type"] == "llama"
    info = (await front.ask("GET", "/get_server_info"))[1]
    assert (info["router_manager"], info["workers_count"], info["max_tokens"]) == (True, 2, 5)
    assert "api_key" not in info and "hf_token" not in info
    assert info["internal_states"] == [{"load": 1}]


async def test_without_the_key_the_info_has_counts_only() -> None:
    front = Front(api_key="k")
    await front.add(A, max_tokens=5)
    counts = {"router_manager": True, "routers_count": 1, "workers_count": 1}
    assert await front.ask("GET", "/get_server_info") == (200, counts)
    assert (await front.ask("GET", "/get_server_info", key="k"))[1]["max_tokens"] == 5
    await front.gateway.stop()


async def test_a_flush_reaches_all_workers(front: Front) -> None:
    await front.add(A)
    await front.add(B)
    front.servers.answers[A, "/flush_cache"] = front.servers.answers[B, "/flush_cache"] = b"ok"
    status, said = await front.ask("POST", "/flush_cache")
    assert (status, said["status"], said["workers_flushed"]) == (200, "success", 2)
    front.servers.answers[B, "/flush_cache"] = 500
    status, said = await front.ask("POST", "/flush_cache")
    assert (status, said["status"], said["failed"]) == (
        206,
        "partial_success",
        [{"worker": B, "error": "HTTP 500"}],
    )


async def test_loads_are_summed(front: Front) -> None:
    await front.add(A)
    await front.add(B)
    front.servers.answers[A, "/get_load"] = [{"num_tokens": 3}, {"num_tokens": 4}]
    assert (await front.ask("GET", "/get_loads"))[1] == {
        "workers": [{"worker": A, "load": 7}, {"worker": B, "load": -1}]
    }
    assert (await front.ask("GET", "/get_load"))[1] == [{"num_tokens": 3}, {"num_tokens": 4}]


async def test_a_request_for_all_answers_as_one_worker_does(front: Front) -> None:
    assert (await front.ask("POST", "/abort_request", {"rid": "1"}))[0] == 503
    await front.add(A)
    await front.add(B)
    body = {"lora_name": "x"}
    for route in ("/begin_weight_update", "/end_weight_update", "/load_lora_adapter"):
        for url in (A, B):
            front.servers.answers[url, route] = {"success": True}
        assert await front.ask("POST", route, body) == (200, {"success": True})
        assert [url for url, _, path, _ in front.servers.asked if path == route] == [A, B]
    front.servers.down(B)
    status, said = await front.ask("POST", "/load_lora_adapter", body)
    assert status == 503 and B in said["error"]["message"]
    front.servers.answers[A, "/abort_request"] = {}
    assert await front.ask("POST", "/abort_request", {"rid": "1"}) == (200, {})


async def test_a_profile_may_be_of_one_worker(front: Front) -> None:
    await front.add(A)
    await front.add(B)
    for url in (A, B):
        front.servers.answers[url, "/start_profile"] = {"of": url}
    assert await front.ask("POST", "/start_profile", {"url": B, "num_steps": 3}) == (200, {"of": B})
    assert (await front.ask("POST", "/start_profile", {}))[1] == {"of": A}
    asked = [url for url, _, path, _ in front.servers.asked if path == "/start_profile"]
    assert asked == [B, A, B]
    for url in ("http://no:1", 7):
        assert (await front.ask("POST", "/stop_profile", {"url": url}))[0] == 404


async def test_texts_are_parsed(front: Front) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"text": text, "tools": tools, "tool_call_parser": "qwen25"}
    status, said = await front.ask("POST", "/parse/function_call", body)
    call = said["tool_calls"][0]["function"]
    assert (status, call["name"], orjson.loads(call["arguments"])) == (200, "f", {"a": 1})
    body = {"text": "<think>why</think>so", "reasoning_parser": "deepseek-r1"}
    assert (await front.ask("POST", "/parse/reasoning", body))[1] == {
        "normal_text": "so",
        "reasoning_text": "why",
        "success": True,
    }
    body["reasoning_parser"] = "deepseek_r1"  # sglang-router's name
    assert (await front.ask("POST", "/parse/reasoning", body))[1]["reasoning_text"] == "why"
    assert (await front.ask("POST", "/parse/reasoning", {"text": "x"}))[0] == 400
    for fields in (
        {"tools": [3]},
        {"tools": [{"function": 1}]},
        {"tools": "x"},
        {"tool_call_parser": ["x"]},
    ):
        wrong = {"text": "x", "tool_call_parser": "qwen25"} | fields
        assert (await front.ask("POST", "/parse/function_call", wrong))[0] == 400


def test_names_of_parsers_lead_to_parsers() -> None:
    assert set(PARSERS.values()) <= {*tools.NAMES, *reasoning.NAMES}


async def test_what_is_not_built_says_so(front: Front) -> None:
    assert await front.ask("GET", "/ha/status") == (503, {"error": "mesh not enabled"})
    assert (await front.ask("GET", "/wasm"))[0] == 503


async def test_prefill_and_decode_workers_of_the_options_join() -> None:
    front = Front(pd_disaggregation=True, prefill=(f"{A} 8998",), decode=(B,), worker_urls=(A,))
    front.servers.up(A)
    front.servers.up(B)
    for work in front.gateway.on_start:
        work()
    await joined(front.registry, *front.registry)
    (prefill,), (decode,) = (front.registry.pool(None, kind) for kind in ("prefill", "decode"))
    assert (prefill.url, prefill.bootstrap_port, decode.url) == (A, 8998, B)
    assert len(front.registry) == 2
    await front.gateway.stop()


async def test_a_gateway_that_ends_is_not_ready(front: Front) -> None:
    await front.add(A)
    await front.gateway.drain(0)
    said = {"status": "not ready", "reason": "draining"}
    assert await front.ask("GET", "/readiness") == (503, said)


async def test_a_worker_without_cards_has_its_model_listed(front: Front) -> None:
    front.servers.answers[A, "/health"] = {}
    worker = front.registry.add(Worker(A, model_id="named"))
    await joined(front.registry, worker)
    assert [one["id"] for one in (await front.ask("GET", "/v1/models"))[1]["data"]] == ["named"]
    assert (await front.ask("GET", "/model_info"))[0] == 503
    status, said = await front.ask("POST", "/parse/reasoning", {"reasoning_parser": "qwen3"})
    assert status == 400 and "text" in said


async def test_the_workers_of_the_options_join() -> None:
    front = Front(worker_urls=(A, B))
    front.servers.up(A)
    front.servers.up(B)
    for work in front.gateway.on_start:
        work()
    await joined(front.registry, *front.registry)
    assert [one.url for one in front.registry.pool(None)] == [A, B]
    await front.gateway.stop()
