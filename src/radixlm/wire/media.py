"""Images, videos and audio clips of a prompt, as they travel from intake to the executor."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

# Token ids from here on stand for media in a prompt: two prompts share a cached prefix where their
# media are the same. No vocabulary reaches so far.
FIRST_MEDIA_ID = 1 << 30
# among a media's inputs: the rows themselves, float32 [1 + L, N, D], which no encoder need make
ROWS = "rows"
_DTYPES = ("float32", "float16", "int64", "int32", "uint8", "bool")


class Array(msgspec.Struct, frozen=True):
    """A numpy array: C order, little-endian. ValueError if the size does not fit the shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES or any(n < 0 for n in self.shape) or len(self.shape) > 8:
            raise ValueError(f"array of {self.dtype!r:.40}, shape {self.shape}")
        if len(self.data) != int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize:
            raise ValueError(f"{len(self.data)} bytes for {self.shape} of {self.dtype}")

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Array:
        """Double precision is sent as single."""
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return cls(str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())

    def read(self) -> np.ndarray[Any, Any]:
        """A view, read only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Media(msgspec.Struct, frozen=True):
    """One or several media that an encoder reads in one call.

    ``kind``: "image", "video" or "audio". ``spans``: (first place in the prompt, number of places)
    in order; together they are filled by the rows that the encoder makes of ``inputs``, the arrays
    that the checkpoint's processor has made. ``digest`` names the content.
    ``bidirectional_spans``: runs (first
    place, number of places) whose tokens see one another forwards too; a step computes a run whole.
    ``affects_earlier_tokens``: tokens before it depend on it: only a prompt with the same media
    may share
    its cache.
    """

    kind: str
    digest: bytes
    spans: tuple[tuple[int, int], ...]
    inputs: dict[str, Array]
    bidirectional_spans: tuple[tuple[int, int], ...] = ()
    affects_earlier_tokens: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("image", "video", "audio") or len(self.digest) != 32:
            raise ValueError(f"media of kind {self.kind!r:.40}, digest of {len(self.digest)} bytes")
        if any(start < 0 or count < 1 for start, count in (*self.spans, *self.bidirectional_spans)):
            raise ValueError("media with an empty span")

    @property
    def num_placeholders(self) -> int:
        """Places of the prompt."""
        return sum(count for _, count in self.spans)


def content_digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def media_ids(digest: bytes, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Ids of the places of one piece of content: eight that repeat, 240 bits of the digest."""
    words = np.frombuffer(digest, "<u4") % FIRST_MEDIA_ID + FIRST_MEDIA_ID
    return np.resize(words.astype(np.int32), count)


def plain_ids(ids: np.ndarray[Any, Any], stand_in: int = 0) -> np.ndarray[Any, Any]:
    """``ids`` with a token of the vocabulary instead of those that stand for media."""
    return np.where(ids >= FIRST_MEDIA_ID, stand_in, ids)
