"""The unmodified clients of OpenAI, Anthropic and Ollama, over real sockets."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL: Any = {"type": "function", "function": ADD}
CLAUDE_TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest_asyncio.fixture
async def gpt(server: ScriptedServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield client


@pytest_asyncio.fixture
async def claude(server: ScriptedServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            yield client


@pytest_asyncio.fixture
async def llama(server: ScriptedServer) -> AsyncIterator[ollama.AsyncClient]:
    async with listening(server) as port:
        client = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
        yield client
        await client._client.aclose()


async def test_openai_chat_and_its_stream_helper(gpt: openai.AsyncOpenAI) -> None:
    got = await gpt.chat.completions.create(
        model="tiny", messages=user("sum please"), tools=[TOOL], logprobs=True, top_logprobs=1
    )
    assert got.choices[0].finish_reason == "tool_calls"
    calls: Any = got.choices[0].message.tool_calls
    assert calls[0].function.arguments == '{"a": 1, "b": 2}'
    logprobs = got.choices[0].logprobs
    assert logprobs and logprobs.content
    async with gpt.chat.completions.stream(
        model="tiny", messages=user("sum please"), tools=[TOOL]
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    calls = final.choices[0].message.tool_calls
    assert calls[0].function.arguments == '{"a": 1, "b": 2}'


async def test_embeddings_by_both_clients(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, is_pooled=True) as server, listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as gpt:
            vectors = await gpt.embeddings.create(model="tiny", input=["a", "b"])
        assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 2
        llama = ollama.AsyncClient(host=url)
        embedded = await llama.embed("tiny", ["a", "b"])
        assert len(embedded.embeddings) == 2
        assert (await llama.show("tiny")).capabilities == ["embedding"]
        await llama._client.aclose()


async def test_openai_completions_and_models(gpt: openai.AsyncOpenAI) -> None:
    got = await gpt.completions.create(model="tiny", prompt="hi", max_tokens=20, logprobs=1)
    assert got.choices[0].text == "Hello there." and got.usage
    assert [card.id async for card in gpt.models.list()] == ["tiny"]


async def test_openai_errors(gpt: openai.AsyncOpenAI, server: ScriptedServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await gpt.chat.completions.create(model="tiny", messages=user("x"), temperature=-1)
    assert bad.value.param == "temperature"
    server.state.config = server.config.with_values({"strict_model_name": True})
    with pytest.raises(openai.NotFoundError) as missing:
        await gpt.chat.completions.create(model="gpt-99", messages=user("x"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await gpt.chat.completions.create(model="tiny", messages=user("word " * 5000))
    server.engine.intake.leaving.set()
    with pytest.raises(openai.InternalServerError) as busy:
        await gpt.chat.completions.create(model="tiny", messages=user("x"))
    assert busy.value.status_code == 503


async def test_anthropic_documents_of_text_are_read(claude: anthropic.AsyncAnthropic) -> None:
    """As title and text, at any position of the message."""
    plain: Any = {"type": "text", "text": "Notes\nthe cat"}
    held: Any = {"type": "text", "media_type": "text/plain", "data": "the cat"}
    parts: Any = {"type": "content", "content": [{"type": "text", "text": "the cat"}]}
    counts = set()
    for block in (
        plain,
        {"type": "document", "title": "Notes", "source": held},
        {"type": "document", "context": "Notes", "source": parts},
        {"type": "search_result", "source": "Notes", "content": parts["content"]},
    ):
        for content in ([block], [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]):
            messages: Any = [{"role": "user", "content": content}]
            got = await claude.messages.count_tokens(model="tiny", messages=messages)
            counts.add((content[0]["type"] == "tool_result", got.input_tokens))
    assert len(counts) == 2, "one number for each place, however the text is held"
    pdf: Any = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
    messages = [{"role": "user", "content": [{"type": "document", "source": pdf}]}]
    with pytest.raises(anthropic.BadRequestError, match="source"):
        await claude.messages.count_tokens(model="tiny", messages=messages)


async def test_anthropic_messages(claude: anthropic.AsyncAnthropic) -> None:
    got = await claude.messages.create(
        model="tiny", max_tokens=50, system="Be brief.", messages=user("hi")
    )
    assert got.content[0].type == "text" and got.content[0].text == "Hello there."
    assert got.stop_reason == "end_turn" and got.usage.output_tokens > 0
    stopped = await claude.messages.create(
        model="tiny", max_tokens=50, messages=user("stop me"), stop_sequences=["STOP"]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "STOP"
    short = await claude.messages.create(model="tiny", max_tokens=3, messages=user("forever"))
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
    counted = await claude.messages.count_tokens(model="tiny", messages=user("hi"))
    assert 0 < counted.input_tokens < got.usage.input_tokens + 100


async def test_anthropic_streams_tools_and_thinking(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(
        model="tiny", max_tokens=99, messages=user("sum please"), tools=[CLAUDE_TOOL]
    ) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    call: Any = final.content[1]
    assert call.name == "add" and call.input == {"a": 1, "b": 2}
    assert final.stop_reason == "tool_use"
    async with claude.messages.stream(
        model="tiny",
        max_tokens=2000,
        messages=user("think about"),
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        events: list[Any] = [event async for event in stream if event.type.startswith("content")]
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    last = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert last.count("signature_delta") == 1 and last.index("signature_delta") > 0
    assert last[last.index("signature_delta") + 1] == "text_delta"
    answered: Any = final.content[1]
    assert answered.text.strip() == "The answer is 42."


async def test_anthropic_takes_tool_results(claude: anthropic.AsyncAnthropic) -> None:
    turn: Any = [
        {"role": "user", "content": [{"type": "text", "text": "add"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "stop me"},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    got = await claude.messages.create(
        model="tiny", max_tokens=50, messages=turn, tools=[CLAUDE_TOOL]
    )
    assert got.content[0].type == "text" and "three" in got.content[0].text


async def test_anthropic_continues_an_assistant_message(claude: anthropic.AsyncAnthropic) -> None:
    """A last message of the assistant is continued, not answered."""
    begun = [*user("hi"), {"role": "assistant", "content": "Well"}]
    counted = await claude.messages.count_tokens(model="tiny", messages=user("hi"))
    longer = await claude.messages.count_tokens(model="tiny", messages=begun)
    assert longer.input_tokens < counted.input_tokens + 6, "no new turn was opened"
    (model,) = [card async for card in await claude.models.list()]
    assert (model.id, model.type) == ("tiny", "model")


async def test_anthropic_threads_are_refused_as_clients_expect(
    claude: anthropic.AsyncAnthropic,
) -> None:
    body: Any = {"model": "tiny", "max_tokens": 9, "messages": user("hi")}
    with pytest.raises(anthropic.BadRequestError) as refused:
        await claude.beta.messages.create(**body, extra_body={"thread": {"type": "create"}})
    details: Any = refused.value.body
    assert details["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_anthropic_errors(claude: anthropic.AsyncAnthropic, server: ScriptedServer) -> None:
    server.state.config = server.config.with_values({"strict_model_name": True})
    with pytest.raises(anthropic.BadRequestError) as bad:
        await claude.messages.create(
            model="tiny",
            max_tokens=9,
            messages=[{"role": "robot", "content": "x"}],  # type: ignore[typeddict-item]
        )
    assert bad.value.body["type"] == "error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="claude", max_tokens=9, messages=user("x"))
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.models.retrieve("claude")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    where = "messages.0..content.0..source.data: this model reads text only"
    with pytest.raises(anthropic.BadRequestError, match=where):
        await claude.messages.create(model="tiny", max_tokens=9, messages=image)


async def test_ollama_chat_generate_and_list(llama: ollama.AsyncClient) -> None:
    got = await llama.chat(model="tiny:latest", messages=user("hi"))
    assert got.message.content == "Hello there." and got.done and got.done_reason == "stop"
    parts = [
        part
        async for part in await llama.chat("tiny", user("sum please"), tools=[TOOL], stream=True)
    ]
    assert "".join(part.message.content or "" for part in parts).strip() == "I will add."
    (calls,) = [part.message.tool_calls for part in parts if part.message.tool_calls]
    assert calls[0].function.name == "add" and calls[0].function.arguments == {"a": 1, "b": 2}
    text = await llama.generate("tiny:latest", "forever", options={"num_predict": 4, "num_ctx": 9})
    assert text.eval_count == 4 and text.done_reason == "length"
    listed = await llama.list()
    assert [model.model for model in listed.models] == ["tiny:latest"]
    assert re.fullmatch("[0-9a-f]{64}", listed.models[0].digest or "")  # Ollama's CLI cuts it
    shown = await llama.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]


async def test_ollama_pulls_what_is_served(
    llama: ollama.AsyncClient, server: ScriptedServer
) -> None:
    """Programs pull a model before they use it."""
    assert (await llama.pull("llama3.2")).status == "success"
    told = [part.status async for part in await llama.pull("tiny", stream=True)]
    assert told == ["pulling manifest", "success"]
    server.state.config = server.config.with_values({"strict_model_name": True})
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        await llama.pull("llama3.2")
    assert (await llama.pull("tiny:latest")).status == "success"


async def test_ollama_errors(llama: ollama.AsyncClient, server: ScriptedServer) -> None:
    server.state.config = server.config.with_values({"strict_model_name": True})
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        await llama.chat("other", user("x"))
    assert missing.value.status_code == 404
    assert (await llama.chat("tiny", user("x"), options={"warmth": 1})).done  # type: ignore[arg-type]
    off = {"mirostat": 0, "mirostat_eta": 0.1, "tfs_z": 1.0, "typical_p": 1.0}
    assert (await llama.chat("tiny", user("x"), options=off)).done
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        await llama.chat("tiny", user("x"), options={"mirostat": 2})
