"""A hub on loopback with the part of Hugging Face's API that downloads use: model info, files that
redirect to a content host, ranges, LFS hashes; and the faults that a test asks for."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_ENDINGS = (".safetensors", ".bin", ".gguf", ".model")


@dataclass
class FakeRepo:
    """A repository: revision -> file name -> content."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None  # that files need ("gated")
    is_private: bool = False  # without the token even its name is unknown

    def commit(self, revision: str) -> str | None:
        """The commit of a revision: a hash of its content."""
        if revision not in self.revisions:
            known = {self.commit(name): name for name in self.revisions}
            return revision if revision in known else None
        files = self.revisions[revision]
        state = [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items())]
        return hashlib.sha1(json.dumps(state).encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes]:
        for name, files in self.revisions.items():
            if revision in (name, self.commit(name)):
                return files
        raise KeyError(revision)


@dataclass
class Fault:
    """What goes wrong with the content of a file, ``times`` times: ``cut`` (the connection ends
    after that share of the bytes), ``status`` (with ``retry_after``), ``flip`` (a wrong byte),
    ``hold`` (wait for the event after half of the bytes)."""

    times: int = 1
    cut: float = 1.0
    status: int = 0
    retry_after: str = ""
    flip: bool = False
    hold: threading.Event | None = None
    held: threading.Event = field(default_factory=threading.Event)


