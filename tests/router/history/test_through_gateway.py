"""History through a whole gateway: its parts, keys, dispatch and metrics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from radixlm.base.record import replace
from radixlm.router.answer import Answer, json_answer
from radixlm.router.app import Gateway
from radixlm.router.call import Call
from radixlm.router.launch import bind
from radixlm.router.options import Options
from tests.router import client


class Worker:
    """A server that answers /v1/responses and keeps nothing."""

    def __init__(self) -> None:
        self.gateway = Gateway(Options(prometheus_port=-1), parts=())
        self.inputs: list[Any] = []
        add = self.gateway.routes.add
        for path in ("/health", "/server_info", "/model_info"):
            add("GET", path, self._info, "open")
        add("GET", "/v1/models", self._models, "open")
        add("POST", "/v1/responses", self._respond, "open")

    async def _info(self, call: Call) -> Answer:
        return json_answer({"model_path": "m"})

    async def _models(self, call: Call) -> Answer:
        return json_answer({"data": [{"id": "m"}]})

    async def _respond(self, call: Call) -> Answer:
        self.inputs.append(call.fields["input"])
        name = f"resp_{len(self.inputs)}"
        message = {"type": "message", "role": "assistant", "content": f"answer {name}"}
        whole = {"id": name, "object": "response", "status": "completed", "output": [message]}
        if not call.is_stream:
            return json_answer(whole)
        return Answer(200, self._events(whole), "text/event-stream")

    async def _events(self, whole: dict[str, Any]) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.completed"):
            data = orjson.dumps({"type": kind, "response": whole})
            yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


@pytest.fixture
async def running() -> AsyncIterator[tuple[Worker, str]]:
    worker, sock = Worker(), bind("127.0.0.1", 0)
    await worker.gateway.start(sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    options = replace(Options(), prometheus_port=-1, worker_urls=(url,), api_key="k")
    gateway, sock = Gateway(options), bind("127.0.0.1", 0)
    await gateway.start(sock)
    yield worker, f"http://127.0.0.1:{sock.getsockname()[1]}"
    for one in (gateway, worker.gateway):
        await asyncio.wait_for(one.stop(), 10)


KEY = [("authorization", "Bearer k"), ("content-type", "application/json")]


async def _post(url: str, path: str, **fields: Any) -> client.Response:
    return await client.ask(url, "POST", path, orjson.dumps(fields), KEY)


async def test_a_conversation_of_three_turns(running: tuple[Worker, str]) -> None:
    worker, url = running
    first = (await _post(url, "/v1/responses", model="m", input="one")).json
    fields = {"model": "m", "input": "two", "stream": True, "previous_response_id": first["id"]}
    events = (await _post(url, "/v1/responses", **fields)).events
    second = events[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    await _post(url, "/v1/responses", model="m", input="three", previous_response_id=second["id"])
    texts = [i["content"] if isinstance(i["content"], str) else i["content"][0]["text"]
             for i in worker.inputs[2]]  # fmt: skip
    assert texts == ["one", "answer resp_1", "two", "answer resp_2", "three"]
    kept = await client.ask(url, "GET", f"/v1/responses/{second['id']}", headers=KEY)
    assert kept.json == second
    refused = await client.ask(url, "GET", f"/v1/responses/{second['id']}")
    assert refused.status == 401
    metrics = (await client.ask(url, "GET", "/metrics")).body.decode()
    assert 'smg_http_responses_total{error_code="",status_code="200"} 4.0' in metrics
    assert 'operation="put",result="success",storage_type="response"} 3.0' in metrics
    name = "smg_router_requests_total"
    assert f'{name}{{backend_type="regular",connection_mode="http",endpoint="responses"' in metrics


async def test_conversations(running: tuple[Worker, str]) -> None:
    worker, url = running
    made = (await _post(url, "/v1/conversations", items=[])).json
    for text in ("one", "two"):
        await _post(url, "/v1/responses", model="m", input=text, conversation=made["id"])
    assert len(worker.inputs[1]) == 3
    path = f"/v1/conversations/{made['id']}"
    assert len((await client.ask(url, "GET", path + "/items", headers=KEY)).json["data"]) == 4
    assert (await client.ask(url, "DELETE", path, headers=KEY)).json["deleted"]
    gone = await _post(url, "/v1/responses", model="m", input="x", conversation=made["id"])
    assert gone.status == 404 and gone.json["error"]["param"] == "conversation_id"
