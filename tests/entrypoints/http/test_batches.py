"""Files and batches: stored, answered in the background, continued after a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.base.errors import Overloaded
from radixlm.entrypoints.http.app import resume, stop_background
from radixlm.entrypoints.http.batches import files as files_module
from radixlm.entrypoints.http.batches.lines import answer_line, read_line
from radixlm.entrypoints.http.batches.runner import Batches, check_lines

CHAT = "/v1/chat/completions"


def line(name: str, text: str = "hi", **extra: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}]} | extra
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})


async def upload(server: ScriptedServer, text: str) -> str:
    got = await server.client.post(
        "/v1/files", files={"file": ("in.jsonl", text.encode())}, data={"purpose": "batch"}
    )
    assert got.status_code == 200, got.text
    return str(got.json()["id"])


async def until(server: ScriptedServer, batch_id: str, *states: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            got = (await server.client.get(f"/v1/batches/{batch_id}")).json()
            if got["status"] in states:
                return got
            await asyncio.sleep(0.005)


async def results(server: ScriptedServer, file_id: str) -> dict[str, Any]:
    text = (await server.client.get(f"/v1/files/{file_id}/content")).text
    rows = [json.loads(row) for row in text.splitlines()]
    return {row["custom_id"]: row["response"] for row in rows}


async def test_a_batch_by_the_client_of_openai(toy_folder: Path, tmp_path: Path) -> None:
    async with (
        scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server,
        listening(server) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client,
    ):
        text = "\n".join([line("a"), line("b", temperature=-1), line("c")])
        made = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        assert made.bytes == len(text.encode()) and made.filename == "in.jsonl"
        batch = await client.batches.create(
            input_file_id=made.id, endpoint=CHAT, completion_window="24h", metadata={"k": "v"}
        )
        await until(server, batch.id, "completed")
        done = await client.batches.retrieve(batch.id)
        assert done.request_counts and done.request_counts.model_dump() == {
            "total": 3,
            "completed": 2,
            "failed": 1,
        }
        good = await results(server, str(done.output_file_id))
        assert sorted(good) == ["a", "c"]
        assert good["a"]["body"]["choices"][0]["message"]["content"] == "Hello there."
        bad = await results(server, str(done.error_file_id))
        assert bad["b"]["status_code"] == 400
        assert bad["b"]["body"]["error"]["param"] == "temperature"
        assert [b.id async for b in client.batches.list()] == [batch.id]
        assert len([f async for f in client.files.list(purpose="batch_output")]) == 2
        await client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)


async def test_a_batch_of_responses(toy_folder: Path, tmp_path: Path) -> None:
    url = "/v1/responses"
    asked = [{"input": "hi"}, {"input": "hi", "background": True}]
    text = "\n".join(
        json.dumps({"custom_id": str(place), "method": "POST", "url": url, "body": body})
        for place, body in enumerate(asked)
    )
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        body = {"input_file_id": await upload(server, text), "completion_window": "24h"}
        made = (await server.client.post("/v1/batches", json=body | {"endpoint": url})).json()
        done = await until(server, made["id"], "completed")
        response = (await results(server, done["output_file_id"]))["0"]["body"]
        assert response["output"][0]["content"][0]["text"] == "Hello there."
        stored = await server.client.get(f"{url}/{response['id']}")
        assert stored.json()["output"] == response["output"]
        refused = (await results(server, done["error_file_id"]))["1"]
        assert refused["status_code"] == 400
        assert refused["body"]["error"]["param"] == "background"


async def test_batches_by_the_client_of_anthropic(toy_folder: Path, tmp_path: Path) -> None:
    def asked(name: str, text: str = "hi", **extra: Any) -> Any:
        params = {"model": "m", "max_tokens": 500} | extra
        params["messages"] = [{"role": "user", "content": text}]
        return {"custom_id": name, "params": params}

    async with (
        scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server,
        listening(server) as port,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="x") as client,
    ):
        batches = client.messages.batches
        made = await batches.create(requests=[asked("b"), asked("x", temperature=-1), asked("a")])
        assert (made.request_counts.processing, made.results_url) == (3, None)
        await until(server, made.id.removeprefix("msg"), "completed")
        done = await batches.retrieve(made.id)
        assert done.processing_status == "ended" and done.ended_at is not None
        assert (done.request_counts.succeeded, done.request_counts.errored) == (2, 1)
        found: Any = {one.custom_id: one.result async for one in await batches.results(made.id)}
        assert list(found) == ["b", "x", "a"]
        assert found["a"].message.content[0].text == "Hello there."
        assert found["x"].error.error.type == "invalid_request_error"
        server.engine.executor.is_slow = True
        second = await batches.create(requests=[asked("z", "forever")])
        await until(server, second.id.removeprefix("msg"), "in_progress")
        with pytest.raises(anthropic.BadRequestError, match="cancel it"):
            await batches.delete(second.id)
        stopped = await batches.cancel(second.id)
        assert stopped.request_counts.canceled == 1 and stopped.cancel_initiated_at is not None
        [only] = [one.result.type async for one in await batches.results(second.id)]
        assert only == "canceled"
        assert {one.id async for one in batches.list(limit=1)} == {made.id, second.id}
        await batches.delete(made.id)
        with pytest.raises(anthropic.NotFoundError):
            await batches.results(made.id)
        with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\].*twice"):
            await batches.create(requests=[asked("a"), asked("a")])


async def test_a_batch_outlives_the_process(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.05)  # the whole batch takes seconds
    options = {"file_storage_path": str(tmp_path)}
    names = [f"n{i}" for i in range(40)]
    async with scripted_server(toy_folder, {}, **options) as one:
        one.engine.executor.is_slow = True
        file_id = await upload(one, "\n".join(line(name) for name in names))
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await one.post("/v1/batches", **body)).json()
        async with asyncio.timeout(60):
            while not (await one.client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"][
                "completed"
            ]:
                await asyncio.sleep(0.005)
        await stop_background(one.state)
    (torn,) = (tmp_path / "batches").glob("*.out")
    with torn.open("ab") as out:
        out.write(b'{"custom_id": "n3')
    async with scripted_server(toy_folder, {}, **options) as two:
        assert resume(two.state) == 1
        done = await until(two, batch["id"], "completed", "failed")
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert sorted(await results(two, done["output_file_id"])) == sorted(names)
        assert resume(two.state) == 0


async def test_a_batch_of_another_process_is_left_to_it_until_that_ends(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several HTTP processes is replaced, or a second server begins in this folder."""
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.02)
    options = {"file_storage_path": str(tmp_path)}
    body = {"endpoint": CHAT, "completion_window": "24h"}
    async with (
        scripted_server(toy_folder, {}, **options) as one,
        scripted_server(toy_folder, {}, **options) as two,
    ):
        one.engine.executor.is_slow = True
        file_id = await upload(one, "\n".join(line(f"n{i}") for i in range(30)))
        batch = (await one.post("/v1/batches", input_file_id=file_id, **body)).json()
        await until(two, batch["id"], "in_progress")
        assert resume(two.state) == 1
        await asyncio.gather(*two.state.extra(Batches)._tasks.values())
        assert not two.engine.intake.requests
        done = await until(two, batch["id"], "completed")
        assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert len(await results(two, done["output_file_id"])) == 30

        file_id = await upload(one, "\n".join(line(f"n{i}") for i in range(60)))
        batch = (await one.post("/v1/batches", input_file_id=file_id, **body)).json()
        await until(two, batch["id"], "in_progress")
        got = (await two.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert got["status"] == "cancelling"
        done = await until(two, batch["id"], "cancelled", "completed")
        assert done["status"] == "cancelled" and done["request_counts"]["completed"] < 60
    assert not [*(tmp_path / "batches").glob("*.lock"), *(tmp_path / "batches").glob("*.cancel")]


async def test_a_long_integer_fails_its_line_with_400(toy_folder: Path, tmp_path: Path) -> None:
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        text = line("a").replace('"body": {', '"body": {"n": ' + "9" * 30 + ", ")
        answer = await answer_line(server.state, read_line(text.encode()))
        assert answer["response"]["status_code"] == 400
        assert answer["response"]["body"]["error"]["param"] == "n"


async def test_a_batch_can_be_cancelled(toy_folder: Path, tmp_path: Path) -> None:
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        server.engine.executor.is_slow = True
        file_id = await upload(server, "\n".join(line(f"n{i}", "forever") for i in range(20)))
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await server.post("/v1/batches", **body)).json()
        await until(server, batch["id"], "in_progress")
        got = (await server.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert got["status"] == "cancelled" and got["cancelled_at"]
        assert not server.engine.intake.requests
        again = await server.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code == 400


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("", None, "1 to"),
        ("{", 1, "not a request"),
        (line("a") + "\n" + line("a"), 2, "twice"),
        ('{"custom_id": "a", "url": "/v1/x", "body": {}}', 1, "url"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', 1, "endpoint"),
        ('{"custom_id": 5, "url": "/v1/chat/completions", "body": {}}', 1, "custom_id"),
        ('{"custom_id": "", "url": "/v1/chat/completions", "body": {}}', 1, "custom_id"),
    ],
)
def test_errors_of_a_line_are_named(text: str, place: int | None, word: str) -> None:
    _, errors = check_lines(text.encode(), CHAT)
    assert errors[0]["line"] == place and word in errors[0]["message"]


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    lines, errors = check_lines(line("a").encode("utf-8-sig"), CHAT)
    assert [one.custom_id for one in lines] == ["a"] and not errors


