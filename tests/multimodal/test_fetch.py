"""Allowed sources of images, and refused ones."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal import fetch as module
from radixlm.multimodal.fetch import FetchRules, fetch, is_public

DATA = b"\x89PNG some bytes"
STOP = threading.Event()
OPEN = FetchRules(max_bytes=1000, timeout_s=60, allow_private=True)


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            self.end_headers()
            return
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        if self.path == "/inside":
            self.send_response(302)
            self.send_header("Location", "http://10.0.0.1/x.png")
            self.end_headers()
            return
        if self.path == "/drips":  # one header line at a time, without end
            self.send_response(200)
            self.flush_headers()
            with contextlib.suppress(OSError):
                while not STOP.wait(0.3):  # the limit of a hundred header lines would take 30 s
                    self.wfile.write(b"X-More: 1\r\n")
            return
        body = {"/ok": DATA, "/big": b"x" * 5000}.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    STOP.set()
    server.shutdown()
    thread.join(60)
    server.server_close()


def test_data_and_base64() -> None:
    text = base64.b64encode(DATA).decode()
    assert fetch(f"data:image/png;base64,{text}", FetchRules(), "x") == DATA
    assert fetch(text, FetchRules(), "x") == DATA
    assert fetch("data:,a%20b", FetchRules(), "x") == b"a b"


def test_base64_spelt_for_a_uri() -> None:
    assert fetch("data:image/png;base64,%2B%2F8%3D", FetchRules(), "x") == b"\xfb\xff"


def test_http(site: str) -> None:
    assert fetch(f"{site}/ok", OPEN, "x") == DATA


@pytest.mark.parametrize("path", ["/loop", "/away", "/big", "/missing"])
def test_bad_responses_are_refused(site: str, path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^there"):
        fetch(site + path, OPEN, "there")


def test_a_redirect_into_the_network_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host counts as public here, so the check of the second refuses."""
    public = ipaddress.IPv4Address.is_global.fget  # type: ignore[attr-defined]
    here = ipaddress.IPv4Address("127.0.0.1")
    counts = property(lambda ip: ip == here or public(ip))
    monkeypatch.setattr(ipaddress.IPv4Address, "is_global", counts)
    assert fetch(f"{site}/ok", FetchRules(timeout_s=60), "x") == DATA
    with pytest.raises(InvalidRequest, match="there: addresses of this network"):
        fetch(f"{site}/inside", FetchRules(timeout_s=60), "there")


