"""Frames: pages as bytes that say what they are, for files and stores that others may write to.

    magic 4 | version 2 | flags 2 | identity 16 | key 32 | parent 32 | raw 8 | stored 8 | digest 16

then the stored bytes; numbers are little-endian. ``digest`` is over all the rest: BLAKE2b-128,
keyed (RFC 7693, a MAC) where the readers share a secret; without one XXH3-128 where it is
installed, which is fifty times as fast. A frame with any other byte is a miss.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, Literal, Protocol

import numpy as np

from radixlm.tiers.base import Payload
from radixlm.tiers.keys import NO_KEY

try:
    from xxhash import xxh3_128
except ImportError:  # pragma: no cover - an extra
    xxh3_128 = None  # type: ignore[assignment,misc]

_HEADER: Final = struct.Struct("<4sHH16s32s32sQQ16s")
_MAGIC: Final = b"RLKV"
_VERSION: Final = 1
HEADER_BYTES: Final = _HEADER.size
CODEC_BITS: Final = 15  # of the flags; 0: the payload as it is
_XXH3: Final = 16  # of the flags
_DIGEST_BYTES: Final = 16

Fault = Literal["", "short", "foreign", "damaged"]
"""Why a frame is a miss: cut off, of another page, model or layout, or with wrong bytes."""


class Codec(Protocol):
    """Lossless compression. ``flags`` (1 to 15) go into the frame; ``encode`` may give (0, payload)
    where nothing is gained. ``decode`` fills ``out``, and is False if the bytes do not give it."""

    def encode(self, payload: Payload) -> tuple[int, bytes | Payload]: ...
    def decode(self, flags: int, data: memoryview, out: Payload) -> bool: ...


class Framer:
    """Packs and checks the pages of one ``identity`` (a digest, such as Manifest.storage_digest).
    ``secret``: of --kv-store-secret-file; empty: the digest finds accidents only."""

    def __init__(self, identity: bytes, secret: bytes = b"", codec: Codec | None = None) -> None:
        self._identity, self._codec = identity[:16].ljust(16, b"\0"), codec
        self._mac_key = hashlib.blake2b(secret, person=b"radixlm-frame").digest() if secret else b""

    @staticmethod
    def max_bytes(payload_bytes: int) -> int:
        """Bytes of the longest frame of such a payload: none is stored longer than raw."""
        return HEADER_BYTES + payload_bytes

    def pack(self, key: bytes, payload: Payload, parent: bytes = NO_KEY) -> bytes:
        """A frame of ``payload``, uint8 [n], C-contiguous."""
        flags, body = (0, payload) if self._codec is None else self._codec.encode(payload)
        if not flags or len(body) >= len(payload):
            flags, body = 0, payload
        return self.seal(key, parent, len(payload), flags, body)

    def seal(
        self, key: bytes, parent: bytes, raw_bytes: int, flags: int, body: bytes | Payload
    ) -> bytes:
        """A frame of what a codec has encoded already, from a page of ``raw_bytes``."""
        if xxh3_128 is not None and not self._mac_key:
            flags |= _XXH3
        head = (_MAGIC, _VERSION, flags, self._identity, key, parent, raw_bytes, len(body))
        bare = _HEADER.pack(*head, b"")[:-_DIGEST_BYTES]
        data = memoryview(body)  # type: ignore[arg-type]
        return b"".join((bare, self._digest(flags, bare, data), data))

    def unpack(self, frame: bytes | memoryview | Payload, key: bytes, out: Payload) -> Fault:
        """Fill ``out`` from a frame that must be of ``key``; "" if it was, else what is wrong. The
        lengths are checked before anything is expanded: ``out`` says how many bytes there are."""
        fault, flags, body = self.verify(frame, key, len(out))
        if fault:
            return fault
        if flags & CODEC_BITS:
            code = flags & CODEC_BITS
            is_whole = self._codec is not None and self._codec.decode(code, body, out)
            return "" if is_whole else "damaged"
        if len(body) != len(out):
            return "damaged"
        out[:] = np.frombuffer(body, np.uint8)
        return ""

    def verify(
        self, frame: bytes | memoryview | Payload, key: bytes, raw_bytes: int
    ) -> tuple[Fault, int, memoryview]:
        """(what is wrong, flags, encoded bytes) of a frame that must be of ``key``."""
        view = memoryview(frame)  # type: ignore[arg-type]
        if len(view) < HEADER_BYTES:
            return "short", 0, view[:0]
        magic, version, flags, identity, its_key, _, raw, stored, digest = _HEADER.unpack(
            view[:HEADER_BYTES]
        )
        expected = (_MAGIC, _VERSION, self._identity, key, raw_bytes)
        if (magic, version, identity, its_key, raw) != expected:
            return "foreign", 0, view[:0]
        body = view[HEADER_BYTES : HEADER_BYTES + stored]
        if len(body) < stored:
            return "short", 0, view[:0]
        if flags & _XXH3 and (self._mac_key or xxh3_128 is None):  # anybody can compute it
            return "damaged", 0, view[:0]
        its_digest = self._digest(flags, view[: HEADER_BYTES - _DIGEST_BYTES], body)
        if stored > raw or not hmac.compare_digest(its_digest, digest):
            return "damaged", 0, view[:0]
        return "", flags, body

    def _digest(self, flags: int, head: bytes | memoryview, body: memoryview) -> bytes:
        if flags & _XXH3:
            fast = xxh3_128(head)
            fast.update(body)
            return fast.digest()
        digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES, key=self._mac_key)
        digest.update(body)
        return digest.digest()
