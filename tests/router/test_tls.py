"""TLS on both sides of the gateway: of clients, and mutual with workers."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import orjson
import pytest
import uvloop

from radixlm.base.errors import ConfigError
from radixlm.router.exchange import Unreachable
from radixlm.router.launch import server_context
from radixlm.router.upstream import Upstream
from tests.router.certificates import write_certificates
from tests.router.mock_worker import MockWorker
from tests.router.test_http_server import Proxy

PATH = "/v1/chat/completions"
BODY = orjson.dumps({"model": "mock", "messages": [], "stream": True})


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    write_certificates(folder, "gateway", "worker", "client")
    return folder


def _mutual(folder: Path) -> ssl.SSLContext:
    """A worker that wants certificates of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "worker.pem", folder / "worker.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def test_streams_through_tls_on_both_sides(folder: Path) -> None:
    options = {
        "ca_cert_paths": (str(folder / "ca.pem"),),
        "client_cert_path": str(folder / "client.pem"),
        "client_key_path": str(folder / "client.key"),
    }
    async with MockWorker(ssl_context=_mutual(folder)) as worker:
        running = Proxy(worker, **options)
        context = server_context(str(folder / "gateway.pem"), str(folder / "gateway.key"))
        await running.gateway.start(running.sock, context)
        trusting = Upstream(ca_paths=[str(folder / "ca.pem")])
        url = f"https://localhost:{running.port}"
        for _ in range(2):
            answer = await trusting.fetch(url, "POST", PATH, body=BODY, timeout_s=10)
            assert answer.status == 200 and b"[DONE]" in answer.body
        assert len(running.gateway.server.connections) == 1
        with pytest.raises(Unreachable, match="certificate"):
            await Upstream().fetch(url, "POST", PATH, body=BODY, timeout_s=10)
        trusting.close()
        await running.gateway.stop()


@pytest.mark.parametrize("is_trusting", [True, False])
async def test_a_worker_that_is_not_to_be_reached(folder: Path, is_trusting: bool) -> None:
    """It wants a certificate and gets none; or its own is not trusted."""
    upstream = Upstream(ca_paths=[str(folder / "ca.pem")] if is_trusting else ())
    async with MockWorker(ssl_context=_mutual(folder)) as worker:
        with pytest.raises(Unreachable):
            await upstream.fetch(worker.url, "POST", PATH, body=BODY, timeout_s=10)
        assert not worker.seen


def test_files_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    cert, key = str(folder / "gateway.pem"), str(folder / "gateway.key")
    assert server_context(None, None) is None
    with pytest.raises(ConfigError, match="--tls-key-path"):
        server_context(cert, None)
    for one, other in ((cert, str(folder / "worker.key")), ("nope.pem", key)):
        with pytest.raises(ConfigError, match="--tls-cert-path"):
            server_context(one, other)
    with pytest.raises(ConfigError, match="--ca-cert-paths"):
        Upstream(ca_paths=["nope.pem"])
    with pytest.raises(ConfigError, match="--client-cert-path"):
        Upstream(cert_path="nope.pem", key_path=key)
