"""Attacks that worked on similar servers. SECURITY.md lists them with the test of each."""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from radixlm.config.server_config import ServerConfig
from radixlm.engine.supervisor import EngineSupervisor
from radixlm.entrypoints.http import middleware
from radixlm.intake.identity import Identity
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

CHAT = "/v1/chat/completions"
BOMB = base64.b64encode(pickle.dumps(print)).decode()


async def _refused(server: ScriptedServer, path: str, body: Any) -> str:
    """Post a body that must be refused; the text of the error."""
    answer = await server.client.post(
        path,
        content=body if isinstance(body, bytes) else json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert 400 <= answer.status_code < 500 or answer.status_code == 501, answer.text
    assert not server.engine.intake.requests
    return answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "custom_logit_processor": BOMB}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "custom_logit_processor": BOMB}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [BOMB]}),
        ("/generate", {"text": "a", "logit_processor": "os:system"}),
    ],
)
async def test_serialised_code_is_refused(
    server: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    await _refused(server, path, body)


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
async def test_no_address_in_a_message_is_fetched(server: ScriptedServer, kind: str) -> None:
    """A server that fetches client addresses can be directed at its network."""
    visits = 0

    async def visit(reader: Any, writer: Any) -> None:
        nonlocal visits
        visits += 1
        writer.close()

    trap = await asyncio.start_server(visit, "127.0.0.1", 0)
    port = trap.sockets[0].getsockname()[1]
    for url in (
        f"http://127.0.0.1:{port}/",
        f"http://localhost:{port}/x.png",
        f"http://2130706433:{port}/",
        "file:///etc/passwd",
        "data:image/png;base64,iVBORw0KGgo=",
    ):
        part = {"type": kind, kind: {"url": url}}
        await _refused(server, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    trap.close()
    await trap.wait_closed()
    assert visits == 0


# no token has them: as stops they match nothing (test_stop_ids_of_no_token_match_nothing)
INTEGERS = (
    "[-1]",
    "[2147483648]",
    "[4294967296]",
    "[9223372036854775808]",
    "[18446744073709551617]",
)


@pytest.mark.parametrize(
    "ids",
    [
        *INTEGERS,
        "[1e400]",
        "[1.5]",
        "[null]",
        "[[[1]]]",
        "[" + "9" * 5000 + "]",
    ],
)
async def test_token_ids_do_not_overflow(server: ScriptedServer, ids: str) -> None:
    await _refused(server, "/generate", f'{{"input_ids": {ids}}}'.encode())
    await _refused(server, "/v1/completions", f'{{"prompt": {ids}}}'.encode())
    stops = f'{{"text": "a", "sampling_params": {{"stop_token_ids": {ids}}}}}'
    if ids not in INTEGERS and ids != "[[[1]]]":
        await _refused(server, "/generate", stops.encode())


@pytest.mark.parametrize(
    "number",
    [-1, 2**31, 2**32, 2**63, 2**64 + 1, -(2**63) - 1, 10**30],
    ids=lambda number: str(number)[:20],
)
@pytest.mark.parametrize("suppressed", [0, 2])
async def test_stop_ids_of_no_token_match_nothing(
    server: ScriptedServer, number: int, suppressed: int
) -> None:
    """Also where they would wrap to a token that the answer holds, or that must not come yet."""
    params = {"max_new_tokens": 5, "temperature": 0, "min_new_tokens": suppressed}
    plain = (await server.post("/generate", text="a", sampling_params=params)).json()
    wrapped = [number, *(token + (number << 32) for token in plain["output_ids"])]
    for stops in ([number], wrapped):
        asked = params | {"stop_token_ids": stops}
        got = await server.post("/generate", text="a", sampling_params=asked)
        assert got.status_code == 200, got.text
        assert got.json()["output_ids"] == plain["output_ids"]
        finish = got.json()["meta_info"]["finish_reason"]
        assert finish == plain["meta_info"]["finish_reason"]
    assert not server.engine.intake.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"n": 1025},
        {"stop": ["a"] * 1025},
        {"stop": ["a" * 17_000]},
        {"stop_token_ids": [5] * ((1 << 18) + 1)},
        {"stop_regex": ["(" * 5000 + ")" * 5000]},
        {"logit_bias": {str(10**12): 1.0}},
        {"max_new_tokens": 2**64},
        {"sampling_seed": 2**63},
        {"top_k": -(2**70)},
        {"temperature": -1e-300},
        {"json_schema": "x" * (4 << 20) + "x"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_large_numbers_and_lists_are_refused(
    server: ScriptedServer, fields: dict[str, Any]
) -> None:
    text = await _refused(server, "/generate", {"text": "a", "sampling_params": fields})
    assert next(iter(fields)) in text


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"text": "a", "sampling_params": {"custom_params": '
        + b'{"a":' * 50_000
        + b"1"
        + b"}" * 50_000
        + b"}}",
        b'{"text": ["' + b'","'.join([b"a"] * 20_000) + b'"]}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "rid": "a\\u0000b"}',
        b'{"text": "a", "rid": "a\\nERROR forged"}',
        b'{"text": "a", "text": 5}',
    ],
    ids=["nested", "nested objects", "20000 prompts", "surrogate", "nul", "forged log", "twice"],
)
async def test_shapes_that_hurt_parsers_are_refused(server: ScriptedServer, body: bytes) -> None:
    await _refused(server, "/generate", body)


SPELLINGS = [
    "/flush_cache",
    "/flush_cache/",
    "//flush_cache",
    "/%66lush_cache",
    "/health/../flush_cache",
    "/health/%2e%2e/flush_cache",
    "/flush_cache?x=/health",
    "/flush_cache;/health",
    "/FLUSH_CACHE",
]
FORGED = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Real-IP": "127.0.0.1",
    "Forwarded": "for=127.0.0.1",
    "X-Forwarded-Host": "localhost",
    "Host": "localhost",
    "X-Original-URL": "/health",
    "X-Rewrite-URL": "/health",
    "X-HTTP-Method-Override": "OPTIONS",
}


