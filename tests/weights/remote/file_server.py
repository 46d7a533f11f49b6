"""A web server of a folder, with byte ranges, ETags and faults, in threads of the test."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FileServer(ThreadingHTTPServer):
    """``fault``: called with each GET's handler, name and range; True: it has answered itself."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fault: Callable[[Any, str, tuple[int, int]], bool] = lambda *_: False
        self.has_ranges = self.has_tags = True
        self.says_sha256 = False
        self.requests: list[tuple[str, str, str]] = []  # method, name, range
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"

    def asked(self, name: str) -> int:
        """Bytes of a file that range requests have asked for."""
        spans = [span[6:].split("-") for _, own, span in self.requests if span and own == name]
        return sum(int(last) + 1 - int(first) for first, last in spans)

    def handle_error(self, request: Any, address: Any) -> None:
        """Connections that a test drops are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def refuse(self, status: int, **headers: str) -> bool:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def _answer(self, is_get: bool) -> None:
        server, name = self.server, self.path.lstrip("/")
        server.requests.append((self.command, name, self.headers.get("Range", "")))
        path = server.folder / name
        if not path.is_file():
            self.refuse(404)
            return
        data = path.read_bytes()
        start, end = 0, len(data)
        is_part = server.has_ranges and "Range" in self.headers
        if is_part:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(data))
        if is_get and server.fault(self, name, (start, end)):
            return
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if server.has_tags and self.headers.get("If-Match", tag) != tag:
            self.refuse(412)
            return
        self.send_response(206 if is_part else 200)
        if server.has_tags:
            self.send_header("ETag", tag)
        if server.says_sha256:
            self.send_header("X-Checksum-Sha256", hashlib.sha256(data).hexdigest())
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if is_get:
            self.send_bytes(data[start:end])

    def send_bytes(self, data: bytes) -> None:
        self.wfile.write(data)


@contextmanager
def file_server(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
