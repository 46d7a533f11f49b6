"""Responses and conversations at the gateway, before workers that keep nothing."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from radixlm.base.errors import InvalidRequest, NotFound, Overloaded, RequestError, TransferError
from radixlm.router.answer import Answer, Routes
from radixlm.router.call import Call, Headers
from radixlm.router.exchange import Cut
from radixlm.router.forwarding import chunks
from radixlm.router.history.routes import attach
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from radixlm.router.worker import State, Worker

EVENTS = (b"content-type", b"text/event-stream")


class Client:
    """A client's stream that keeps what it gets."""

    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        self.has_ended = False

    def begin(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        self.status, self.length = status, length

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def end(self) -> None:
        self.has_ended = True

    def answer(self, answer: Answer) -> None:
        self.status, self.parts, self.has_ended = answer.status, [answer.body], True  # type: ignore[list-item]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class Bench:
    """A gateway's attributes, with a dispatch that answers as a worker without a store would."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker("http://w:1")
        self.worker.state = State.READY
        self.options = Options(**options)
        self.routes, self.metrics = Routes(), RouterMetrics()
        self.registry, self.upstream = [self.worker], self
        self.data_wrappers: dict[str, Any] = {}
        self.on_stop: list[Any] = []
        self.history: Any = None
        self.sent: list[dict[str, Any]] = []  # bodies that the worker got
        self.asked: list[str] = []  # control calls
        self.fetched: dict[str, Any] = {}  # path -> response of the worker
        self.num = 0
        self.status = "completed"
        self.line_end = b"\n"
        attach(self)

    async def fetch(self, url: str, method: str, target: str, **_: Any) -> Any:
        self.asked.append(f"{method} {target}")
        if target not in self.fetched:
            return SimpleNamespace(status=404, headers=[], body=b"{}")
        found = self.fetched[target]
        if isinstance(found, Exception):
            raise found
        kind = [(b"content-type", b"application/json")]
        return SimpleNamespace(status=200, headers=kind, body=orjson.dumps(found))

    async def dispatch(self, call: Call, client: Any) -> None:
        """Serve a call as the gateway does."""
        wrapper = self.data_wrappers.get(call.path)
        if wrapper is None:
            await self._dispatch(self, call, client)
        else:
            await wrapper(self._dispatch, call, client)

    async def _dispatch(self, gateway: Any, call: Call, client: Any) -> None:
        fields = dict(call.fields)
        self.sent.append(fields)
        call.worker = self.worker
        self.num += 1
        text = f"answer {self.num}"
        message = {"type": "message", "role": "assistant", "id": f"msg_{self.num}"}
        message["content"] = [{"type": "output_text", "text": text}]  # type: ignore[assignment]
        response = {"id": f"resp_{self.num}", "object": "response", "status": self.status}
        response |= {"output": [message], "previous_response_id": None,
                     "background": fields.get("background", False)}  # fmt: skip
        if not fields.get("stream"):
            body = orjson.dumps(response)
            client.begin(200, [(b"content-type", b"application/json")], length=len(body))
            client.write(body)
            client.end()
            assert client.status == 200  # of which the dispatch tells the metrics
            return
        client.begin(200, [EVENTS])
        began = response | {"status": "in_progress", "output": []}
        wire = b"".join(
            b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind} | extra))
            for kind, extra in [
                ("response.created", {"response": began}),
                ("response.output_text.delta", {"delta": text}),
                (f"response.{self.status}", {"response": response}),
            ]
        )
        wire = wire.replace(b"\n", self.line_end)
        for place in range(0, len(wire), 7):  # as a foreign worker's bytes may come
            client.write(wire[place : place + 7])
        client.end()

    async def post(self, **fields: Any) -> Any:
        """A response as the client gets it: JSON, or the events of a stream."""
        client = Client()
        call = Call("POST", "/v1/responses", "", [], orjson.dumps(fields))
        call.principal = fields.get("user", "")
        await self.dispatch(call, client)
        assert client.has_ended and client.status == 200
        if not fields.get("stream"):
            assert client.length == len(client.body)
            return orjson.loads(client.body)
        blocks = client.body.replace(b"\r", b"").split(b"\n\n")[:-1]
        return [orjson.loads(block.partition(b"data: ")[2]) for block in blocks]

    async def ask(self, method: str, path: str, user: str = "", **fields: Any) -> Any:
        """The answer of a route."""
        path, _, query = path.partition("?")
        call = Call(method, path, query, [], orjson.dumps(fields) if fields else b"")
        call.principal = user
        route = self.routes.find(call)
        assert route is not None
        answer = await route.handler(call)
        assert isinstance(answer.body, bytes)
        return orjson.loads(answer.body)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    for work in made.on_stop:
        work()


def _texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] if isinstance(item["content"], list) else item["content"]
            for item in items]  # fmt: skip


@pytest.mark.parametrize(("stream", "line_end"), [(0, b""), (1, b"\n"), (1, b"\r\n")])
async def test_a_response_continues_another(bench: Bench, stream: bool, line_end: bytes) -> None:
    bench.line_end = line_end
    await bench.post(input="one", instructions="be kind")
    await bench.post(input=[{"role": "user", "content": "two"}], previous_response_id="resp_1")
    found = await bench.post(input="three", previous_response_id="resp_2", stream=stream)
    assert _texts(bench.sent[2]["input"]) == ["one", "answer 1", "two", "answer 2", "three"]
    assert "previous_response_id" not in bench.sent[2] and "instructions" not in bench.sent[2]
    whole = found[-1]["response"] if stream else found
    assert whole["previous_response_id"] == "resp_2"
    if stream:
        assert found[0]["response"]["previous_response_id"] == "resp_2"
        assert found[1] == {"type": "response.output_text.delta", "delta": "answer 3"}
    assert await bench.ask("GET", "/v1/responses/resp_3") == whole


async def test_bytes_that_need_no_change_pass_unchanged(bench: Bench) -> None:
    body = b'{ "input":"x" , "temperature":1.0e0, "big":123456789012345678901234567890}'
    call = Call("POST", "/v1/responses", "", [], body)
    await bench.dispatch(call, Client())
    assert call.body is body
    call = Call("POST", "/v1/responses", "", [], b"no json")
    await bench.dispatch(call, Client())
    assert call.body == b"no json"


async def test_store_false_keeps_nothing(bench: Bench) -> None:
    await bench.post(input="one", store=False)
    with pytest.raises(NotFound):
        await bench.ask("GET", "/v1/responses/resp_1")
    assert bench.asked == ["GET /v1/responses/resp_1"]  # the worker was asked


async def test_unknown_previous_responses_are_left_to_the_worker(bench: Bench) -> None:
    await bench.post(input="one", previous_response_id="resp_of_the_worker")
    assert bench.sent[0]["previous_response_id"] == "resp_of_the_worker"
    with pytest.raises(NotFound):
        await bench.ask("GET", "/v1/responses/resp_1")  # its context is not known here


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "a:b", "", "\U0001f600 x"])
async def test_names_that_no_database_takes_are_unknown(bench: Bench, name: str) -> None:
    bench.history._ask = None  # the store is not asked
    with pytest.raises(NotFound):
        await bench.post(input="x", conversation=name)
    if name:
        await bench.history.response(name, Call("GET", "/", "", [], b""))


async def test_only_the_key_that_made_it_sees_a_response(bench: Bench) -> None:
    await bench.post(input="one", user="alice")
    assert (await bench.ask("GET", "/v1/responses/resp_1", "alice"))["id"] == "resp_1"
    with pytest.raises(NotFound):
        await bench.ask("GET", "/v1/responses/resp_1", "bob")
    shown = await bench.ask("POST", "/v1/conversations", "alice", metadata={"a": "b"})
    with pytest.raises(NotFound):
        await bench.ask("GET", f"/v1/conversations/{shown['id']}", "bob")


async def test_input_items_and_delete(bench: Bench) -> None:
    items = [{"role": "user", "content": text} for text in "abc"]
    await bench.post(input=items)
    path = "/v1/responses/resp_1/input_items"
    assert _texts((await bench.ask("GET", path + "?order=asc"))["data"]) == ["a", "b", "c"]
    page = await bench.ask("GET", path + "?limit=2")
    assert _texts(page["data"]) == ["c", "b"] and page["has_more"]
    rest = await bench.ask("GET", f"{path}?after={page['last_id']}")
    assert _texts(rest["data"]) == ["a"] and not rest["has_more"]
    for limit in ("0", "²", "9" * 5000):
        with pytest.raises(InvalidRequest):
            await bench.ask("GET", f"{path}?limit={limit}")
    deleted = await bench.ask("DELETE", "/v1/responses/resp_1")
    assert deleted == {"id": "resp_1", "object": "response", "deleted": True}
    with pytest.raises(NotFound):
        await bench.ask("GET", "/v1/responses/resp_1")


async def test_references_to_known_items_are_replaced(bench: Bench) -> None:
    await bench.post(input="one")
    reference = {"type": "item_reference", "id": "msg_1"}
    await bench.post(input=[reference, {"role": "user", "content": "x"}],
                     previous_response_id="resp_1")  # fmt: skip
    assert _texts(bench.sent[1]["input"]) == ["one", "answer 1", "answer 1", "x"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_collects_its_turns(bench: Bench, stream: bool) -> None:
    first = {"type": "message", "role": "user", "content": "zero"}
    made = await bench.ask("POST", "/v1/conversations", items=[first])
    name = made["id"]
    await bench.post(input="one", conversation=name, stream=stream)
    found = await bench.post(input="two", conversation={"id": name}, stream=stream)
    whole = found[-1]["response"] if stream else found
    assert whole["conversation"] == {"id": name}
    assert _texts(bench.sent[1]["input"]) == ["zero", "one", "answer 1", "two"]
    assert "conversation" not in bench.sent[1]
    items = f"/v1/conversations/{name}/items"
    listed = (await bench.ask("GET", items + "?order=asc"))["data"]
    assert _texts(listed) == ["zero", "one", "answer 1", "two", "answer 2"]
    one = listed[1]["id"]
    assert (await bench.ask("GET", f"{items}/{one}"))["content"][0]["text"] == "one"
    assert (await bench.ask("DELETE", f"{items}/{one}"))["id"] == name
    with pytest.raises(NotFound):
        await bench.ask("GET", f"{items}/{one}")
    gone = await bench.ask("DELETE", f"/v1/conversations/{name}")
    assert gone == {"id": name, "object": "conversation.deleted", "deleted": True}
    with pytest.raises(NotFound):
        await bench.post(input="x", conversation=name)


async def test_a_failed_turn_leaves_the_conversation_as_it_was(bench: Bench) -> None:
    made = await bench.ask("POST", "/v1/conversations", items=[])
    bench.status = "failed"
    await bench.post(input="one", conversation=made["id"])
    assert (await bench.ask("GET", f"/v1/conversations/{made['id']}/items"))["data"] == []


async def test_metadata_is_merged(bench: Bench) -> None:
    made = await bench.ask("POST", "/v1/conversations", metadata={"a": "1", "b": "2"})
    path = f"/v1/conversations/{made['id']}"
    shown = await bench.ask("POST", path, metadata={"a": None, "c": "3"})
    assert shown["metadata"] == {"b": "2", "c": "3"}
    assert await bench.ask("GET", path) == shown


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/conversations", {"metadata": "x"}),
    ("/v1/conversations", {"metadata": {str(n): "x" for n in range(17)}}),
    ("/v1/conversations", {"items": "x"}),
    ("/v1/conversations", {"items": ["x"]}),
    ("/v1/conversations", {"items": [{}] * 21}),
    ("/v1/conversations", {"items": [{"id": "a\0b"}]}),
    ("/v1/conversations", {"items": [{"id": "x" * 129}]}),
    ("/v1/conversations", {"items": [{"id": 3}]}),
]


@pytest.mark.parametrize(("path", "fields"), BAD)
async def test_faults_of_clients_are_named(bench: Bench, path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        await bench.ask("POST", path, **fields)
    assert error.value.status == 400 and error.value.param in ("metadata", "items")


@pytest.mark.parametrize("body", [b"{", b"[]", b"3", b"\xff"])
async def test_a_body_that_is_no_object_is_refused(bench: Bench, body: bytes) -> None:
    call = Call("POST", "/v1/conversations", "", [], body)
    route = bench.routes.find(call)
    assert route is not None
    with pytest.raises(InvalidRequest, match="JSON object"):
        await route.handler(call)
    call.body = b""
    assert (await route.handler(call)).status == 200


async def test_an_item_is_added_once(bench: Bench) -> None:
    made = await bench.ask("POST", "/v1/conversations", items=[])
    item = {"id": "msg_mine", "role": "user", "content": "x"}
    path = f"/v1/conversations/{made['id']}/items"
    added = await bench.ask("POST", path, items=[item])
    assert added["first_id"] == "msg_mine" and not added["has_more"]
    with pytest.raises(InvalidRequest) as error:
        await bench.ask("POST", path, items=[item])
    assert error.value.code == "item_already_in_conversation"


async def test_conversation_and_previous_response_exclude_each_other(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="exclude"):
        await bench.post(input="x", conversation="conv_1", previous_response_id="resp_1")


async def test_a_response_of_the_background_is_asked_of_its_worker(bench: Bench) -> None:
    made = await bench.ask("POST", "/v1/conversations", items=[])
    bench.status = "queued"
    await bench.post(input="one", background=True, conversation=made["id"])
    path = "/v1/responses/resp_1"
    response = {"id": "resp_1", "object": "response", "background": True, "output": []}
    bench.fetched[path] = response | {"status": "in_progress"}
    assert (await bench.ask("GET", path))["status"] == "in_progress"
    for odd in (TransferError("it is busy"), ["odd"], {"status": "completed"}):
        bench.fetched[path] = odd
        assert (await bench.ask("GET", path))["status"] == "queued"
    answer = {"type": "message", "role": "assistant", "content": "done"}
    bench.fetched[path] = response | {"status": "completed", "output": [answer]}
    found = await bench.ask("GET", path)
    assert found["status"] == "completed" and found["conversation"] == {"id": made["id"]}
    num_asked = len(bench.asked)
    await bench.ask("GET", path)
    assert len(bench.asked) == num_asked  # it is final
    items = await bench.ask("GET", f"/v1/conversations/{made['id']}/items?order=asc")
    assert _texts(items["data"]) == ["one", "done"]


async def test_a_response_of_the_background_fails_with_its_worker(bench: Bench) -> None:
    bench.status = "queued"
    await bench.post(input="one", background=True)
    bench.registry.clear()
    found = await bench.ask("GET", "/v1/responses/resp_1")
    assert found["status"] == "failed" and "worker" in found["error"]["message"]


async def test_cancel(bench: Bench) -> None:
    await bench.post(input="one")
    with pytest.raises(InvalidRequest, match="synchronous"):
        await bench.ask("POST", "/v1/responses/resp_1/cancel")
    bench.status = "queued"
    await bench.post(input="two", background=True)
    path = "/v1/responses/resp_2"
    response = {"id": "resp_2", "object": "response", "background": True}
    bench.fetched[path] = response | {"status": "in_progress"}
    bench.fetched[path + "/cancel"] = response | {"status": "cancelled"}
    assert (await bench.ask("POST", path + "/cancel"))["status"] == "cancelled"
    assert (await bench.ask("GET", path))["status"] == "cancelled"


async def test_without_history_the_workers_answer() -> None:
    bench = Bench(history_backend="none")
    await bench.post(input="one", previous_response_id="resp_0")
    assert bench.sent[0]["previous_response_id"] == "resp_0"
    bench.fetched["/v1/responses/resp_1"] = {"id": "resp_1"}
    assert await bench.ask("GET", "/v1/responses/resp_1") == {"id": "resp_1"}
    assert bench.routes.find(Call("POST", "/v1/conversations", "", [], b"")) is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_outlives_the_store(
    bench: Bench, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def put(*_: Any) -> None:
        raise Overloaded("the history's store does not answer")

    bench.history.store.put = put
    found = await bench.post(input="one", stream=stream)
    assert (found[-1]["response"] if stream else found)["status"] == "completed"
    assert "resp_1 is not stored" in caplog.text


async def test_the_last_event_comes_after_the_response_is_stored(bench: Bench) -> None:
    client, order = Client(), []
    put = bench.history.store.put
    bench.history.store.is_local = False

    def slow_put(*args: Any) -> None:
        order.append(b"completed" in client.body)
        put(*args)

    slow_put.__name__ = "put"
    bench.history.store.put = slow_put
    call = Call("POST", "/v1/responses", "", [], b'{"input":"x","stream":true}')
    await asyncio.wait_for(bench.dispatch(call, client), 10)
    assert order == [False] and b"response.completed" in client.body


@pytest.mark.parametrize("name", ["..", ".", "..%2F..%2Fflush_cache", "a%3Fb"])
async def test_the_path_of_a_response_leads_nowhere_else(bench: Bench, name: str) -> None:
    for method in ("GET", "DELETE"):
        with pytest.raises(NotFound):
            await bench.ask(method, f"/v1/responses/{name}")
    assert bench.asked == []


async def test_what_is_nested_too_deeply_is_refused_or_not_kept(bench: Bench) -> None:
    for depth, works in ((200, True), (246, False), (250, False), (300, False)):
        deep = b"[" * depth + b"]" * depth
        item = b'{"type": "message", "role": "user", "content": %b}' % deep
        for body in (b'{"items": [%b]}' % item, b'{"metadata": {"a": %b}}' % deep):
            call = Call("POST", "/v1/conversations", "", [], body)
            route = bench.routes.find(call)
            assert route is not None
            if works:
                made = orjson.loads((await route.handler(call)).body)
                await bench.ask("GET", f"/v1/conversations/{made['id']}/items")
            else:
                with pytest.raises(InvalidRequest, match="200 levels"):
                    await route.handler(call)
        client, call = Client(), Call("POST", "/v1/responses", "", [], b'{"input": [%b]}' % item)
        await bench.dispatch(call, client)
        assert client.has_ended and client.status == 200  # the worker took it


async def test_events_of_a_worker_are_read_no_faster_than_by_the_client() -> None:
    class Exchange:
        num_paused, is_closed = 0, False

        def start(self, sink: Any) -> None:
            self.sink, self.ended = sink, asyncio.get_running_loop().create_future()

        async def wait(self) -> None:
            await self.ended

        def pause(self) -> None:
            self.num_paused += 1

        def resume(self) -> None:
            self.num_paused = 0

        def close(self) -> None:
            self.is_closed = True
            if not self.ended.done():
                self.ended.set_exception(Cut("closed"))

    exchange = Exchange()
    parts = chunks(exchange)
    first = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    exchange.sink(b"a")
    assert exchange.num_paused == 1  # until the client has taken it
    assert await first == b"a"
    second = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    assert exchange.num_paused == 0
    exchange.sink(b"b")
    assert await second == b"b"
    await parts.aclose()  # the client leaves
    assert exchange.is_closed
