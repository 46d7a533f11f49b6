"""Routes by which weights arrive: every form, what is refused, and that memory stays bounded."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import pickle
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from tests.fakes.http_server import ScriptedServer, scripted_server
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.engine.tensor_updates import TensorUpdates
from radixlm.weight_updates.registry import WeightsOutcome, WeightsUpdate
from radixlm.weight_updates.tensor_spool import SHARED_FOLDER

TENSORS = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.ones(5)}
PATH = "/update_weights_from_tensor"
OCTETS = {"content-type": "application/octet-stream"}


class Updates:
    """In place of an engine: keeps what the registry is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[WeightsUpdate, dict[str, Tensor]]] = []

    async def __call__(self, update: WeightsUpdate) -> WeightsOutcome:
        parts = [load_file(part) for part in sorted(Path(update.folder).glob("part*"))]
        self.asked.append((update, {name: one for part in parts for name, one in part.items()}))
        shutil.rmtree(update.folder)
        return WeightsOutcome(True, "made", 3)

    def check(self, **options: Any) -> None:
        """One update with TENSORS, and these options."""
        ((update, found),) = self.asked
        assert found.keys() == TENSORS.keys() and update.is_partial
        assert all(torch.equal(found[name], one) for name, one in TENSORS.items())
        assert {name: getattr(update, name) for name in options} == options
        self.asked.clear()


@pytest.fixture
def updates(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Updates:
    made = Updates()
    monkeypatch.setattr(server.state.intake.weights, "update", made)
    return made


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHARED_FOLDER / f"radixlm-weights-test-{secrets.token_hex(6)}"
    path.write_bytes(b"")
    yield path
    path.unlink()


async def test_every_form_arrives(server: ScriptedServer, updates: Updates, segment: Path) -> None:
    text, data = base64.b64encode(save(TENSORS)).decode(), save(TENSORS)
    got = await server.post(PATH, serialized_named_tensors=[text, text], weight_version="2")
    assert got.json() == {"success": True, "message": "made", "num_paused_requests": 3}
    updates.check(version="2", mode="wait", flush=True)

    query = "?abort_all_requests=true&flush_cache=false&weight_version=3"
    got = await server.client.post(PATH + query, content=data, headers=OCTETS)
    assert got.status_code == 200, got.text
    updates.check(version="3", mode="abort", flush=False)

    files = [("file", (f"{name}", save({name: one}))) for name, one in TENSORS.items()]
    got = await server.client.post(PATH, files=files, data={"mode": "in_place"})
    assert got.status_code == 200, got.text
    updates.check(version=None, mode="in_place")

    handles, whole = [], b""
    for name, one in TENSORS.items():
        raw = one.reshape(-1).view(torch.uint8).numpy().tobytes()
        place = {"name": name, "dtype": str(one.dtype), "shape": list(one.shape)}
        digest = hashlib.sha256(raw).hexdigest()
        handles.append({**place, "shm": segment.name, "offset": len(whole), "digest": digest})
        whole += raw
    segment.write_bytes(whole)
    got = await server.post(PATH, tensor_handles=handles, mode="retract")
    assert got.status_code == 200, got.text
    updates.check(mode="retract")


async def test_a_body_of_any_size_is_streamed(toy_folder: Path) -> None:
    """--max-request-bytes bounds what is kept in memory, such as a JSON body."""
    data, text = save(TENSORS), base64.b64encode(save(TENSORS)).decode()
    updates = Updates()

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 10):
            yield data[at : at + 10]

    limit = len(data) // 2
    async with scripted_server(toy_folder, {}, max_request_bytes=limit) as server:
        server.state.intake.weights.update = updates
        for content in (data, chunks()):
            got = await server.client.post(PATH, content=content, headers=OCTETS)
            assert got.status_code == 200, got.text
            updates.check()
        got = await server.post(PATH, serialized_named_tensors=text)
        assert got.status_code == 413
        other = {"content-type": "application/octet-streams"}
        for headers in ({**OCTETS, "origin": "http://x"}, other):
            got = await server.client.post(PATH, content=data, headers=headers)
            assert got.status_code == 413


def _pickled() -> bytes:
    out = io.BytesIO()
    pickle.dump({"flattened_tensor": 1}, out, 4)
    return out.getvalue()


BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "pickle": (
        {"serialized_named_tensors": [base64.b64encode(_pickled()).decode()]},
        "a pickle (MultiprocessingSerializer) is not read",
    ),
    "nothing": ({}, "send serialized_named_tensors or tensor_handles"),
    "both": ({"serialized_named_tensors": "", "tensor_handles": []}, "or tensor_handles"),
    "handle": ({"tensor_handles": [{"name": "a"}]}, "tensor_handles: a: "),
    "format": ({"serialized_named_tensors": "", "load_format": "x.y"}, "load_format: 'x.y'"),
    "ranks": ({"serialized_named_tensors": ["AA==", "AQ=="]}, "the same for each rank"),
}


@pytest.mark.parametrize("case", BODIES)
async def test_what_is_refused_says_what_works(
    server: ScriptedServer, updates: Updates, case: str
) -> None:
    body, words = BODIES[case]
    got = await server.post(PATH, **body)
    assert got.status_code == 400 and not updates.asked
    assert got.json()["success"] is False and words in got.json()["message"]


