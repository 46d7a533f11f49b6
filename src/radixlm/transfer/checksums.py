"""Checksums of pages in transit, by name, the fastest first. They find accidents; who sends has
proven that it knows the secret."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

CHECKSUMS: dict[str, Callable[[Any], int]] = {}

try:
    from xxhash import xxh3_64_intdigest
except ImportError:  # pragma: no cover - an extra
    pass
else:
    CHECKSUMS["xxh3"] = xxh3_64_intdigest

CRC32: Final = "crc32"  # which both ends have
CHECKSUMS[CRC32] = zlib.crc32
BEST: Final = next(iter(CHECKSUMS))
