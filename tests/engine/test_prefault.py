"""The prefetch requests existing files, and leaves the rest to the loader."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from radixlm.config.server_config import ServerConfig
from radixlm.engine import prefault, startup
from radixlm.engine.startup import ADVICE_BYTES, QUEUED_BYTES, torch_libraries, will_need


def forget_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for files of other users: Linux does not tell which pages are in its cache."""
    monkeypatch.setattr(os, "access", lambda *_: False)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot read ahead")
def test_every_file_is_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.safetensors", "b.safetensors", "c.bin", "d.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    asked: list[tuple[str, int]] = []

    def note(opened: int, start: int, length: int, advice: int) -> None:
        asked.append((Path(f"/proc/self/fd/{opened}").resolve().name, advice))

    monkeypatch.setattr(os, "posix_fadvise", note)
    forget_cached(monkeypatch)
    thread = prefault.read_ahead(tmp_path)
    assert thread is not None
    thread.join(60)
    wanted = os.POSIX_FADV_WILLNEED
    assert asked == [("a.safetensors", wanted), ("b.safetensors", wanted)]
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).unlink()
    asked.clear()
    thread = prefault.read_ahead(tmp_path)
    assert thread is not None
    thread.join(60)
    assert asked == [("d.gguf", wanted)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot read ahead")
def test_a_long_file_is_asked_for_piece_by_piece_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(2 * QUEUED_BYTES + 5))
    pieces: list[tuple[int, int]] = []
    forget_cached(monkeypatch)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, n, __: pieces.append((start, n)))
    will_need([tmp_path / "missing", tmp_path / "a"])
    assert pieces == [(at, ADVICE_BYTES) for at in range(0, 2 * QUEUED_BYTES + 5, ADVICE_BYTES)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is cached")
def test_what_is_in_memory_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * ADVICE_BYTES + 5))
    pieces: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, *__: pieces.append(start))
    will_need([tmp_path / "a"])
    assert not pieces

    def all_but_one(_: int, num_bytes: int, pages: ctypes.Array[ctypes.c_char]) -> int:
        pages[: len(pages)] = b"\1" * len(pages)
        pages[2 * ADVICE_BYTES // mmap.PAGESIZE - 1] = b"\0"
        return 0

    monkeypatch.setattr(startup._libc, "mincore", all_but_one)
    will_need([tmp_path / "a"])
    assert pieces == [ADVICE_BYTES]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot read ahead")
def test_a_file_whose_reading_fails_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fail(descriptor: int, *_: int) -> None:
        tried.append(descriptor)
        raise OSError(5, "input/output error")

    forget_cached(monkeypatch)
    monkeypatch.setattr(os, "posix_fadvise", fail)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"weights")
    will_need([tmp_path / "a", tmp_path / "b"])
    assert len(tried) == 2


def test_torch_libraries_are_those_that_an_engine_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/" + 300 * "x", *sys.path])  # one that raises OSError
    found = torch_libraries()
    assert {path.parent for path in found} == {Path(torch.__file__).parent / "lib"}
    assert all(path.is_file() for path in found)


def test_nothing_is_prefetched_without_files_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefault.read_ahead(tmp_path) is None
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert prefault.read_ahead(tmp_path) is None
    (tmp_path / "gone.safetensors").unlink()
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    full = psutil.virtual_memory()._replace(available=8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    assert prefault.read_ahead(tmp_path) is None


def test_memory_for_packed_cpu_weights_is_prefaulted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(**options: object) -> int:
        config = ServerConfig.from_kwargs(model_path="x", **{"device": "cpu", **options})
        return prefault.prefault_bytes(config, tmp_path)

    assert wanted() == 0  # no files
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.truncate(100 << 20)
    plenty = psutil.virtual_memory()._replace(available=64 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: plenty)
    assert wanted() == 100 << 20
    assert wanted(quantization="w8a8_int8") == 50 << 20
    assert wanted(quantization="int4wo-128") == 25 << 20
    assert wanted(device="cuda") == wanted(load_format="dummy") == 0
    with (tmp_path / "b.safetensors").open("wb") as file:
        file.truncate(100 << 30)
    assert wanted() == prefault.MAX_PREFAULT_BYTES
    short = plenty._replace(available=4 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    assert wanted() == 0
