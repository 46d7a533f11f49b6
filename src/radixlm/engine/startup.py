"""What an engine process does while it imports torch: it reads its order from standard input and
makes the pages of memory that its weights will be packed into. Needs nothing but Python."""

import ctypes
import json
import mmap
import sys
import threading
from typing import Any

HUGE_PAGE = 2 << 20
PIECE = 32 << 20  # bytes; between two of them the thread looks whether it is to stop
# of Linux; Python's mmap holds its lock during them and does not know the second
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
MAP_FAILED = ctypes.c_void_p(-1).value


class PrefaultedMemory:
    """``num_bytes`` of private memory from ``address`` on, whose pages ``make`` makes."""

    def __init__(self, num_bytes: int) -> None:
        """OSError where the system does not give it."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
        ]  # fmt: skip
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        whole = num_bytes + HUGE_PAGE
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = self._libc.mmap(None, whole, protection, kind, -1, 0)
        if found == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "no memory to make ready")
        self.address = -(-found // HUGE_PAGE) * HUGE_PAGE
        self.num_bytes = num_bytes // HUGE_PAGE * HUGE_PAGE
        end = self.address + self.num_bytes
        self._free(found, self.address - found)
        self._free(end, found + whole - end)
        self._stopping = threading.Event()
        self._libc.madvise(self.address, self.num_bytes, MADV_HUGEPAGE)

    def _free(self, address: int, num_bytes: int) -> None:
        if num_bytes:
            self._libc.munmap(address, num_bytes)

    def make(self) -> None:
        """Until all are made, it is stopped, or the system does not know how (before Linux 5.14).
        What others have written into the memory meanwhile stays."""
        for start in range(0, self.num_bytes, PIECE):
            size = min(PIECE, self.num_bytes - start)
            at = self.address + start
            if self._stopping.is_set() or self._libc.madvise(at, size, MADV_POPULATE_WRITE):
                return

    def stop(self) -> None:
        """Make no more."""
        self._stopping.set()

    def free(self) -> None:
        """Give all of it back."""
        self._free(self.address, self.num_bytes)


class StartupReader(threading.Thread):
    """A server's order, and the pages that it asks for (``prefault_bytes``)."""

    def __init__(self) -> None:
        super().__init__(name="order", daemon=True)
        self.pages: PrefaultedMemory | None = None
        self._is_read = threading.Event()
        self._order: dict[str, Any] | None = None
        self.start()

    def run(self) -> None:
        """Read, then make pages."""
        try:
            given = sys.stdin.read()
            self._order = json.loads(given) if given else None
            num_bytes = self._order.get("prefault_bytes", 0) if self._order else 0
            if num_bytes >= HUGE_PAGE and sys.platform == "linux":
                self.pages = PrefaultedMemory(num_bytes)
        except OSError:
            pass  # the weights find memory of their own, or say that there is none
        finally:
            self._is_read.set()
        if self.pages is not None:
            self.pages.make()

    def wait(self) -> dict[str, Any] | None:
        """The order; None if the server ended before it gave one."""
        self._is_read.wait()
        return self._order

    def finish(self) -> None:
        """Make no more pages; none is made any longer."""
        if self.pages is not None:
            self.pages.stop()
        self.join()

    def drop(self) -> None:
        """Nobody wants the pages."""
        self.finish()
        if self.pages is not None:
            self.pages.free()
