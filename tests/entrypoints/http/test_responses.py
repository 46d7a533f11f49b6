"""The Responses API with the unmodified client: events, stored responses, background mode."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.base.errors import ConfigError
from radixlm.entrypoints.http.app import resume
from radixlm.entrypoints.http.responses import tool_loop
from radixlm.entrypoints.http.responses.background import Responses
from radixlm.entrypoints.http.responses.schemas import ResponsesRequest
from radixlm.entrypoints.http.responses.store import (
    MemoryStore,
    RedisStore,
    ResponseStore,
    SqliteStore,
    Stored,
    store_of,
)
from radixlm.entrypoints.http.responses.toolbox import ToolServers
from radixlm.text.tools.base import ToolCallDelta

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}


@pytest_asyncio.fixture
async def client(server: ScriptedServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as made:
            yield made


async def test_a_response_and_its_continuation(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="grüße", instructions="Be kind.")
    assert first.status == "completed" and first.output_text == "Grüße 😀 aus Köln"
    assert first.usage and first.usage.total_tokens > first.usage.input_tokens
    second = await client.responses.create(
        model="tiny", input="and?", previous_response_id=first.id
    )
    assert second.output_text == first.output_text, "the script saw the earlier turn"
    assert second.usage and second.usage.input_tokens > 20
    again = await client.responses.retrieve(second.id)
    assert again.output_text == second.output_text
    items = await client.responses.input_items.list(first.id)
    assert items.data[0].content[0].text == "grüße"  # type: ignore[union-attr]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        await client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"


async def test_items_of_earlier_responses_can_be_referred_to(client: openai.AsyncOpenAI) -> None:
    """As by clients that store ids instead of texts."""
    user: Any = {"role": "user", "content": "sum please"}
    first = await client.responses.create(model="tiny", input=[user], tools=[ADD])
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert results and len({item.id for item in first.output}) == len(first.output)
    whole: Any = [item.model_dump(exclude_none=True) for item in first.output]
    by_id = await client.responses.create(model="tiny", input=[user, *references, *results])
    by_text = await client.responses.create(model="tiny", input=[user, *whole, *results])
    assert by_id.output_text == by_text.output_text
    assert by_id.usage and by_text.usage
    assert by_id.usage.input_tokens == by_text.usage.input_tokens
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=references[0]["id"]) as gone:
        await client.responses.create(model="tiny", input=[user, *references])
    assert gone.value.param == "input[1].id"


async def test_a_conversation_is_continued_and_grows(client: openai.AsyncOpenAI) -> None:
    first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    talk: Any = await client.conversations.create(items=first, metadata={"a": "b"})  # type: ignore[arg-type]
    made = await client.responses.create(model="tiny", input="hi", conversation=talk.id)
    asked: Any = [*first, {"role": "user", "content": "hi"}]
    whole = await client.responses.create(model="tiny", input=asked)
    assert made.conversation and made.conversation.id == talk.id
    assert made.usage and whole.usage and made.usage.input_tokens == whole.usage.input_tokens
    async with client.responses.stream(
        model="tiny", input="more", conversation={"id": talk.id}
    ) as stream:
        last = await stream.get_final_response()
    items: Any = [i async for i in client.conversations.items.list(talk.id, limit=2, order="asc")]
    texts = [item.content[0].text for item in items]
    assert texts == ["one", "two", "hi", made.output_text, "more", last.output_text]
    assert len({item.id for item in items}) == 6
    added = await client.conversations.items.create(talk.id, items=[first[0]])  # type: ignore[list-item]
    one: Any = await client.conversations.items.retrieve(added.first_id, conversation_id=talk.id)
    assert one.content[0].text == "one" and one.id == added.data[0].id
    await client.conversations.items.delete(added.first_id, conversation_id=talk.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(added.first_id, conversation_id=talk.id)
    assert (await client.conversations.update(talk.id, metadata={"k": "v"})).metadata == {"k": "v"}
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(talk.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(input="x", conversation=talk.id, previous_response_id=made.id)
    assert (await client.conversations.delete(talk.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(input="x", conversation=talk.id)


async def test_a_conversation_can_be_compacted(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="one")
    made = await client.responses.compact(model="tiny", input="two", previous_response_id=first.id)
    users, item = made.output[:-1], made.output[-1]
    assert [one.content[0].text for one in users] == ["one", "two"]  # type: ignore[union-attr]
    assert item.type == "compaction"
    summary = base64.b64decode(item.encrypted_content).decode()
    assert summary == first.output_text, "the script answers everything alike"
    kept: Any = [one.model_dump(exclude_none=True, warnings=False) for one in made.output]
    told = {"role": "assistant", "content": f"Summary of our conversation so far:\n{summary}"}
    asked: Any = [*({"role": "user", "content": text} for text in ("one", "two")), told]
    ends: Any = [{"role": "user", "content": "three"}]
    answers = [
        await client.responses.create(model="tiny", input=before + ends) for before in (kept, asked)
    ]
    counts = [one.usage.input_tokens for one in answers if one.usage]
    assert counts[0] == counts[1]


async def test_stream_events_add_up_to_the_response(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(
        model="tiny", input="sum please", tools=[ADD], parallel_tool_calls=True
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    assert [item.type for item in final.output] == ["message", "function_call"]
    call: Any = final.output[1]
    assert call.name == "add" and call.arguments == '{"a": 1, "b": 2}'


async def test_items_of_a_stream_come_in_the_order_of_the_answer(server: ScriptedServer) -> None:
    """A delta says what text and which calls came: the rest of an open call, text, new calls."""
    body = ResponsesRequest(input="hi", tools=[ADD])
    run = await tool_loop.make_run(server.state, body, ToolServers(), None)
    deltas: list[tuple[str, list[ToolCallDelta]]] = [
        ("I add. ", [ToolCallDelta(0, "add", '{"a": 1')]),
        ("Then more.", [ToolCallDelta(0, None, "}"), ToolCallDelta(1, "add", '{"a"')]),
        ("", [ToolCallDelta(1, None, ": 2}"), ToolCallDelta(2, "add", "{}")]),
        ("\n", []),
        ("", [ToolCallDelta(3, "add", "{}")]),
        ("The end.", []),
    ]
    kinds: list[str] = []
    pieces: list[str] = []
    for text, calls in deltas:
        parsed: Any = SimpleNamespace(reasoning="", text=text, calls=calls)
        delta: Any = SimpleNamespace(parsed=parsed, output=None, finish_reason=None)
        for event in run.writer.take(delta):
            if event["type"] == "response.output_item.added":
                assert event["output_index"] == len(kinds)
                kinds.append(event["item"]["type"])
                pieces.append("")
            elif event["type"].endswith(".delta"):
                assert event["output_index"] == len(kinds) - 1
                pieces[-1] += event["delta"]
    call = "function_call"
    assert kinds == ["message", call, "message", call, call, call, "message"]
    assert pieces == ["I add. ", '{"a": 1}', "Then more.", '{"a": 2}', "{}", "{}", "The end."]
    assert [item["type"] for item in run.writer.output] == kinds


async def test_reasoning_is_an_item_of_its_own(client: openai.AsyncOpenAI) -> None:
    body: Any = {"model": "tiny", "input": "think about", "reasoning": {"effort": "high"}}
    got = await client.responses.create(**body)
    assert [item.type for item in got.output] == ["reasoning", "message"]
    assert got.output_text.strip() == "The answer is 42."
    assert got.usage and got.usage.output_tokens_details.reasoning_tokens > 0
    events = [event async for event in await client.responses.create(**body, stream=True)]
    thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    text = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(thought).strip() == "It is simple."
    assert "".join(text) == got.output_text


async def test_a_tool_result_comes_back(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="sum please", tools=[ADD])
    call: Any = first.output[-1]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    second = await client.responses.create(
        model="tiny", input=result, previous_response_id=first.id
    )
    assert second.status == "completed"
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "stop me"}]},
        *(item.model_dump() for item in first.output),
        *result,
    ]
    third = await client.responses.create(model="tiny", input=given)
    assert third.output_text == "one two STOP three"


async def test_length_is_incomplete(client: openai.AsyncOpenAI) -> None:
    got = await client.responses.create(model="tiny", input="forever", max_output_tokens=5)
    assert got.status == "incomplete" and got.incomplete_details
    assert got.incomplete_details.reason == "max_output_tokens"


async def test_background_can_be_polled_watched_and_cancelled(
    client: openai.AsyncOpenAI, server: ScriptedServer
) -> None:
    server.engine.executor.is_slow = True
    made = await client.responses.create(model="tiny", input="forever", background=True)
    assert made.status == "queued"
    ended = await client.responses.cancel(made.id)
    assert ended.status == "cancelled" and not server.engine.intake.requests
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    server.engine.executor.is_slow = False
    short = await client.responses.create(model="tiny", input="hi", background=True)
    async with asyncio.timeout(60):
        while (await client.responses.retrieve(short.id)).status != "completed":
            await asyncio.sleep(0.01)
    assert (await client.responses.retrieve(short.id)).output_text == "Hello there."
    streamed = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
    kinds = [event.type async for event in streamed]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "alien"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": "x", "tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": "x", "include": ["everything"]}, "include"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "conversation": {"id": 3}}, "conversation"),
        ({"input": "x", "temperature": 1e400}, "temperature"),
        ({"input": "x", "text": {"format": "json"}}, "text.format"),
    ],
)
async def test_a_bad_field_is_named(
    server: ScriptedServer, body: dict[str, Any], param: str
) -> None:
    data = str(body).replace("'", '"').replace("True", "true").replace("False", "false")
    data = data.replace("inf", "NaN")
    headers = {"content-type": "application/json"}
    got = await server.client.post("/v1/responses", content=data, headers=headers)
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == param


async def test_sampling_fields_of_vllm_reach_the_engine(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    hooks = server.engine.scheduler.hooks
    monkeypatch.setattr(hooks, "arrive", lambda request: seen.append(request.wire))
    fields: dict[str, Any] = {
        "structured_outputs": {"choice": ["a", "b"]},
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "logit_bias": {"5": 1.5},
        "max_output_tokens": 4,
    }
    got = await server.post("/v1/responses", input="hi", **fields)
    assert got.status_code == 200 and "X-RadixLM-Ignored" not in got.headers, got.headers
    (wire,) = seen
    assert (wire.grammar.kind, wire.grammar.value) == ("regex", "(a|b)")
    sampling = wire.sampling
    assert (sampling.no_stop_trim, sampling.ignore_eos, sampling.min_new_tokens) == (True, True, 2)
    assert sampling.logit_bias == {5: 1.5}
    both = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
    refused = await server.post("/v1/responses", input="hi", **both)
    assert refused.status_code == 400 and "regex" in refused.text, refused.text


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_a_store_keeps_and_forgets(tmp_path: Path, kind: str) -> None:
    store: ResponseStore = MemoryStore(capacity=2)
    if kind == "sqlite":
        store = SqliteStore(tmp_path / "kept" / "r.sqlite")
    if kind == "redis":
        store = RedisStore("redis://x", pytest.importorskip("fakeredis").FakeRedis())
    for name in ("a", "b"):
        store.put(Stored({"id": name, "n": 1}, [], []))
    kept = Stored({"id": "a", "n": 2}, [{"x": 1}], [{"role": "user"}], "owner")
    store.put(kept)
    assert store.get("a") == kept
    assert store.delete("a") and not store.delete("a") and store.get("a") is None


def test_the_memory_store_is_bounded() -> None:
    small = MemoryStore(capacity=1)
    small.put(Stored({"id": "a"}, [], []))
    small.put(Stored({"id": "b"}, [], []))
    assert small.get("a") is None and small.get("b")


async def test_responses_outlive_the_process(toy_folder: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    async with scripted_server(toy_folder, {}, file_storage_path=folder) as one:
        made = (await one.post("/v1/responses", input="hi")).json()
    async with scripted_server(toy_folder, {}, file_storage_path=folder) as two:
        got = (await two.client.get(f"/v1/responses/{made['id']}")).json()
    assert got == made


async def test_a_response_that_a_dead_process_left_has_failed(
    toy_folder: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "kept")
    left = {"id": "resp_1", "status": "queued", "background": True, "output": []}
    store = SqliteStore(Path(folder) / "responses.sqlite")
    store.put(Stored(left, [], []))
    other = SqliteStore(Path(folder) / "responses.sqlite")
    other.put(Stored(left | {"id": "resp_2"}, [], []))
    store.close()
    async with scripted_server(toy_folder, {}, file_storage_path=folder) as server:
        resume(server.state)
        got = (await server.client.get("/v1/responses/resp_1")).json()
        assert got["status"] == "failed" and "restarted" in got["error"]["message"]
        got = (await server.client.get("/v1/responses/resp_2")).json()
        assert got["status"] == "queued"  # its process lives
        assert other.unfinished() == []
        other.close()
        resume(server.state)
        got = (await server.client.get("/v1/responses/resp_2")).json()
        assert got["status"] == "failed"
    assert len(list(Path(folder).glob("process-*.lock"))) == 1


async def test_background_events_can_be_read_again(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
    events = [event async for event in made]
    first: Any = events[0]
    for place in (0, 3):
        again = await client.responses.retrieve(
            first.response.id, stream=True, starting_after=place
        )
        assert [event async for event in again] == events[place + 1 :]


async def test_a_client_may_resume_after_the_last_event(client: openai.AsyncOpenAI) -> None:
    """The response is stored before its last event is sent."""
    async for event in await client.responses.create(model="tiny", input="hi", stream=True):
        if event.type == "response.completed":
            found = await client.responses.retrieve(event.response.id)
            assert found.output_text == "Hello there."
            break


async def test_an_unreachable_store_is_a_503(toy_folder: Path) -> None:
    fakeredis = pytest.importorskip("fakeredis")
    redis = fakeredis.FakeServer()
    async with scripted_server(toy_folder, {}) as server:
        server.state.extra(Responses).store = RedisStore(
            "redis://x", fakeredis.FakeRedis(server=redis)
        )
        made = (await server.post("/v1/responses", input="hi")).json()
        got = await server.client.get(f"/v1/responses/{made['id']}")
        assert got.json() == made
        redis.connected = False
        got = await server.client.get(f"/v1/responses/{made['id']}")
        assert got.status_code == 503 and got.headers["retry-after"]


def test_stores_of_the_flag(tmp_path: Path) -> None:
    assert isinstance(store_of(None, tmp_path, False), MemoryStore)
    assert isinstance(store_of(None, tmp_path, True), SqliteStore)
    assert isinstance(store_of("sqlite", tmp_path, False), SqliteStore)
    with pytest.raises(ConfigError, match="--response-store"):
        store_of("postgres://x", tmp_path, False)


async def test_truncation_drops_the_oldest(server: ScriptedServer) -> None:
    """A tool result is dropped with its call; without truncation the request is too long."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = [
        {"role": "user", "content": "word " * 1500},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "word " * 900},
        {"role": "user", "content": "grüße"},
    ]
    refused = await server.post("/v1/responses", input=given)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    got = await server.post("/v1/responses", input=given, truncation="auto")
    assert got.status_code == 200, got.text
    assert got.json()["output"][0]["content"][0]["text"] == "Grüße 😀 aus Köln"
    usage = got.json()["usage"]
    assert usage["input_tokens"] == usage["prompt_tokens"] < 200