def test_a_slow_server_is_abandoned_in_time(site: str) -> None:
    began_s = time.monotonic()
    rules = FetchRules(timeout_s=0.4, allow_private=True)
    with pytest.raises(InvalidRequest, match=r"^there"):
        fetch(f"{site}/drips", rules, "there")
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize(
    "source",
    [
        "http://127.0.0.1/x", "http://localhost:1/x", "http://[::1]/x", "http://169.254.169.254/m",
        "http://10.0.0.1/", "http://0.0.0.0/", "http://[::ffff:127.0.0.1]/", "http://2130706433/",
        "file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "ftp://example.com/a",
        "gopher://x", "data:image/png;base64,###", "not base64 at all!", "http://", "data:nothing",
        "http://[bad", "file:///\0", "javascript://x",
    ],
)  # fmt: skip
def test_refused_by_default(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^there"):
        fetch(source, FetchRules(timeout_s=2), "there")


def test_files_of_allowed_folders_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    (inside / "a.png").write_bytes(DATA)
    outside.write_bytes(DATA)
    (inside / "link").symlink_to(outside)
    rules = FetchRules(folders=(inside,))
    assert fetch(str(inside / "a.png"), rules, "x") == DATA
    assert fetch(f"file://{inside}/a.png", rules, "x") == DATA
    for bad in (outside, inside / "link", inside / ".." / "out"):
        with pytest.raises(InvalidRequest, match="allow-local-media"):
            fetch(str(bad), rules, "x")


@pytest.mark.parametrize("name", ["/dev/zero", "fifo", "folder", "socket"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    """/dev/zero has no end, and a FIFO without a writer never answers."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    here = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(here))
        path = name if name.startswith("/") else str(tmp_path / name)
        rules = FetchRules(max_bytes=1000, folders=(Path("/"),))
        with pytest.raises(InvalidRequest, match=r"^x: only regular files are read"):
            fetch(path, rules, "x")


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [("a.test", True), ("img.a.test", True), ("xa.test", False), ("a.test.b", False)],
)
def test_domains(host: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only hosts of these domains are asked; their names are looked up afterwards."""
    monkeypatch.setattr(module, "_address", lambda *_: (_ for _ in ()).throw(OSError("asked")))
    rules = FetchRules(domains=("a.test",))
    why = "cannot be fetched" if is_allowed else "--allowed-media-domains"
    with pytest.raises(InvalidRequest, match=why):
        fetch(f"http://{host}/x.png", rules, "here")


def test_a_file_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of /proc say that they are empty; others may grow while they are read."""
    large = tmp_path / "a.png"
    large.write_bytes(b"x" * 5000)
    rules = FetchRules(max_bytes=1000, folders=(Path("/"),))
    with pytest.raises(InvalidRequest, match="x: more than 0 MiB"):
        fetch(str(large), rules, "x")
    with pytest.raises(InvalidRequest, match="x: more than 0 MiB"):
        fetch("/proc/cpuinfo", FetchRules(max_bytes=10, folders=(Path("/"),)), "x")
    large.write_bytes(b"x" * 1000)
    assert len(fetch(str(large), rules, "x")) == 1000


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_path_that_changes_after_its_check_is_refused(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symlink takes the place of the file, or of a folder above it, before it is opened."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    for folder in (inside / "deep", outside):
        (folder / "a.png").write_bytes(DATA)
    real_open = os.open

    def swapped(path: Any, flags: int) -> int:
        if part == "file":
            (inside / "deep" / "a.png").unlink()
            (inside / "deep" / "a.png").symlink_to(outside / "a.png")
        else:
            (inside / "deep").rename(tmp_path / "gone")
            (inside / "deep").symlink_to(outside)
        return real_open(path, flags)

    monkeypatch.setattr(module.os, "open", swapped)
    with pytest.raises(InvalidRequest, match=r"^x: (only regular files are|the file cannot be)"):
        fetch(str(inside / "deep" / "a.png"), FetchRules(folders=(inside,)), "x")


INSIDE = [
    "127.0.0.1", "10.0.0.1", "100.64.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "240.0.0.1",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "100::1",
    "fec0::1",  # site-local, which nobody uses any more
    "::7f00:1", "::10.0.0.1",  # IPv4-compatible
    "::ffff:10.0.0.1", "::ffff:0:10.0.0.1",  # IPv4-mapped and IPv4-translated
    "64:ff9b::", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "64:ff9b:1::a00:1",  # NAT64
    "2002::", "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::",  # 6to4
    "2001:0:4136:e378:8000:63bf:f5ff:fffe",  # Teredo
    "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1",  # ISATAP
    "2001:db8::1", "3fff::1", "4000::1", "5f00::1",
]  # fmt: skip
OUTSIDE = [
    "8.8.8.8", "2606:4700:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8", "64:ff9b::808:808",
    "2002:808:808::1", "2606:4700::5efe:8.8.8.8",
]  # fmt: skip


def test_addresses_that_lead_inside() -> None:
    assert [one for one in INSIDE if is_public(one)] == []
    assert [one for one in OUTSIDE if not is_public(one)] == []


@pytest.mark.parametrize("address", INSIDE)
def test_no_connection_is_made_to_addresses_that_lead_inside(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As digits in the URL, and as what a name means."""

    def resolved(host: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port))]

    def connected(*arguments: Any) -> None:
        raise AssertionError(f"connected to {arguments}")

    monkeypatch.setattr(module.socket, "create_connection", connected)
    monkeypatch.setattr(module.socket, "getaddrinfo", resolved)
    host = f"[{address}]" if ":" in address else address
    for url in (f"http://{host}/x.png", "http://images.example/x.png"):
        with pytest.raises(InvalidRequest, match="there: addresses of this network are refused"):
            fetch(url, FetchRules(timeout_s=2), "there")


def test_the_address_that_was_checked_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means a public address when it is checked, and another one the next time."""
    answers = iter(["8.8.8.8", "127.0.0.1", "127.0.0.1"])
    made: list[Any] = []

    def resolved(host: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connected(address: Any, timeout: float) -> Any:
        made.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(module.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(module.socket, "create_connection", connected)
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        fetch("http://images.example:81/x.png", FetchRules(timeout_s=2), "there")
    assert made == [("8.8.8.8", 81)]