async def test_bad_uploads_and_names(toy_folder: Path, tmp_path: Path) -> None:
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        plain = await server.post("/v1/files", purpose="batch")
        assert plain.status_code == 400
        client = server.client
        bad = await client.post("/v1/files", files={"file": b"x"}, data={"purpose": "evil"})
        assert bad.json()["error"]["param"] == "purpose"
        missing = await client.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})
        assert missing.json()["error"]["param"] == "file"
        for name in ("..%2F..%2Fetc%2Fpasswd", "file-", "batch_" + "0" * 24):
            assert (await client.get(f"/v1/files/{name}")).status_code == 404
            assert (await client.get(f"/v1/batches/{name}")).status_code == 404
        kept = await client.post(
            "/v1/files", files={"file": ("../../evil", b"x")}, data={"purpose": "batch"}
        )
        assert kept.status_code == 200
        assert len(list((tmp_path / "files").iterdir())) == 2, "a record and its content"
        made = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
        assert made == {"files", "responses.sqlite"}
        nothing = {"input_file_id": "file-" + "0" * 24, "completion_window": "24h"}
        got = await server.post("/v1/batches", endpoint=CHAT, **nothing)
        assert got.status_code == 404 and got.json()["error"]["param"] == "input_file_id"
        assert (await server.post("/v1/batches", endpoint="/x", **nothing)).status_code == 400


@pytest.mark.parametrize("ending", ["bin", "new", "json"])
def test_a_failed_upload_leaves_nothing(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, replace = files_module.write_private, Path.replace

    def full_disk(path: Path, data: bytes) -> None:
        if path.suffix == f".{ending}":
            write(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(path, data)

    def no_rename(path: Path, target: Path) -> Path:
        if ending == "json":
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(files_module, "write_private", full_disk)
    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(Overloaded, match="cannot be stored"):
        files_module.Files(tmp_path).create(b"content", "a.jsonl", "batch")
    assert list(tmp_path.iterdir()) == []