@pytest.mark.parametrize("status", ["incomplete", "in_progress", "completed", None])
async def test_an_unfinished_message_is_continued(
    server: ScriptedServer, status: str | None
) -> None:
    said = {"role": "assistant", "content": "Grüße"}
    asked = [{"role": "user", "content": "hi"}, said]
    given = [asked[0], said | {"type": "message", "status": status}]
    fields = {"continue_final_message": status not in (None, "completed")}
    chat = (await server.post("/v1/chat/completions", messages=asked, **fields)).json()
    got = (await server.post("/v1/responses", input=given)).json()
    assert got["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    more = [*given, {"role": "user", "content": "go on"}]
    chat = (await server.post("/v1/chat/completions", messages=[*asked, more[-1]])).json()
    got = (await server.post("/v1/responses", input=more)).json()
    assert got["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


async def test_truncation_of_a_long_conversation_renders_it_a_few_times(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of more messages than the context has tokens."""
    sizes: list[int] = []
    make = tool_loop.make_chat_session

    async def made(state: Any, chat: Any) -> Any:
        sizes.append(len(chat.messages))
        return await make(state, chat)

    monkeypatch.setattr(tool_loop, "make_chat_session", made)
    given = [{"role": "user", "content": f"word {i}"} for i in range(3000)]
    got = await server.post("/v1/responses", input=given, truncation="auto", max_output_tokens=9)
    assert got.status_code == 200, got.text
    kept, length = min(sizes), got.json()["usage"]["input_tokens"]
    assert 10 < kept < 1000 and 1900 < length <= 2048 - 9
    assert len(sizes) < 16


@pytest.mark.parametrize(
    ("context", "kept"), [(99, "abcde"), (98, "bcde"), (39, "e"), (9, "e"), (41, "cde")]
)
async def test_truncation_drops_tool_results_with_their_call(
    monkeypatch: pytest.MonkeyPatch, context: int, kept: str
) -> None:
    """The results would fit, but say nothing without the call. The last message always stays."""
    sizes = [("a", "user", 1), ("b", "assistant", 58), ("c", "tool", 10), ("d", "tool", 10)]
    sizes.append(("e", "user", 19))
    if context == 41:
        sizes[2] = ("c", "assistant", 10)
    messages = [{"name": name, "role": role, "size": size} for name, role, size in sizes]

    async def make(state: Any, shown: list[dict[str, Any]]) -> Any:
        ids = [0] * sum(message["size"] for message in shown)
        return SimpleNamespace(request=SimpleNamespace(input_ids=ids), shown=shown)

    monkeypatch.setattr(tool_loop, "chat_of", lambda body, shown, remote, may_call: shown)
    monkeypatch.setattr(tool_loop, "make_chat_session", make)
    body: Any = SimpleNamespace(truncation="auto", max_output_tokens=1, instructions=None)
    state: Any = SimpleNamespace(intake=SimpleNamespace(facts=SimpleNamespace(context_len=context)))
    session: Any = await tool_loop._session(state, body, messages, [])
    assert "".join(message["name"] for message in session.shown) == kept