@pytest.mark.parametrize("options", [{"api_key": "k", "admin_api_key": "a"}, {"host": "0.0.0.0"}])
async def test_no_spelling_or_header_opens_an_admin_route(
    toy_folder: Path, options: dict[str, Any]
) -> None:
    keys = ("", "Authorization: Bearer k\r\n") if "api_key" in options else ("",)
    async with scripted_server(toy_folder, {}, **options) as made, listening(made) as port:
        for path, extra in itertools.product(SPELLINGS, keys):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            forged = "".join(f"{name}: {value}\r\n" for name, value in FORGED.items())
            head = f"POST {path} HTTP/1.1\r\n{forged}{extra}Content-Length: 0\r\n\r\n"
            writer.write(head.encode())
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            assert status in (400, 401, 403, 404, 405), (status, path, extra)
            writer.close()


async def test_wrong_keys_of_every_kind(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, api_key="s3cret") as made:
        for value in (
            "",
            "Bearer",
            "Bearer ",
            "Bearer s3cre",
            "Bearer s3crets",
            "Bearer S3CRET",
            "Bearer s3cret\u00e9",
            "Basic s3cret",
            "s3cret",
        ):
            headers = [(b"Authorization", value.encode("latin-1"))]
            got = await made.client.post("/generate", json={"text": "a"}, headers=headers)
            assert got.status_code == 401, value
            assert "s3cret" not in got.text
        right = {"Authorization": "Bearer s3cret"}
        got = await made.client.post("/generate", json={"text": "a"}, headers=right)
        assert got.status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared by `hmac.compare_digest`, even after a match."""
    compared: list[bytes] = []

    def spy(a: Any, b: Any) -> bool:
        compared.append(b)
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(
        middleware, "hmac", type("spied", (), {"compare_digest": staticmethod(spy)})
    )
    clients = {key: Identity(key) for key in ("one", "two", "three")}
    assert middleware._matching("one", clients) == Identity("one")
    assert middleware._matching("none", clients) is None
    assert compared == [b"one", b"two", b"three"] * 2


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 5x\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length : 5\r\n",
    ],
)
async def test_requests_cannot_be_smuggled(server: ScriptedServer, head: bytes) -> None:
    """With two possible lengths, the connection must end with the first answer."""
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n" + smuggled)
        writer.write_eof()
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 ") <= 1 and b" 200 " not in answer.split(b"\r\n")[0]
        writer.close()
    assert not server.engine.intake.requests


def test_sockets_lie_in_a_folder_of_their_own() -> None:
    supervisor = EngineSupervisor(ServerConfig.from_kwargs(model_path="x"), frozenset())
    try:
        assert stat.S_IMODE(supervisor.folder.stat().st_mode) == 0o700
        assert all(a.startswith(f"ipc://{supervisor.folder}/") for a in supervisor.addresses)
    finally:
        supervisor._run_folder.remove()
    assert not supervisor.folder.exists()
