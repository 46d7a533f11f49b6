"""What a web page may ask of a server that its user can reach."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.base.errors import Forbidden
from radixlm.config.serve import ServeConfig
from radixlm.entrypoints.http.browser_guard import BrowserGuard, host_name, is_inference
from radixlm.entrypoints.http.middleware import ADMIN_PATHS

EVIL = "https://evil.example"
PROTECTED = [
    ("POST", "/pause_generation"),
    ("GET", "/slow_down?forward_sleep_time=1"),
    ("GET", "/flush_cache"),
    ("GET", "/start_profile?output_dir=/tmp/x"),
    ("POST", "/dump_requests"),
    ("POST", "/abort_request"),
    ("GET", "/open_session"),
    ("GET", "/v1/files"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/responses/resp_0"),
    ("DELETE", "/v1/responses/resp_0"),
    ("GET", "/get_server_info"),
    ("GET", "/v1/loads"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize(
    "headers",
    [{"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=["origin", "null", "fetch metadata"],
)
async def test_pages_of_other_sites_are_refused(
    server: ScriptedServer, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = await server.client.request(method, path, headers=headers)
    assert answer.status_code == 403, answer.text
    assert "--cors-allowed-origins" in answer.text
    assert "access-control-allow-origin" not in answer.headers
    assert not server.engine.intake.is_paused and not server.engine.scheduler.sleep_s
    preflight = {"Origin": EVIL, "Access-Control-Request-Method": method}
    asked = await server.client.options(path, headers=preflight)
    assert "access-control-allow-origin" not in asked.headers


async def test_pages_may_use_the_model(server: ScriptedServer) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
    answer = await server.client.post("/generate", json=body, headers={"Origin": EVIL})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_clients_that_are_no_browsers_may_use_get(server: ScriptedServer) -> None:
    for path in ("/slow_down?forward_sleep_time=0", "/flush_cache", "/open_session"):
        assert (await server.client.get(path)).status_code == 200
        page = await server.client.get(path, headers={"User-Agent": "Mozilla/5.0 (X11)"})
        assert page.status_code == 403 and "POST" in page.text
    assert (await server.client.post("/flush_cache")).status_code == 200


async def test_a_page_of_the_server_itself_may_post(server: ScriptedServer) -> None:
    headers = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    assert (await server.client.post("/flush_cache", headers=headers)).status_code == 200
    other = {"Origin": "http://127.0.0.1:8080"}
    assert (await server.client.post("/flush_cache", headers=other)).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_posts_that_change_the_server_are_json(server: ScriptedServer, kind: str) -> None:
    for path in ("/slow_down", "/pause_generation", "/abort_request", "/set_internal_state"):
        answer = await server.client.post(path, content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 400 and "application/json" in answer.text


async def test_listed_origins_may_call_all_routes_and_others_none(toy_folder: Path) -> None:
    good = "https://good.example"
    async with scripted_server(toy_folder, {}, cors_allowed_origins=f"{good}, http://b") as made:
        answer = await made.client.get("/v1/files", headers={"Origin": good})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == good
        for path in ("/v1/files", "/v1/models"):
            bad = await made.client.get(path, headers={"Origin": EVIL})
            assert bad.status_code == 403


HOSTS = ["evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example"]

LOCAL = ["localhost", "LOCALHOST:1", "127.0.0.1:5", "[::1]", "127.8.0.1", "0.0.0.0:5", "[::]:5"]


@pytest.mark.parametrize("host", [*HOSTS, "10.0.0.1", "[::2]:80", "x"])
async def test_a_local_server_has_local_names_only(server: ScriptedServer, host: str) -> None:
    for path in ("/v1/models", "/v1/files", "/flush_cache"):
        answer = await server.client.get(path, headers={"Host": host})
        assert answer.status_code == 403 and "--allowed-hosts" in answer.text


@pytest.mark.parametrize("host", LOCAL)
async def test_local_names_are_known(server: ScriptedServer, host: str) -> None:
    answer = await server.client.get("/v1/models", headers={"Host": host})
    assert answer.status_code == 200


def _check(host: str, needs_key: bool = False, listens: str = "127.0.0.1", **options: Any) -> None:
    guard = BrowserGuard(ServeConfig(host=listens, **options), needs_key, ADMIN_PATHS)
    guard.check("GET", "/v1/models", {b"host": host.encode()})


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_the_internet_are_refused_without_a_key(host: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-hosts"):
        _check(host, listens="0.0.0.0")
    _check(host, needs_key=True)
    _check(host, allowed_hosts="*")
    _check(host, allowed_hosts=f"a, {host_name(host)}")
    _check(host, listens=host_name(host))


@pytest.mark.parametrize("host", ["10.0.0.1:30000", "radixlm", "gpu.local", "a.ns.svc"])
def test_names_of_a_private_network_are_known_on_a_public_address(host: str) -> None:
    _check(host, listens="0.0.0.0")


async def test_over_a_socket(server: ScriptedServer) -> None:
    """As a browser sends it: the real HTTP server reads the headers."""
    async with listening(server) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}"
        assert (await client.get(f"{url}/v1/models")).status_code == 200
        bad = await client.get(f"{url}/v1/models", headers={"Host": "evil.example"})
        assert bad.status_code == 403
        slow = await client.get(f"{url}/slow_down?forward_sleep_time=5", headers={"Origin": EVIL})
        assert slow.status_code == 403
    await asyncio.sleep(0)


def test_no_admin_route_is_a_route_of_inference() -> None:
    assert not [path for path in ADMIN_PATHS if is_inference(path)]
    assert not is_inference("/v1/files") and not is_inference("/v1/responses/resp_0")


def test_a_slow_name_server_delays_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def getfqdn() -> str:
        asked.set()
        answered.wait(60)
        return "Box.Example.com"

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    guard = BrowserGuard(ServeConfig(), needs_key=False, changing=frozenset())
    headers = {b"host": b"box.example.com:30000"}
    assert asked.wait(60)
    with pytest.raises(Forbidden):
        guard.check("GET", "/get_server_info", headers)
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "full host name":
            thread.join(60)
    guard.check("GET", "/get_server_info", headers)
