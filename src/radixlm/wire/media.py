"""Images, video and audio of a prompt, as they are sent from the HTTP process to the engine."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

# Token ids from here on stand for media in a prompt, so that two prompts share a cached prefix only
# where their media are equal. No vocabulary is that large.
FIRST_MEDIA_ID = 1 << 30
# key of a media's inputs for encoder output that the client sent: float32 [1 + L, N, D]
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
        """float64 is sent as float32."""
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return cls(str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())

    def read(self) -> np.ndarray[Any, Any]:
        """A read-only view."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Media(msgspec.Struct, frozen=True):
    """One or several media that an encoder reads in one call."""

    # "image", "video" or "audio"
    kind: str
    # SHA-256 of the content
    digest: bytes
    # placeholders in the prompt as (first, count), in order, which the encoder's output fills
    spans: tuple[tuple[int, int], ...]
    # what the checkpoint's processor made
    inputs: dict[str, Array]
    # runs (first, count) of tokens that attend to each other both ways; a step computes a run whole
    bidirectional_spans: tuple[tuple[int, int], ...] = ()
    # tokens of such a run see all of it in layers with a sliding window too; it starts the prompt
    spans_ignore_window: bool = False
    # tokens before the media attend to it: only a prompt with the same media may share their cache
    affects_earlier_tokens: bool = False
    # the client sent the arrays: where the encoder cannot read them, they are its fault
    is_preprocessed: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("image", "video", "audio") or len(self.digest) != 32:
            raise ValueError(f"media of kind {self.kind!r:.40}, digest of {len(self.digest)} bytes")
        if any(start < 0 or count < 1 for start, count in (*self.spans, *self.bidirectional_spans)):
            raise ValueError("media with an empty span")

    @property
    def num_placeholders(self) -> int:
        """Placeholders in the prompt."""
        return sum(count for _, count in self.spans)


def content_digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def of_tenant(media: tuple[Media, ...], tenant: str | None) -> tuple[Media, ...]:
    """``media`` with digests of their own for each tenant, who share no encoder outputs then."""
    if tenant is None:
        return media
    salt = tenant.encode()
    return tuple(
        msgspec.structs.replace(one, digest=content_digest(salt, one.digest)) for one in media
    )


def media_ids(digest: bytes, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """``count`` ids for a content's placeholders: eight that repeat, 240 bits of the digest."""
    words = np.frombuffer(digest, "<u4") % FIRST_MEDIA_ID + FIRST_MEDIA_ID
    return np.resize(words.astype(np.int32), count)


def plain_ids(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``ids`` with 0 in place of those that stand for media."""
    return np.where(ids >= FIRST_MEDIA_ID, 0, ids)
