"""Files and batches through the gateway, with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from radixlm.router import stored_files
from radixlm.router.worker import State, Worker
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.router.client import ask
from tests.router.front import Front

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def line(name: str, **extra: Any) -> bytes:
    body = {"messages": MESSAGES} | extra
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode()


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@asynccontextmanager
async def gateway(toy_folder: Path, folder: Path, num: int = 3) -> AsyncIterator[Front]:
    """A gateway before servers that keep their files apart; the first of them is busy."""
    async with AsyncExitStack() as stack:
        front = Front([])
        stored_files.attach(front.gateway)
        for number in range(num):
            path = str(folder / str(number))
            server: ScriptedServer = await stack.enter_async_context(
                scripted_server(toy_folder, {}, file_storage_path=path)
            )
            port = await stack.enter_async_context(listening(server))
            worker = front.join(Worker(f"http://127.0.0.1:{port}"))
            front.workers.append(worker)
        front.workers[0].num_inflight = 5
        yield await stack.enter_async_context(front)


async def test_files_and_batches_of_openai(toy_folder: Path, tmp_path: Path) -> None:
    async with (
        gateway(toy_folder, tmp_path) as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client,
    ):
        text = b"\n".join((line("a"), line("b", temperature=-1)))
        files = [
            await client.files.create(file=(f"{i}.jsonl", text), purpose="batch") for i in range(6)
        ]
        assert not [*(tmp_path / "0").rglob("file-*")]  # it has more to do
        for made in files:
            assert (await client.files.retrieve(made.id)).filename == made.filename
            assert (await client.files.content(made.id)).content == text
        listed = await client.files.list(limit=4)
        assert len(listed.data) == 4 and listed.has_more
        all_ids = [one.id async for one in client.files.list(limit=4)]
        assert sorted(all_ids) == sorted(one.id for one in files)
        oldest = [one.id async for one in client.files.list(limit=4, order="asc")]
        assert oldest == all_ids[::-1]

        batches = [
            await client.batches.create(
                input_file_id=one.id, endpoint=CHAT, completion_window="24h"
            )
            for one in files[:3]
        ]
        for batch in batches:
            async with asyncio.timeout(60):
                while (got := await client.batches.retrieve(batch.id)).status != "completed":
                    await asyncio.sleep(0.005)
            assert got.request_counts is not None and got.request_counts.completed == 1
            assert got.output_file_id and got.error_file_id
            (row,) = (await client.files.content(got.output_file_id)).text.splitlines()
            answer = json.loads(row)["response"]["body"]
            assert answer["choices"][0]["message"]["content"] == "Hello there."
        assert {one.id async for one in client.batches.list()} == {one.id for one in batches}
        with pytest.raises(openai.BadRequestError, match="completed already"):
            await client.batches.cancel(batches[0].id)
        assert (await client.files.delete(files[5].id)).deleted
        with pytest.raises(openai.NotFoundError) as gone:
            await client.files.retrieve(files[5].id)
        assert gone.value.param == "file_id"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.batches.create(
                input_file_id=files[5].id, endpoint=CHAT, completion_window="24h"
            )
        assert missing.value.param == "input_file_id"


async def test_batches_of_anthropic(toy_folder: Path, tmp_path: Path) -> None:
    async with (
        gateway(toy_folder, tmp_path) as front,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="x", max_retries=0) as client,
    ):
        batches = client.messages.batches
        params: Any = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES}
        made = [
            await batches.create(requests=[{"custom_id": "a", "params": params}]) for _ in range(3)
        ]
        for one in made:
            async with asyncio.timeout(60):
                while (got := await batches.retrieve(one.id)).processing_status != "ended":
                    await asyncio.sleep(0.005)
            assert got.results_url and got.results_url.startswith(front.url)
            (row,) = [row async for row in await batches.results(one.id)]
            assert row.custom_id == "a" and row.result.type == "succeeded"
        newest = [one.id async for one in batches.list(limit=2)]
        assert sorted(newest) == sorted(one.id for one in made)
        page = await batches.list(before_id=newest[2], limit=1)
        assert [one.id for one in page.data] == [newest[1]] and page.has_more
        await batches.delete(newest[0])
        with pytest.raises(anthropic.NotFoundError):
            await batches.retrieve(newest[0])


async def test_a_worker_that_is_silent_may_have_the_file(toy_folder: Path, tmp_path: Path) -> None:
    async with gateway(toy_folder, tmp_path, num=1) as front:
        name = "file-" + "0" * 24
        assert (await ask(front.url, "GET", f"/v1/files/{name}")).status == 404
        front.join(Worker("http://127.0.0.1:9"))
        for path in (f"/v1/files/{name}", "/v1/files"):
            answer = await ask(front.url, "GET", path)
            assert answer.status == 503 and answer.header(b"retry-after")
        for worker in (*front.gateway.registry,):
            front.gateway.registry.move(worker, State.UNHEALTHY)
        body = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
        assert (await ask(front.url, "POST", "/v1/batches", body)).status == 503
        assert (await ask(front.url, "POST", "/v1/files", {})).status == 503


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/files?limit=0", "limit"),
        ("GET", "/v1/batches?limit=101", "limit"),
        ("GET", "/v1/files?after=x", "after"),
        ("POST", "/v1/batches", "input_file_id"),
    ],
)
async def test_a_bad_field_is_named(
    toy_folder: Path, tmp_path: Path, method: str, path: str, param: str
) -> None:
    async with gateway(toy_folder, tmp_path, num=1) as front:
        answer = await ask(front.url, method, path, {} if method == "POST" else None)
        assert answer.status == 400 and answer.json["error"]["param"] == param


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%2fb", "x" * 200])
async def test_an_id_is_never_another_path(toy_folder: Path, tmp_path: Path, name: str) -> None:
    async with gateway(toy_folder, tmp_path, num=1) as front:
        assert (await ask(front.url, "GET", f"/v1/files/{name}")).status == 404
