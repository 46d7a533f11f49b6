"""The startup configuration that is read while torch is imported, and the memory prepared for the
weights."""

from __future__ import annotations

import ctypes
import io
import json
import sys

import pytest

from radixlm.engine.startup import HUGE_PAGE, PrefaultedMemory, StartupReader
from radixlm.kernels.cpu.extension import available, native

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="pages are made on Linux only")


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> StartupReader:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return StartupReader()


def test_the_configuration_is_read_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    early = given(monkeypatch, json.dumps({"index": 3}))
    assert early.wait() == {"index": 3} and early.pages is None
    early.finish()
    assert given(monkeypatch, "").wait() is None


@LINUX
def test_requested_pages_are_prefaulted(monkeypatch: pytest.MonkeyPatch) -> None:
    early = given(monkeypatch, json.dumps({"prefault_bytes": 3 * HUGE_PAGE + 5}))
    early.wait()
    early.join()
    assert early.pages is not None and early.pages.num_bytes == 3 * HUGE_PAGE
    assert early.pages.address % HUGE_PAGE == 0
    assert ctypes.string_at(early.pages.address, early.pages.num_bytes) == bytes(3 * HUGE_PAGE)
    early.drop()


@LINUX
def test_unavailable_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    early = given(monkeypatch, json.dumps({"prefault_bytes": 1 << 60}))
    assert early.wait() is not None and early.pages is None


@LINUX
@pytest.mark.skipif(not available, reason="the C++ kernels are not built")
def test_weights_use_the_prepared_memory() -> None:
    pages = PrefaultedMemory(2 * HUGE_PAGE)
    end = pages.address + pages.num_bytes
    native().lend_memory(pages.address, pages.num_bytes)
    first, second = native().Memory(5000), native().Memory(HUGE_PAGE)
    assert (first.address, first.num_bytes) == (pages.address, 8192)
    assert second.address == first.address + 8192
    ctypes.memset(second.address, 7, second.num_bytes)
    pages.prefault()
    assert ctypes.string_at(second.address, HUGE_PAGE) == b"\x07" * HUGE_PAGE
    large = native().Memory(HUGE_PAGE)  # more than is available
    assert not pages.address <= large.address < end
    native().end_lending()
    later = native().Memory(4096)
    assert ctypes.string_at(later.address, 4096) == bytes(4096)
    assert ctypes.string_at(second.address, 5) == b"\x07" * 5
