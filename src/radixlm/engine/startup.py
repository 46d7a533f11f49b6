"""What an engine process does while it imports torch: it has the system read torch's libraries,
reads its startup config from standard input, and prefaults the memory for its weights. Needs
little but Python's standard library.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

HUGE_PAGE = 2 << 20
CHUNK_BYTES = 16 << 20  # between two chunks the thread checks whether it is to stop
SLOWER = 2.0  # small pages are taken where huge ones take so much longer
SMALL_S = 0.005  # what a chunk of small pages takes where nothing is in the way
JOINED_BYTES = 8 << 20  # that become huge at a time
GLANCE_S = 0.02  # how long the process must have rested before, of which BUSY_SHARE may be used
BUSY_SHARE = 0.25
PATIENCE_S = 60.0  # for such a rest
PACE_S = 0.1  # between two chunks after that
# of Linux; Python's mmap module holds the GIL during madvise and lacks the last constant
MADV_DONTFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE = 10, 14, 15, 25
MAP_FAILED = ctypes.c_void_p(-1).value
PR_SET_PDEATHSIG = 1
# of one posix_fadvise: Linux reads no more of it than a device's read-ahead, often 128 KiB
ADVICE_BYTES = 128 << 10
QUEUED_BYTES = 512 << 10  # asked for and not read yet; other readers of the disk wait behind it
# made before torch is imported: until its libraries are loaded, no other thread can make one
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
TORCH_LIBRARIES = ("libtorch_python.so", "libtorch_cpu.so")


def will_need(files: Iterable[Path]) -> None:
    """Have the system read files into its page cache, from the first byte to the last. Those that
    cannot be read are left to whoever needs them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with suppress(OSError):
            _will_need(file)


