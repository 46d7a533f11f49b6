"""Allowed sources of images, and refused ones."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.fetch import FetchRules, fetch

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
    thread.join()
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
