"""Lossless compression of page payloads: byte planes, then zstd.

The high bytes of bf16 numbers, signs and exponents, repeat; sorted into a plane of their own they
compress to about a third, while the low bytes hardly do. zstd is an extra (``radixlm[tiers]``):
without it, or where a sample shows that little is gained, payloads are kept as they are.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np

from radixlm.tiers.base import Payload

try:
    import zstandard
except ImportError:  # pragma: no cover - an extra
    zstandard = None  # type: ignore[assignment]

RAW: Final = 0
_WIDTHS: Final = {1: 1, 2: 2, 3: 4}  # of the numbers: flags -> bytes; 1 is zstd without planes
_WORTH: Final = 0.97  # of the size: what gains less is not done
_SAMPLE_BYTES: Final = 1 << 18
_EVERY: Final = 256  # payloads between two samples


class Codec:
    """Chooses by a sample, the first payload and each 256th of its length, how payloads of that
    length are encoded. Any threads may use one."""

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._chosen: dict[int, list[int]] = {}  # length -> [flags, payloads until the next sample]
        self._local = threading.local()

    def encode(self, payload: Payload) -> tuple[int, bytes | Payload]:
        """(flags, blob) of a payload, uint8 [n]; the blob is the payload itself where it is raw."""
        if zstandard is None:
            return RAW, payload
        chosen = self._chosen.setdefault(len(payload), [RAW, 0])
        if chosen[1] <= 0:
            chosen[:] = [self._choose(payload), _EVERY]
        chosen[1] -= 1
        flags = chosen[0]
        if flags == RAW:
            return RAW, payload
        blob = self._compress(payload, flags)
        return (flags, blob) if len(blob) < len(payload) else (RAW, payload)

    def decode(self, flags: int, blob: bytes | Payload | memoryview, out: Payload) -> bool:
        """Fill ``out``; False if the blob is none of ``out``'s length, or cannot be read here."""
        if flags == RAW:
            if len(blob) == len(out):
                out[:] = np.frombuffer(blob, np.uint8)
            return len(blob) == len(out)
        width = _WIDTHS.get(flags)
        if zstandard is None or width is None or len(out) % width:
            return False
        data = memoryview(blob)  # type: ignore[arg-type]
        try:  # the size in a hostile frame is what would be allocated
            if zstandard.frame_content_size(data) != len(out):
                return False
            plain = np.frombuffer(self._tools()[1].decompress(data), np.uint8)
        except zstandard.ZstdError:
            return False
        if width == 1:
            out[:] = plain
        else:
            byte_planes(plain, width, out, joins=True)
        return True

    def _choose(self, payload: Payload) -> int:
        """The flags under which the middle of the payload is smallest: more planes must gain."""
        middle = max(0, len(payload) - _SAMPLE_BYTES) // 8 * 4
        sample = payload[middle : middle + _SAMPLE_BYTES]
        best, size = RAW, len(sample) * 1.0
        for flags, width in _WIDTHS.items():
            if len(payload) % width == 0 and len(sample) % width == 0:
                gained = len(self._compress(sample, flags))
                if gained < _WORTH * size:
                    best, size = flags, gained
        return best

    def _compress(self, payload: Payload, flags: int) -> bytes:
        if (width := _WIDTHS[flags]) > 1:
            planes = np.empty_like(payload)
            byte_planes(payload, width, planes, joins=False)
            payload = planes
        blob: bytes = self._tools()[0].compress(payload)
        return blob

    def _tools(self) -> tuple[Any, Any]:
        """The compressor and the decompressor of this thread: they are for one thread each."""
        tools: tuple[Any, Any] | None = getattr(self._local, "tools", None)
        if tools is None:
            tools = (zstandard.ZstdCompressor(self._level), zstandard.ZstdDecompressor())
            self._local.tools = tools
        return tools


def byte_planes(x: Payload, width: int, out: Payload, *, joins: bool) -> None:
    """Numbers of ``width`` (2 or 4) bytes, uint8 [n * width] C-contiguous, to ``width`` planes of n
    bytes; ``joins``: the inverse. By the C++ kernels where an engine has loaded them."""
    native = sys.modules.get("radixlm._cpu")  # importing it before torch gives two OpenMP runtimes
    if native is not None and x.flags.c_contiguous and out.flags.c_contiguous:
        native.byte_planes(x.ctypes.data, len(x) // width, width, out.ctypes.data, joins)
    elif joins:
        out.reshape(-1, width)[:] = x.reshape(width, -1).T
    else:
        out.reshape(width, -1)[:] = x.reshape(-1, width).T