@pytest.mark.parametrize(
    ("query", "content", "words"),
    [
        ("", _pickled(), "a pickle"),
        ("", b"", "truncated"),
        ("?flush_cache=maybe", b"", "flush_cache"),
        ("?load_format=x", b"", "load_format: 'x'"),
    ],
)
async def test_bad_streams_are_refused(
    server: ScriptedServer, updates: Updates, query: str, content: bytes, words: str
) -> None:
    got = await server.client.post(PATH + query, content=content, headers=OCTETS)
    assert got.status_code == 400 and words in got.json()["message"] and not updates.asked


async def test_a_form_without_files_is_refused(server: ScriptedServer, updates: Updates) -> None:
    got = await server.client.post(PATH, files=[("x", (None, "y"))])
    assert got.status_code == 400 and "form field 'file'" in got.json()["message"]


async def test_updates_between_begin_and_end_are_one(
    server: ScriptedServer, updates: Updates
) -> None:
    assert (await server.client.post("/end_weight_update")).status_code == 400
    got = await server.client.post("/begin_weight_update")
    assert got.json() == {"success": True, "message": "Succeeded to begin a weight update."}
    assert (await server.post("/begin_weight_update", selector="all")).status_code == 400
    for name, one in TENSORS.items():
        text = base64.b64encode(save({name: one})).decode()
        got = await server.post(PATH, serialized_named_tensors=text, weight_version="4")
        assert got.json()["success"] and not updates.asked
    assert (await server.client.post("/end_weight_update")).json()["message"] == "made"
    updates.check(version="4")
    await server.client.post("/begin_weight_update")
    got = await server.post("/end_weight_update", discard=True)
    assert got.json()["message"] == "dropped" and not updates.asked


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/init_weights_update_group", {"master_port": "x"}, "a port from 1 to 65535"),
        ("/init_weights_update_group", {"world_size": 1}, "rank_offset 1 and world_size 2"),
        ("/init_weights_update_group", {"backend": "nccl"}, "'gloo' works"),
        ("/destroy_weights_update_group", {}, "there is no group 'weight_update_group'"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]},
            "call init_weights_update_group first",
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": [], "shapes": [[1]]},
            "one entry for each tensor",
        ),
        ("/begin_weight_update", {"selector": "draft"}, "selector: one of all, target"),
    ],
)
async def test_bad_calls_get_a_400_in_the_reference_s_form(
    server: ScriptedServer, path: str, body: dict[str, Any], words: str
) -> None:
    if path == "/init_weights_update_group":
        place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
        body = {**place, "world_size": 2, **body}
    got = await server.post(path, **body)
    assert got.status_code == 400 and got.json()["success"] is False
    assert words in got.json()["message"], got.text


async def test_the_checker_answers_in_the_reference_s_form(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [{"checksums": {"a": "00"}, "per_gpu_checksum": "11"}]

    async def check(action: str, skip: Any) -> Any:
        if action != "checksum":
            raise InvalidRequest(f"action: {action}")
        return ranks

    monkeypatch.setattr(server.state.extra(TensorUpdates), "check", check)
    for got in (
        await server.client.get("/weights_checker?action=checksum"),
        await server.post("/weights_checker"),
    ):
        assert got.json() == {"success": True, "message": "checksum done", "ranks": ranks}
    got = await server.post("/weights_checker", action="more")
    assert got.status_code == 400
    assert got.json() == {"success": False, "message": "action: more", "ranks": []}


async def test_a_path_that_is_too_long_is_refused(server: ScriptedServer) -> None:
    got = await server.post("/update_weights_from_disk", model_path="a" * 4000)
    assert (got.status_code, got.json()["success"]) == (400, False)


async def test_a_session_keeps_a_call_whole_or_not_at_all(
    server: ScriptedServer, updates: Updates
) -> None:
    """A form whose second file is none, and a body that is still coming at the end."""
    await server.client.post("/begin_weight_update")
    files = [("file", ("1", save(TENSORS))), ("file", ("2", b"no safetensors file"))]
    assert (await server.client.post(PATH, files=files)).status_code == 400
    release, began, data = asyncio.Event(), asyncio.Event(), save(TENSORS)

    async def chunks() -> AsyncIterator[bytes]:
        yield data[:20]
        began.set()
        await release.wait()
        yield data[20:]

    late = asyncio.create_task(server.client.post(PATH, content=chunks(), headers=OCTETS))
    await asyncio.wait_for(began.wait(), 20)
    got = await asyncio.wait_for(server.client.post("/end_weight_update"), 20)
    assert got.json()["message"] == "no tensors were kept"
    release.set()
    answer = await asyncio.wait_for(late, 20)
    assert answer.status_code == 400 and "end_weight_update came before" in answer.json()["message"]
    assert not updates.asked


async def test_a_selector_that_is_none_is_refused(server: ScriptedServer, updates: Updates) -> None:
    text = base64.b64encode(save(TENSORS)).decode()
    got = await server.post(PATH, serialized_named_tensors=text, selector="draft")
    assert got.status_code == 400 and "selector" in got.text and not updates.asked