def _will_need(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for start in _missing(file, descriptor, os.fstat(descriptor).st_size):
            os.posix_fadvise(descriptor, start, ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
            if start >= QUEUED_BYTES:
                os.pread(descriptor, 1, start - QUEUED_BYTES)  # waits until it is read
    finally:
        os.close(descriptor)


def _missing(file: Path, descriptor: int, num_bytes: int) -> list[int]:
    """Where the pieces of a file begin that are not in the page cache: thousands of calls for
    others would only take the GIL from the thread that imports. All, where Linux does not tell."""
    starts = range(0, num_bytes, ADVICE_BYTES)
    if not starts or not os.access(file, os.W_OK):  # Linux says that files of others are cached
        return list(starts)
    pages = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
    with mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if _libc.mincore(address, num_bytes, pages):
            return list(starts)
    found, each = pages.raw, ADVICE_BYTES // mmap.PAGESIZE
    return [
        at * ADVICE_BYTES for at in range(len(starts)) if 0 in found[at * each : (at + 1) * each]
    ]


def torch_libraries() -> list[Path]:
    """Torch's libraries that every engine needs, found without importing torch."""
    for folder in sys.path:
        place = os.path.join(folder, "torch", "lib")
        if os.path.isdir(place):  # unlike Path.is_dir no error where a folder cannot be searched
            return [Path(place, name) for name in TORCH_LIBRARIES]
    return []


class PrefaultedMemory:
    """``num_bytes`` of private memory at ``address``; ``prefault`` makes its pages."""

    def __init__(self, num_bytes: int) -> None:
        """OSError if the system has no such memory."""
        whole = num_bytes + HUGE_PAGE
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start_address = _libc.mmap(None, whole, protection, kind, -1, 0)
        if start_address == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "no memory to prefault")
        self.address = -(-start_address // HUGE_PAGE) * HUGE_PAGE
        self.num_bytes = num_bytes // HUGE_PAGE * HUGE_PAGE
        end = self.address + self.num_bytes
        self._free(start_address, self.address - start_address)
        self._free(end, start_address + whole - end)
        self.has_small = False
        self._stopping = threading.Event()
        self._advise(0, MADV_HUGEPAGE)
        self._advise(0, MADV_DONTFORK)  # it is for the weights of this process

    def _free(self, address: int, num_bytes: int) -> None:
        if num_bytes:
            _libc.munmap(address, num_bytes)

    def _advise(self, start: int, advice: int) -> None:
        if start < self.num_bytes:
            _libc.madvise(self.address + start, self.num_bytes - start, advice)

    def prefault(self) -> None:
        """Make the pages until ``stop`` is called, by writing zeros: a system call that makes them
        keeps the thread that imports torch from mapping its libraries.

        Huge pages, unless they take much longer than small ones: the host of a virtual machine may
        have taken free memory back, most often all that huge pages need, which then take 18 times
        as long.
        """
        costs_s = {False: 0.0, True: SMALL_S}  # of the last chunk of huge and of small pages
        is_small = False
        for start in range(0, self.num_bytes, CHUNK_BYTES):
            if self._stopping.is_set():
                return
            begun_s = time.thread_time()  # without what other threads and processes take
            ctypes.memset(self.address + start, 0, min(CHUNK_BYTES, self.num_bytes - start))
            costs_s[is_small] = time.thread_time() - begun_s
            was_small, is_small = is_small, SLOWER * costs_s[True] < costs_s[False]
            if is_small != was_small:
                self.has_small = True
                self._advise(start + CHUNK_BYTES, MADV_NOHUGEPAGE if is_small else MADV_HUGEPAGE)

    def collapse(self) -> None:
        """Make huge pages of the small ones that were taken while the process has nothing to do,
        or a few at a time if it is never idle; their bytes stay. Linux 6.1 does it at once, older
        ones over minutes.

        The lowest priority is not enough: while a host finds the memory, the processor of this
        thread stands still, and all threads of a step wait for the one that it should run.
        """
        if not self.has_small:
            return
        with suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self._advise(0, MADV_HUGEPAGE)
        until_s = time.monotonic() + PATIENCE_S
        for start in range(0, self.num_bytes, JOINED_BYTES):
            _rest(until_s)
            size = min(JOINED_BYTES, self.num_bytes - start)
            _libc.madvise(self.address + start, size, MADV_COLLAPSE)

    def stop(self) -> None:
        """Make no more pages."""
        self._stopping.set()

    def free(self) -> None:
        """Return all of the memory to the system."""
        self._free(self.address, self.num_bytes)


def _rest(until_s: float) -> None:
    """Wait until the process uses no processor, or for ``PACE_S`` once it is ``until_s``."""
    while time.monotonic() < until_s:
        used_s = time.process_time()
        time.sleep(GLANCE_S)
        if time.process_time() - used_s < BUSY_SHARE * GLANCE_S:
            return
    time.sleep(PACE_S)


class StartupReader(threading.Thread):
    """Reads the startup config that the server sends, and prefaults the memory that it asks for.
    ``no_server``: called at once where the server ended before it sent one."""

    def __init__(self, no_server: Callable[[], None] | None = None) -> None:
        super().__init__(name="startup", daemon=True)
        self._no_server = no_server
        self.pages: PrefaultedMemory | None = None
        self._is_read = threading.Event()
        self._config: dict[str, Any] | None = None
        self.start()

    def run(self) -> None:
        """Read the config, then prefault."""
        ahead = threading.Thread(target=will_need, args=(torch_libraries(),), daemon=True)
        ahead.start()
        try:
            text = sys.stdin.read()
            if not text and self._no_server is not None:
                self._no_server()
            self._config = json.loads(text) if text else None
            num_bytes = self._config.get("prefault_bytes", 0) if self._config else 0
            if num_bytes >= HUGE_PAGE and sys.platform == "linux":
                self.pages = PrefaultedMemory(num_bytes)
        except OSError:
            pass  # the weights are allocated without it, or fail with an error of their own
        finally:
            self._is_read.set()
        if self.pages is not None:
            self.pages.prefault()

    def wait(self) -> dict[str, Any] | None:
        """The startup config; None if the server ended before it sent one."""
        self._is_read.wait()
        return self._config

    def finish(self) -> None:
        """Stop prefaulting, and wait until it has stopped."""
        if self.pages is not None:
            self.pages.stop()
        self.join()

    def drop(self) -> None:
        """Stop, and free the memory."""
        self.finish()
        if self.pages is not None:
            self.pages.free()


def die_with_parent() -> None:
    """Have the kernel kill this process when the server that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def check_parent(parent: int) -> None:
    """Exit if the server ended before ``die_with_parent``."""
    if os.getppid() != parent:
        os._exit(1)
