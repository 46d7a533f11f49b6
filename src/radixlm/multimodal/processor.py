"""The checkpoint's own processor: text with placeholders and pictures -> token ids and arrays.

The processor of Hugging Face decides how many places a picture takes and what its tower reads.
Pictures are read one by one where that gives the same, so that each is cached by its content.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.arch.families.composite import MediaFacts
from radixlm.base.errors import ConfigError, InvalidRequest, RadixError
from radixlm.multimodal.checkpoint import load_processor
from radixlm.multimodal.positions import Grid, rope_ids
from radixlm.wire.media import Array, Media, content_digest, media_ids

log = logging.getLogger(__name__)

MAX_PIXELS = 64 << 20  # of one picture: a few bytes may unpack to gigabytes
Ids = NDArray[np.int32]
# what a processor makes of the text
_OF_TEXT = frozenset("input_ids attention_mask mm_token_type_ids token_type_ids labels".split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with ids of ``wire/media.py`` in the places of media; ``plain`` has the
    checkpoint's placeholder there. ``rope_ids``: int32 [3, T] for a rope with sections."""

    ids: Ids
    plain: Ids
    media: tuple[Media, ...]
    rope_ids: Ids | None

    def packed_rope_ids(self) -> bytes | None:
        """As they travel."""
        return None if self.rope_ids is None else self.rope_ids.astype("<i4").tobytes()


class MediaProcessor:
    """One checkpoint's processor. Thread-safe: one prompt at a time."""

    def __init__(self, folder: Path, facts: MediaFacts, has_sections: bool) -> None:
        """``has_sections``: whether the model's ropes turn by time, row and column."""
        self._image_id = facts.tokens.get("image")
        self._merge = facts.merge if has_sections else 0
        self._folder, self._mutual = folder, facts.mutual
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Load the processor; what is wrong with it is said by the first request that needs it."""
        with self._lock:
            try:
                _ = self._processor
            except RadixError as error:
                log.warning("%s", error)

    @property
    def image_token(self) -> str:
        """The text that stands for a picture in a prompt."""
        processor = self._processor
        for name in ("image_token", "boi_token"):
            token = getattr(processor, name, None)
            if isinstance(token, str):
                return token
        return str(processor.tokenizer.convert_ids_to_tokens(self._image_id))

    @cached_property
    def _processor(self) -> Any:
        processor = load_processor(self._folder)
        if self._image_id is None:
            self._image_id = getattr(processor, "image_token_id", None)
        return processor

    def read(
        self, text: str, images: Sequence[bytes], add_special_tokens: bool, where: str = "messages"
    ) -> Prompt:
        """The prompt of ``text``, which names its pictures in order by the placeholder.

        InvalidRequest for what is no picture, and where text and pictures do not fit."""
        pictures = [_open(data, f"{where}: picture {i}") for i, data in enumerate(images)]
        with self._lock:
            made = self._call(text, pictures, add_special_tokens, where)
            ids = np.asarray(made["input_ids"]).reshape(-1).astype(np.int32)
            places = np.flatnonzero(ids == self._image_id)
            media = self._media(made, pictures, places, where)
        media = _mutual(media, len(ids), self._mutual)
        # where a whole prompt sees itself, nothing but the same prompt may share its cache
        seal = b"".join((ids.tobytes(), *(one.digest for one in media)))
        plain, ids = ids, ids.copy()
        for one in media:
            at = 0
            name = content_digest(one.digest, seal) if self._mutual == "prompt" else one.digest
            keys = media_ids(name, one.num_places)
            for start, count in one.spans:
                ids[start : start + count] = keys[at : at + count]
                at += count
        turns = rope_ids(len(ids), self._grids(media)) if self._merge and media else None
        return Prompt(ids, plain, media, turns)

    def _call(
        self, text: str, pictures: list[Any], add_special_tokens: bool, where: str
    ) -> dict[str, Any]:
        try:
            made = self._processor(
                text=[text],
                images=pictures or None,
                add_special_tokens=add_special_tokens,
                return_tensors="np",
            )
        except (ValueError, IndexError, TypeError, KeyError, StopIteration) as error:
            raise InvalidRequest(f"{where}: text and pictures do not fit: {error}", where) from None
        return dict(made)

    def _media(
        self, made: dict[str, Any], pictures: list[Any], places: NDArray[np.int64], where: str
    ) -> tuple[Media, ...]:
        """One media a picture if each alone gives as many places, else one of all."""
        if not pictures:
            return ()
        if not len(places):
            raise InvalidRequest(f"{where}: the text has no place for its pictures", where)
        parts, counts = [made], [len(places)]
        if len(pictures) > 1:
            token = self.image_token
            alone = [self._call(token, [one], False, where) for one in pictures]
            sizes = [int(np.sum(np.asarray(p["input_ids"]) == self._image_id)) for p in alone]
            if sum(sizes) == len(places) and 0 not in sizes:
                parts, counts = alone, sizes
        bounds = np.cumsum([0, *counts])
        return tuple(_one(part, places[bounds[i] : bounds[i + 1]]) for i, part in enumerate(parts))

    def _grids(self, media: tuple[Media, ...]) -> list[Grid]:
        """Each picture's first place and its grid of places."""
        grids = []
        for one in media:
            held = one.inputs.get("image_grid_thw")
            rows = held.read().reshape(-1, 3).tolist() if held is not None else []
            starts = iter(_starts(one, rows, self._merge))
            grids += [Grid(next(starts), t, h // self._merge, w // self._merge) for t, h, w in rows]
        return grids


def _mutual(media: tuple[Media, ...], num_tokens: int, rule: str) -> tuple[Media, ...]:
    """With the places that see one another forwards: each picture's own, or the whole prompt's,
    which the first media names."""
    replace = msgspec.structs.replace
    if rule == "media":
        return tuple(replace(one, mutual=one.spans) for one in media)
    if rule == "prompt" and media:
        return (replace(media[0], mutual=((0, num_tokens),)), *media[1:])
    return media


def _starts(media: Media, rows: list[list[int]], merge: int) -> list[int]:
    """Where each grid of a media begins."""
    places = [place for start, count in media.spans for place in range(start, start + count)]
    starts, at = [], 0
    for t, h, w in rows:
        starts.append(places[at])
        at += t * h * w // merge**2
    return starts


def _one(made: dict[str, Any], places: NDArray[np.int64]) -> Media:
    inputs = {
        name: Array.of(np.asarray(value))
        for name, value in sorted(made.items())
        if name not in _OF_TEXT and np.asarray(value).dtype != object
    }
    parts = [
        p for name, a in inputs.items() for p in (name.encode(), repr(a.shape).encode(), a.data)
    ]
    return Media("image", content_digest(*parts), _spans(places), inputs)


def _spans(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Runs of neighbouring places."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), len(run)) for run in np.split(places, cuts))


def _open(data: bytes, where: str) -> Any:
    """A picture in RGB, upright; InvalidRequest for what is none or too large."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError("pictures need Pillow: install it") from None
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequest(
                f"{where} has {image.width} x {image.height} pixels, at most {MAX_PIXELS}", where
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise InvalidRequest(f"{where} is no picture that can be read", where) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"{where} cannot be read: {error}", where) from None
