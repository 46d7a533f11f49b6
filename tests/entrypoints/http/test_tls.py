"""TLS, unix sockets and a path before every route."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.http_server import listening, scripted_server
from tests.router.certificates import write_certificates

from radixlm.base.errors import ConfigError
from radixlm.config.serve import ServeConfig
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.http.root_path import prefix_of
from radixlm.entrypoints.http.server import listen, url_of
from radixlm.entrypoints.http.tls import Refresher, make_context

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def trusting(folder: Path, own: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if own is not None:
        context.load_cert_chain(folder / f"{own}.pem", folder / f"{own}.key")
    return context


def tls(folder: Path, **more: str) -> dict[str, str]:
    return {
        "ssl_certfile": str(folder / "server.pem"),
        "ssl_keyfile": str(folder / "server.key"),
    } | more


async def ask(url: str, **client: Any) -> int:
    async with httpx.AsyncClient(**client) as asking:
        got = await asking.post(f"{url}/v1/chat/completions", json=CHAT)
        assert b"[DONE]" in got.content
        return got.status_code


async def test_streams_over_tls(toy_folder: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, "server", "client")
    async with scripted_server(toy_folder, {}, **tls(tmp_path)) as server:
        async with listening(server) as port:
            url = f"https://127.0.0.1:{port}"
            assert await ask(url, verify=trusting(tmp_path)) == 200
            with pytest.raises(httpx.TransportError):
                await ask(f"http://127.0.0.1:{port}")


async def test_clients_show_certificates(toy_folder: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, "server", "client")
    options = tls(tmp_path, ssl_ca_certs=str(tmp_path / "ca.pem"))
    async with scripted_server(toy_folder, {}, **options) as server:
        async with listening(server) as port:
            url = f"https://127.0.0.1:{port}"
            assert await ask(url, verify=trusting(tmp_path, "client")) == 200
            with pytest.raises(httpx.TransportError):
                await ask(url, verify=trusting(tmp_path))


def test_new_certificates_are_read(tmp_path: Path, caplog: Any) -> None:
    write_certificates(tmp_path, "server")
    serve = ServeConfig(**tls(tmp_path))  # type: ignore[arg-type]
    context = make_context(serve)
    assert context is not None
    refresher = Refresher(context, serve)
    assert not refresher.look()
    pem = tmp_path / "server.pem"
    pem.write_text("half a certificate")
    os.utime(pem, ns=(1, 1))
    assert not refresher.look() and "stays as it is" in caplog.text
    write_certificates(tmp_path, "server")
    os.utime(pem, ns=(2, 2))
    assert refresher.look() and not refresher.look()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-certfile FILE"),
        ({"ssl_certfile": "nowhere.pem"}, "--ssl-certfile nowhere.pem"),
        (
            {"ssl_certfile": "CERT", "ssl_keyfile": "KEY", "ssl_ca_certs": "no.pem"},
            "--ssl-ca-certs",
        ),
    ],
)
def test_files_that_do_not_work_are_named(
    tmp_path: Path, options: dict[str, str], says: str
) -> None:
    write_certificates(tmp_path, "server")
    files = {"CERT": str(tmp_path / "server.pem"), "KEY": str(tmp_path / "server.key")}
    given = {name: files.get(value, value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=says):
        make_context(ServeConfig(**given))  # type: ignore[arg-type]


async def test_a_unix_socket(toy_folder: Path, tmp_path: Path) -> None:
    config = ServerConfig().with_values({"uds": str(tmp_path / "s")})
    sock = listen(config)
    assert url_of(config, sock) == f"unix:{tmp_path / 's'}"
    with pytest.raises(ConfigError, match="a server listens there"):
        listen(config)
    sock.close()
    sock = listen(config)  # the file is left of one that was killed
    async with scripted_server(toy_folder, {}) as server, listening(server, sock):
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "s"))
        assert await ask("http://localhost", transport=transport) == 200
    (tmp_path / "file").write_text("mine")
    for path, says in (
        (tmp_path / "file", "it is there and no socket"),
        (tmp_path, "it is there and no socket"),
        (tmp_path / "none" / "s", "No such file or directory; .*107 bytes"),
        (tmp_path / ("x" * 120), "too long; .*107 bytes"),
    ):
        with pytest.raises(ConfigError, match=f"--uds .*: .*{says}"):
            listen(ServerConfig().with_values({"uds": str(path)}))


@pytest.mark.parametrize("host", ["203.0.113.7", "a" * 70, "a..b"])
def test_an_address_of_another_machine_names_one_that_works(host: str) -> None:
    config = ServerConfig().with_values({"host": host, "port": 0})
    with pytest.raises(ConfigError, match=f"--host {host}.*; --host 127\\.0\\.0\\.1 works"):
        listen(config)


@pytest.mark.parametrize("prefix", ["/api", "/api/", "api"])
async def test_a_path_before_every_route(toy_folder: Path, prefix: str) -> None:
    options = {"fastapi_root_path": prefix, "admin_api_key": "secret"}
    async with scripted_server(toy_folder, {}, **options) as server:
        client = server.client
        for before in ("", "/api"):
            assert (await client.get(f"{before}/v1/models")).status_code == 200
            # keys guard the path behind it
            assert (await client.post(f"{before}/flush_cache")).status_code == 401
        assert (await client.get("/apiv1/models")).status_code == 404
        assert (await client.get("/api/api/v1/models")).status_code == 404
        document = (await client.get("/api/openapi.json")).json()
        assert document["servers"] == [{"url": "/api"}]


def test_the_url_that_is_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        values = {"host": "0.0.0.0", "ssl_certfile": "x", "fastapi_root_path": "/api/"}
        config = ServerConfig().with_values(values)
        assert url_of(config, sock) == f"https://127.0.0.1:{port}/api"
        config = ServerConfig().with_values({"host": "::1"})
        assert url_of(config, sock) == f"http://[::1]:{port}"
    assert [prefix_of(text) for text in ("", "/", "/a/b/")] == ["", "", "/a/b"]
