"""What the client sends, read by the spool of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixlm.base.errors import EngineError, InvalidRequest
from radixlm.weight_updates.tensor_spool import SHARED_FOLDER, TensorSpool, read_handles
from radixlm.weights_client import update_weights_from_tensor


class FakeServer(HTTPServer):
    """Keeps what it gets; answers ``status``."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spool = TensorSpool()
        self.options, self.headers = {}, {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        place = urlsplit(self.path)
        assert place.path == "/update_weights_from_tensor"
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers = dict(self.headers)
        if self.headers["Content-Type"] == "application/json":
            options: dict[str, Any] = json.loads(data)
            self.server.spool.add_shared(read_handles(options.pop("tensor_handles")))
        else:
            options = dict(parse_qsl(place.query))
            self.server.spool.add_bytes(data)
        self.server.options = options
        is_ok = self.server.status == 200
        body = json.dumps({"success": is_ok, "message": "said"}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)
    made.spool.delete()


def kept(server: FakeServer) -> dict[str, torch.Tensor]:
    (part,) = server.spool.path.glob("part*")
    return load_file(part)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_tensors_arrive_bit_for_bit(server: FakeServer, shared_memory: bool) -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    tensors = {
        "cut": whole[:, 1:3],
        "turned": whole.t(),
        "learned": torch.nn.Parameter(torch.randn(3)),
        "same": whole,
        "again": whole,
        "empty": torch.empty(0, 4),
        "of numpy": torch.arange(3, dtype=torch.int16),
    }
    sent: dict[str, Any] = {**tensors, "of numpy": np.arange(3, dtype=np.int16)}
    answer = update_weights_from_tensor(
        server.url,
        iter(sent.items()),
        shared_memory=shared_memory,
        weight_version='é "2"',
        flush_cache=False,
        api_key="k",
    )
    assert answer == {"success": True, "message": "said"}
    found = kept(server)
    assert found.keys() == tensors.keys()
    for name, one in tensors.items():
        assert found[name].dtype == one.dtype and torch.equal(found[name], one)
    assert server.options["weight_version"] == 'é "2"'
    assert server.options["flush_cache"] in (False, "false")
    assert server.headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidRequest), (501, EngineError), (500, EngineError)]
)
def test_a_refusal_is_raised(server: FakeServer, status: int, kind: type[Exception]) -> None:
    server.status = status
    with pytest.raises(kind, match="update_weights_from_tensor: said"):
        update_weights_from_tensor(server.url, {"a": torch.ones(2)}, shared_memory=status == 500)


def test_no_segment_is_left(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "feedc0de")
    update_weights_from_tensor(server.url, {"a": torch.ones(2)}, shared_memory=True)
    assert not list(SHARED_FOLDER.glob("radixlm-weights-*-feedc0de"))


def test_a_tensor_that_has_no_code_is_named() -> None:
    with pytest.raises(InvalidRequest, match="a: the dtype 'complex64'"):
        update_weights_from_tensor("http://127.0.0.1:9", {"a": torch.ones(1) * 1j})
