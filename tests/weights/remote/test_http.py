"""Weights from a web server: the same bits as from the folder, each byte once, and every fault an
error that names it."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.weights.remote.conftest import assert_same, packed, read_all
from tests.weights.remote.file_server import FileServer, file_server

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.weights.remote.http import HttpReader
from radixlm.weights.remote.place import Place, open_reader, read_place, write_place
from radixlm.weights.remote.read_ahead import Digest, ReadAhead, Run
from radixlm.weights.remote.reader import RemoteFile
from radixlm.weights.remote.source import RemoteSource

FILE = "model.safetensors"


_OPENED: list[HttpReader] = []


@pytest.fixture(autouse=True)
def closes_readers() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def opened(url: str, pause: Callable[[float], None] = lambda _: None, **options: Any) -> HttpReader:
    _OPENED.append(HttpReader(url, pause=pause, **options))
    return _OPENED[-1]


def reader_of(server: FileServer, **options: Any) -> HttpReader:
    return opened(server.url, **options)


def source_of(server: FileServer, **options: Any) -> RemoteSource:
    reader = reader_of(server, timeout_s=1.0)
    files = [file for file in reader.files() if file.name.endswith(".safetensors")]
    return RemoteSource(reader, files, server.folder, **options)


def test_a_model_is_loaded_bit_for_bit_and_each_byte_is_sent_once(
    server: FileServer, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    files = tuple(f for f in reader_of(server).files() if f.name == FILE)
    write_place(place, Place(server.url, files))
    assert packed(place, "remote") == packed(folder, "auto")
    size = (folder / FILE).stat().st_size
    head = min(size, 256 << 10)  # read for the header
    assert server.asked(FILE) <= size + head
    assert not list(place.glob("*.safetensors"))


@pytest.mark.parametrize("window", [1, 20_000, 1 << 30])
def test_buffers_stay_within_the_window(server: FileServer, folder: Path, window: int) -> None:
    source = source_of(server, window_bytes=window, num_threads=3)
    largest = max(source.sizes().values())
    assert_same(read_all(source), folder)
    assert source.ahead.peak_bytes <= max(window, 8 << 20, largest) + 128
    assert source.ahead._held == 0


def test_tensors_are_read_in_any_order_and_without_being_announced(
    server: FileServer, folder: Path
) -> None:
    source = source_of(server)
    names = sorted(source.sizes())
    found = {name: source.read(name).clone() for name in names[:3]}
    source.expect([source.origins(name)[0] for name in names])
    found |= {name: source.read(name).clone() for name in reversed(names)}
    for name in names:
        source.release(name)
    assert torch.equal(source.read(names[0]), found[names[0]])  # once more, for a message
    assert_same(found, folder)
    source.close()


def test_shards_are_found_by_the_index(server: FileServer, folder: Path) -> None:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(read_all(source_of(server)), folder)
    index.write_text(json.dumps({"weight_map": {"a": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors: 404"):
        reader_of(server).files()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("files.json", '[{"name": "model.safetensors", "size": SIZE}, "config.json"]'),
        ("files.json", '{"files": ["config.json", "model.safetensors"]}'),
        ("files.txt", "config.json\nmodel.safetensors\n"),
    ],
)
def test_files_are_found_by_a_list(server: FileServer, folder: Path, name: str, text: str) -> None:
    size = (folder / FILE).stat().st_size
    (folder / name).write_text(text.replace("SIZE", str(size)))
    found = {file.name: file.size for file in reader_of(server).files()}
    assert found == {FILE: size, "config.json": (folder / "config.json").stat().st_size}


def test_a_list_that_is_none_is_refused(server: FileServer, folder: Path) -> None:
    (folder / "files.json").write_text('[{"size": 3}]')
    with pytest.raises(CheckpointError, match=r"files.json is no list of files"):
        reader_of(server).files()


def test_a_connection_that_drops_at_70_percent_is_resumed_at_that_byte(
    server: FileServer, folder: Path
) -> None:
    dropped = []

    def drop(handler: Any, name: str, span: tuple[int, int]) -> bool:
        start, end = span
        if name != FILE or end - start < 1000 or len(dropped) == 4:
            return False
        keep = (end - start) * 7 // 10
        dropped.append(start + keep)
        handler.send_response(206)
        handler.send_header("Content-Length", str(end - start))
        handler.end_headers()
        handler.send_bytes((folder / FILE).read_bytes()[start : start + keep])
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True
        return True

    server.fault = drop
    source = source_of(server)
    assert_same(read_all(source), folder)
    asked = {int(span[6:].partition("-")[0]) for _, _, span in server.requests if span}
    assert dropped
    assert set(dropped) <= asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_and_then_given_up(server: FileServer, status: int) -> None:
    answers = iter([status] * 3)
    server.fault = lambda handler, name, span: (
        (found := next(answers, None)) is not None and handler.refuse(found, Retry_After="1")
    )
    waits: list[float] = []
    reader = opened(server.url, waits.append)
    file = reader.require("config.json")
    assert reader.read(file) == (server.folder / "config.json").read_bytes()
    assert waits == [1.0] * 3
    server.fault = lambda handler, name, span: handler.refuse(status)
    with pytest.raises(CheckpointError, match=f"config.json: byte 0: given up after 5.*{status}"):
        reader.read(file)


@pytest.mark.parametrize(("status", "hint"), [(401, "RADIXLM_WEIGHTS_KEY"), (403, "may the key")])
def test_a_refusal_is_not_tried_again(server: FileServer, status: int, hint: str) -> None:
    file = reader_of(server).require("config.json")
    server.fault = lambda handler, name, span: handler.refuse(status)
    before = len(server.requests)
    with pytest.raises(CheckpointError, match=f"config.json: {status}.*{hint}"):
        reader_of(server).read(file)
    assert len(server.requests) == before + 1


def test_a_key_is_sent_to_its_own_host_only(server: FileServer, tmp_path: Path) -> None:
    seen: list[str | None] = []

    def note(handler: Any, name: str, span: tuple[int, int]) -> bool:
        seen.append(handler.headers.get("Authorization"))
        return False

    server.fault = note
    reader = reader_of(server, key="secret")
    file = reader.require("config.json")
    with file_server(server.folder) as other:
        other.fault = lambda handler, name, span: handler.refuse(302, Location=server.url + name)
        far = reader_of(other, key="secret")
        assert far.read(file) == reader.read(file)
    assert seen == [None, "Bearer secret"]


def test_a_file_that_changes_during_the_load_is_refused(server: FileServer, folder: Path) -> None:
    for has_tags in (True, False):
        server.has_tags = has_tags
        source = source_of(server)
        name = max(source.sizes(), key=lambda name: source.sizes()[name])
        data = bytearray((folder / FILE).read_bytes())
        data[-1] ^= 1
        (folder / FILE).write_bytes(data if has_tags else data + b"0")
        with pytest.raises(CheckpointError, match=r"changed while|has \d+ bytes, expected"):
            source.read(name)
        source.close()


def test_a_deleted_file_is_named(server: FileServer, folder: Path) -> None:
    source = source_of(server)
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors changed while.*404.*it is gone"):
        read_all(source)
    source.close()


def test_a_wrong_sha256_is_found_before_the_model_serves(server: FileServer, folder: Path) -> None:
    server.says_sha256 = True
    assert_same(read_all(source_of(server, window_bytes=1)), folder)
    source = source_of(server)
    honest = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()

    def flip(handler: Any, name: str, span: tuple[int, int]) -> bool:
        data = bytearray((folder / FILE).read_bytes()[slice(*span)])
        data[-1] ^= 1
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.send_bytes(bytes(data))
        return True

    server.fault = flip
    with pytest.raises(CheckpointError, match=f"SHA-256 is .*, the store says {honest}"):
        read_all(source)
    source.close()


def test_tensors_that_nobody_needs_are_read_for_a_digest_only(
    server: FileServer, folder: Path
) -> None:
    for says in (False, True):
        server.says_sha256 = says
        source = source_of(server)
        server.requests.clear()
        name = min(source.sizes())
        source.expect(source.origins(name))
        source.read(name)
        source.release(name)
        source.finish()
        source.close()
        data = (folder / FILE).read_bytes()
        tensors = len(data) - 8 - int.from_bytes(data[:8], "little")
        assert server.asked(FILE) == (tensors if says else source.sizes()[name])


def test_a_server_without_ranges_is_refused_with_a_hint(server: FileServer) -> None:
    server.has_ranges = False
    reader = reader_of(server)
    assert reader.read(reader.require("config.json"))  # whole files are fine
    with pytest.raises(CheckpointError, match=r"no byte ranges.*--download-dir"):
        reader.read(reader.require(FILE), 8, 100)


def test_a_silent_server_is_given_up(server: FileServer) -> None:
    file = reader_of(server).require("config.json")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        reader = opened(url, timeout_s=0.05)
        with pytest.raises(CheckpointError, match="given up after 5 attempts: TimeoutError"):
            reader.read(file)


def test_a_truncated_file_is_named(server: FileServer, folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        source_of(server)
    (folder / FILE).write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="truncated: 3 bytes"):
        source_of(server)


def test_urls_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such source of weights"):
        open_reader("ftp://host/model")
    for url in ("http://host:port/model", "redis://host:port/model", "http://[::1/model"):
        with pytest.raises(ConfigError, match="for example https://host:8080/model"):
            open_reader(url)
    with pytest.raises(ConfigError, match="without a query") as caught:
        open_reader("https://host/model?signature=secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="must not hold a password") as caught:
        open_reader("http://user:pass@host/model")
    assert "pass@" not in str(caught.value)


def test_a_folder_that_is_no_place_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder of a remote model"):
        read_place(folder)


def test_a_buffer_that_a_thread_has_hashed_and_freed_is_not_asked_for(server: FileServer) -> None:
    """As when the thread ends between two looks of ``finish``."""
    reader, data = reader_of(server), b"bytes"
    file = RemoteFile("f", len(data), sha256=hashlib.sha256(data).hexdigest())
    ahead, run = ReadAhead(reader, [file]), Run(0, 0, len(data))
    done: Future[None] = Future()
    done.set_result(None)
    run.data, run.pieces = torch.frombuffer(bytearray(data), dtype=torch.uint8), [done]
    digest = Digest(b"", [run])
    assert digest.advance() == [run]
    run.data = None
    ahead._runs, ahead._digests = [run], {0: digest}
    ahead.finish()
    ahead.close()


@pytest.mark.parametrize("name", ["//127.0.0.1:9/f", "/f"])
def test_names_of_an_index_lead_to_no_other_host(
    server: FileServer, folder: Path, name: str
) -> None:
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{server.url}{name}: 404, but it is listed"):
        reader_of(server).files()
    assert unquote(server.requests[-1][1]) == name.lstrip("/")


def test_a_redirect_to_a_bad_address_is_named(server: FileServer) -> None:
    (server.folder / "files.json").write_text("[]")
    server.fault = lambda handler, *_: handler.refuse(302, Location="http://host:port/")
    with pytest.raises(CheckpointError, match="a redirect leads nowhere"):
        reader_of(server).files()
