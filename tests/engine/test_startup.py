"""The startup configuration that is read while torch is imported, and the memory prepared for the
weights."""

from __future__ import annotations

import ctypes
import io
import json
import os
import sys
import threading
import time

import pytest

from radixlm.engine import startup
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
    pages.prefault()
    native().lend_memory(pages.address, pages.num_bytes)
    first, second = native().Memory(5000), native().Memory(HUGE_PAGE)
    assert (first.address, first.num_bytes) == (pages.address, 8192)
    assert second.address == first.address + 8192
    ctypes.memset(second.address, 7, second.num_bytes)
    large = native().Memory(HUGE_PAGE)  # more than is available
    assert not pages.address <= large.address < end
    native().end_lending()
    later = native().Memory(4096)
    assert ctypes.string_at(later.address, 4096) == bytes(4096)
    assert ctypes.string_at(second.address, 5) == b"\x07" * 5


@LINUX
def test_huge_pages_that_take_long_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    pages = PrefaultedMemory(6 * HUGE_PAGE)
    plain = pages._advise

    def note(start: int, advice: int) -> None:
        advised.append((start // HUGE_PAGE, advice))
        plain(start, advice)

    # each chunk: huge ones are fast, slow; small ones fast, then slow too; so are huge ones again
    lasting_s = [0.002, 0.04, 0.006, 0.04, 0.04, 0.04]
    times_s = iter([time_s for each in lasting_s for time_s in (0.0, each)])
    monkeypatch.setattr(startup, "CHUNK_BYTES", HUGE_PAGE)
    own, clock = threading.get_ident(), time.thread_time  # other threads have the true one
    monkeypatch.setattr(
        time, "thread_time", lambda: next(times_s) if threading.get_ident() == own else clock()
    )
    monkeypatch.setattr(pages, "_advise", note)
    pages.prefault()
    assert advised == [(2, startup.MADV_NOHUGEPAGE), (4, startup.MADV_HUGEPAGE)]
    ctypes.memset(pages.address, 5, pages.num_bytes)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)  # of the thread that runs the tests
    monkeypatch.setattr(startup, "_rest", lambda until_s: None)
    pages.collapse()
    assert advised[2:] == [(0, startup.MADV_HUGEPAGE)]
    assert ctypes.string_at(pages.address, pages.num_bytes) == b"\x05" * pages.num_bytes
    pages.free()


def test_huge_pages_wait_until_the_process_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """During three glances it uses two processors, half of one, and next to none."""
    used_s = iter([0.0, 0.04, 0.04, 0.05, 0.05, 0.051, 0.051])
    now_s, slept = 0.0, list[float]()

    def sleep(time_s: float) -> None:
        nonlocal now_s
        now_s += time_s
        slept.append(time_s)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "process_time", lambda: next(used_s))
    startup._rest(startup.PATIENCE_S)
    assert slept == [startup.GLANCE_S] * 3
    now_s = startup.PATIENCE_S  # it was never idle
    startup._rest(startup.PATIENCE_S)
    assert slept[3:] == [startup.PACE_S]