@dataclass
class FakeHub:
    """The hub's state, which tests set, and what it was asked for."""

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)  # by file name, or "info"
    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)  # bytes of content by file name
    lock: threading.Lock = field(default_factory=threading.Lock)
    ignores_ranges: bool = False
    moved: dict[str, str] = field(default_factory=dict)  # old name -> new one
    tokens_at_content: list[str] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> FakeRepo:
        repo = self.repos.setdefault(name, FakeRepo({}))
        repo.revisions[revision] = files
        return repo

    def take(self, name: str) -> Fault | None:
        """The fault of this request, if there is one left."""
        with self.lock:
            fault = self.faults.get(name)
            if fault is None or fault.times == 0:
                return None
            fault.times -= 1
            return fault


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, for ``FakeHub.add``."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def sibling(name: str, data: bytes) -> dict[str, Any]:
    """A file in the answer of model info with ?blobs=true."""
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    record: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(LFS_ENDINGS):
        sha = hashlib.sha256(data).hexdigest()
        record["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
    return record


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, b"{}", X_Error_Code=code, X_Error_Message=message)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/").split("/")
        self.hub.requests.append((self.command, url.path, self.headers.get("Range")))
        if path[0] == "cdn":
            self._content("/".join(path[1:3]), path[3], "/".join(path[4:]))
        elif path[:2] == ["api", "models"] and path[4:5] == ["tree"]:
            self._tree("/".join(path[2:4]), path[5])
        elif path[:2] == ["api", "models"]:
            revision = path[5] if path[4:5] == ["revision"] else "main"
            self._info("/".join(path[2:4]), revision, parse_qs(url.query))
        elif path[2:3] == ["resolve"]:
            self._resolve("/".join(path[:2]), path[3], "/".join(path[4:]))
        else:
            self._error(404, "EntryNotFound", "no such route")

    def _repo(self, name: str, needs_token: bool) -> FakeRepo | None:
        repo = self.hub.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == "broken":
            self._error(401, "", "Invalid credentials in Authorization header")
            return None
        if repo is None or (repo.is_private and token != repo.token):
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        if needs_token and repo.token is not None and token != repo.token:
            self._error(401 if not token else 403, "GatedRepo", "Access is restricted")
            return None
        return repo

    def _info(self, name: str, revision: str, query: dict[str, list[str]]) -> None:
        fault = self.hub.take("info")
        if fault is not None:
            self._answer(fault.status, b"{}")
            return
        repo = self._repo(name, needs_token=False)
        if repo is None:
            return
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repo.files(commit)
        known = [sibling(one, files[one]) for one in files]
        if "blobs" not in query:
            known = [{"rfilename": one} for one in files]
        record = {"id": name, "modelId": name, "sha": commit, "siblings": known, "tags": []}
        self._answer(200, json.dumps(record).encode(), Content_Type="application/json")

    def _tree(self, name: str, commit: str) -> None:
        known = [sibling(*item) for item in self.hub.repos[name].files(commit).items()]
        records = [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            | ({"lfs": one["lfs"] | {"oid": one["lfs"]["sha256"]}} if "lfs" in one else {})
            for one in known
        ]
        self._answer(200, json.dumps(records).encode(), Content_Type="application/json")

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if new := self.hub.moved.get(name):
            self._answer(307, Location=f"/{new}/resolve/{revision}/{file}")
            return
        repo = self._repo(name, needs_token=True)
        if repo is None:
            return
        commit = repo.commit(revision)
        files = repo.files(revision) if commit else {}
        if file not in files or commit is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        one = sibling(file, files[file])
        if "lfs" not in one:
            self._bytes(file, files[file], one["blobId"], commit)
            return
        self._answer(
            302,
            Location=f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{name}/{commit}/{file}",
            X_Repo_Commit=commit,
            X_Linked_Etag=f'"{one["lfs"]["sha256"]}"',
            X_Linked_Size=str(one["size"]),
        )

    def _content(self, name: str, commit: str, file: str) -> None:
        if token := self.headers.get("Authorization"):
            self.hub.tokens_at_content.append(token)
        data = self.hub.repos[name].files(commit)[file]
        self._bytes(file, data, hashlib.sha256(data).hexdigest(), commit)

    def _bytes(self, file: str, data: bytes, etag: str, commit: str) -> None:
        fault = self.hub.take(file) or Fault()
        if fault.status:
            retry = {"Retry_After": fault.retry_after} if fault.retry_after else {}
            self._answer(fault.status, b"", **retry)
            return
        asked = None if self.hub.ignores_ranges else self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        body = bytearray(data[start:])
        if fault.flip and body:
            body[len(body) // 2] ^= 1
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = int(len(body) * fault.cut)
        if fault.hold is not None:
            self.wfile.write(body[: end // 2])
            self.wfile.flush()
            fault.held.set()
            fault.hold.wait(30)
            body, end = body[end // 2 :], end - end // 2
        self.wfile.write(body[:end])
        with self.hub.lock:
            self.hub.sent[file] += end
        if end < len(body):
            self.close_connection = True
            self.connection.close()


class _ModelScopeHandler(_Handler):
    """ModelScope's API over the same repositories: the list of files, and files by query."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = url.path.strip("/").split("/"), parse_qs(url.query)
        self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        name, revision = "/".join(path[3:5]), query.get("Revision", ["master"])[0]
        repo = self.hub.repos.get(name)
        cookie = (self.headers.get("Cookie") or "").removeprefix("m_session_id=")
        if path[:3] != ["api", "v1", "models"] or repo is None or repo.commit(revision) is None:
            self._answer(404, b'{"Code": 10010205001}')
        elif repo.token is not None and cookie != repo.token:
            self._answer(403, b'{"Code": 10010205001}')
        elif path[5:] == ["repo", "files"]:
            files = [
                {
                    "Path": file,
                    "Name": file.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(data),
                    "Sha256": hashlib.sha256(data).hexdigest(),
                }
                for file, data in repo.files(revision).items()
            ]
            folders = [{"Path": "onnx", "Name": "onnx", "Type": "tree", "Size": 0}]
            record = {"Code": 200, "Success": True, "Data": {"Files": folders + files}}
            self._answer(200, json.dumps(record).encode())
        else:
            file = query["FilePath"][0]
            self._bytes(file, repo.files(revision)[file], "", "")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what some tests want."""


@contextmanager
def running_hub(is_modelscope: bool = False) -> Iterator[FakeHub]:
    """A hub on a free port of loopback. Content comes from "localhost", the API from 127.0.0.1, so
    that they are two hosts as with the real hub."""
    hub = FakeHub()
    base = _ModelScopeHandler if is_modelscope else _Handler
    server = _Server(("127.0.0.1", 0), type("Handler", (base,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
