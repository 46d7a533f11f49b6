"""The checkpoint's own processor: text with placeholders, and media -> token ids and arrays.

The processor of Hugging Face decides how many places an image takes and what its encoder reads.
Media are read one by one where that gives the same, so that each is cached by its content.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.spec import MODALITIES, Modality, MultimodalSpec
from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.base.record import Record
from radixlm.multimodal import image
from radixlm.multimodal.audio import Samples, read_audio
from radixlm.multimodal.canvas import Crop, canvas_ids
from radixlm.multimodal.checkpoint import load_image_processor, load_processor
from radixlm.multimodal.features import Features, shared_out, spread
from radixlm.multimodal.image import open_image
from radixlm.multimodal.positions import Grid, numbered_ids, rope_ids
from radixlm.multimodal.video import Video, read_frames, read_video
from radixlm.wire.media import ROWS, Array, Media, content_digest, media_ids

log = logging.getLogger(__name__)

MAX_PIXELS = 4 * image.MAX_PIXELS  # of all images of a prompt
VIDEO_FPS = 2.0  # frames a second that are looked at
DEFAULT_RATE = 16_000  # samples a second of a feature extractor that does not say
Ids = NDArray[np.int32]
# what a processor makes of the text
_OF_TEXT = frozenset(
    "input_ids attention_mask cross_attention_mask mm_token_type_ids token_type_ids labels"
    " moe_mm_token_type_ids".split()
)
_TYPE_OF_FRAMES = 2  # in mm_token_type_ids
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_TOKENS = {
    "image": ("image_placeholder_token", "image_token", "boi_token"),
    "video": ("video_token",),
    "audio": ("audio_token",),
}


class RawMedia(Record):
    """One piece of media as a client sent it: a file's bytes, or a video's frames, each a file; an
    audio clip may have been read already (``MediaProcessor.read_audio``)."""

    kind: Modality
    data: bytes | tuple[bytes, ...] | Samples
    where: str


class Prompt(Record):
    """Token ids with ids of ``wire/media.py`` in the places of media; ``plain`` has the
    checkpoint's placeholder there. ``rope_ids``: int32 [3, T] for a rope with sections."""

    ids: Ids
    plain: Ids
    media: tuple[Media, ...]
    rope_ids: Ids | None

    def packed_rope_ids(self) -> bytes | None:
        """As they travel."""
        return None if self.rope_ids is None else self.rope_ids.astype("<i4").tobytes()


class _Piece(Record):
    """Media as the processor reads it."""

    kind: Modality
    value: Any

    @property
    def num_pixels(self) -> int:
        """Of an image; videos have a limit of their own."""
        return int(self.value.width * self.value.height) if self.kind == "image" else 0


class MediaProcessor:
    """One checkpoint's processor. Thread-safe: one prompt at a time."""

    def __init__(self, folder: Path, spec: MultimodalSpec, has_sections: bool) -> None:
        """``has_sections``: whether the model's ropes turn by time, row and column."""
        self._merge = spec.spatial_merge_size if has_sections else 0
        self._folder, self._spec = folder, spec
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Load the processor; what is wrong with it is said by the first request that needs it."""
        try:
            self.load()
        except RadixError as error:
            log.warning("%s", error)

    def load(self) -> None:
        """Load the processor, once. CheckpointError or ConfigError if that cannot be."""
        with self._lock:
            _ = self._processor

    @property
    def kinds(self) -> tuple[Modality, ...]:
        """What the checkpoint has tokens for."""
        named = tuple(
            k
            for k in MODALITIES
            if k in self._spec.tokens or (k == "video" and self._spec.video == "images")
        )
        return named or (("image", "video") if self._spec.video == "processor" else ("image",))

    @property
    def embeds_images(self) -> bool:
        """Whether an image is read by ``read_vector``."""
        return self._spec.embeds_images

    def token(self, kind: Modality) -> str:
        """The text that stands for a piece of media in a prompt."""
        processor = self._processor
        for name in _TOKENS[kind]:
            token = getattr(processor, name, None)
            if isinstance(token, str):
                return token
        return str(processor.tokenizer.convert_ids_to_tokens(self._ids[kind]))

    @cached_property
    def _processor(self) -> Any:
        if self._spec.embeds_images:
            return load_image_processor(self._folder)
        return load_processor(self._folder)

    @cached_property
    def _ids(self) -> dict[Modality, int | None]:
        """Each kind's id in the places of a prompt."""
        found = ((kind, self._spec.tokens.get(kind)) for kind in MODALITIES)
        processor = self._processor
        return {
            kind: getattr(processor, f"{kind}_token_id", None) if token is None else token
            for kind, token in found
        }

    def read(
        self,
        text: str,
        given: Sequence[RawMedia],
        add_special_tokens: bool,
        where: str = "messages",
    ) -> Prompt:
        """The prompt of ``text``, which names its media in order by their placeholders.

        InvalidRequest for what cannot be read, and where text and media do not fit."""
        left, pieces = MAX_PIXELS, []
        for one in given:
            pieces.append(self._piece(one))
            left -= pieces[-1].num_pixels
            if left < 0:
                raise InvalidRequest(f"{one.where}: more than {MAX_PIXELS} pixels in all", where)
        with self._lock:
            made = self._call(text, pieces, add_special_tokens, where)
            ids = made["input_ids"].reshape(-1).astype(np.int32)
            media = self._media(made, self._in_order(text, pieces), ids, where)
        return self._prompt(ids, media)

    def read_features(
        self, prompt: str | Sequence[int], given: Sequence[Features], add_special_tokens: bool
    ) -> Prompt:
        """The prompt of a text or of token ids with a placeholder for each row of ``given``, or for
        each image. InvalidRequest where the two do not fit."""
        if isinstance(prompt, str):
            tokenizer = self._processor.tokenizer
            with self._lock:
                prompt = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        ids = np.asarray(prompt, np.int32)
        media: list[Media] = []
        for kind in MODALITIES:
            own = [one for one in given if one.kind == kind]
            places = self._places({"input_ids": ids}, kind) if own else np.zeros(0, np.int64)
            if own:
                self._check_features(own)
                ids, places = spread(ids, places, own)
            at = 0
            for one, count in shared_out(own, places) if own else ():
                if not count:
                    raise InvalidRequest(f"{one.where}: the prompt has no place for it", one.where)
                made = dict(one.arrays)
                if one.rows is not None:
                    made[ROWS] = one.rows.copy()
                    made[ROWS][0] *= self._spec.embed_scale
                media.append(self._one(kind, made, places[at : at + count], ids))
                at += count
        return self._prompt(ids, tuple(sorted(media, key=lambda one: one.spans[0])))

    def _check_features(self, given: Sequence[Features]) -> None:
        for one in given:
            if one.rows is not None and self._spec.uses_cross_attention:
                message = f"{one.where}: this model attends to images; send a processor's output"
                raise InvalidRequest(message, one.where)
            name = self._size_name(one.kind)
            if self._merge and one.kind != "audio" and name not in one.arrays:
                raise InvalidRequest(f"{one.where}: this model needs {name} besides", one.where)

    def _size_name(self, kind: str) -> str:
        """What a processor calls the sizes of images or videos."""
        if not self._spec.canvas:
            return f"{kind}_grid_thw"
        return "target_sizes_videos" if kind == "video" else "target_sizes"

    def read_vector(self, given: RawMedia) -> Prompt:
        """The prompt of an image that its encoder makes a vector of: one place."""
        image = self._piece(given).value
        with self._lock:
            try:
                made = self._processor(images=[image], return_tensors="np")
            except (ValueError, IndexError, TypeError, KeyError) as error:
                message = f"{given.where}: cannot be read here: {error}"
                raise InvalidRequest(message, given.where) from None
        ids, places = np.zeros(1, np.int32), np.zeros(1, np.int64)
        pixels = {"pixel_values": _array(made["pixel_values"])}
        return self._prompt(ids, (self._one("image", pixels, places, ids),))

    def text_of(self, ids: Sequence[int]) -> str:
        """Token ids as the text that they are of."""
        return str(self._processor.tokenizer.decode(list(ids)))

    def _prompt(self, ids: Ids, media: tuple[Media, ...]) -> Prompt:
        """With ids of the content in the places of media."""
        rule = self._spec.bidirectional
        most = self._spec.max_image_tokens
        large = next((one for one in media if most and one.num_placeholders > most), None)
        if large is not None:
            message = f"a {large.kind} has {large.num_placeholders} places, this model takes {most}"
            raise InvalidRequest(f"messages: {message}", "messages")
        media = _mutual(media, len(ids), rule)
        if self._spec.uses_cross_attention and media and media[0].spans[0][0]:
            media = tuple(
                msgspec.structs.replace(one, affects_earlier_tokens=True) for one in media
            )
        # where a whole prompt sees itself, nothing but the same prompt may share its cache
        seal = b"".join((ids.tobytes(), *(one.digest for one in media)))
        plain, ids = ids, ids.copy()
        for one in media:
            at = 0
            name = content_digest(one.digest, seal) if rule == "prompt" else one.digest
            keys = media_ids(name, one.num_placeholders)
            for start, count in one.spans:
                ids[start : start + count] = keys[at : at + count]
                at += count
        turns = self._turns(plain, media) if self._merge and media else None
        return Prompt(ids, plain, media, turns)

    @property
    def rate(self) -> int:
        """Samples a second of what the model hears."""
        hearing = getattr(self._processor, "feature_extractor", None)
        return int(getattr(hearing, "sampling_rate", None) or DEFAULT_RATE)

    @property
    def window_s(self) -> float | None:
        """The longest audio that is heard at once; None: as long as the context allows."""
        found: float | None = getattr(self._processor, "window_s", None)
        return found

    def read_audio(self, data: bytes, where: str) -> Samples:
        """A file as the model hears it; InvalidRequest."""
        return read_audio(data, self.rate, where)

    def _piece(self, given: RawMedia) -> _Piece:
        where, data = given.where, given.data
        if given.kind == "image":
            assert isinstance(data, bytes)
            return _Piece("image", open_image(data, where))
        if given.kind == "audio":
            assert not isinstance(data, tuple)
            return _Piece(
                "audio", self.read_audio(data, where) if isinstance(data, bytes) else data
            )
        assert not isinstance(data, np.ndarray)
        if isinstance(data, bytes):
            return _Piece("video", read_video(data, VIDEO_FPS, where))
        return _Piece("video", read_frames(data, VIDEO_FPS, where))

    def _call(
        self, text: str, pieces: Sequence[_Piece], add_special_tokens: bool, where: str
    ) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if self._spec.single_image and len(pieces) > 1:
            raise InvalidRequest(f"{where}: this model reads one image a prompt", where)
        if self._spec.image_first:
            text = text.replace(self.token("image"), "")
        for piece in pieces:
            value = piece.value.frames if piece.kind == "video" else piece.value
            given.setdefault(_ARGUMENTS[piece.kind], []).append(value)
        videos = [piece.value for piece in pieces if piece.kind == "video"]
        if videos:
            given["video_metadata"] = [_metadata(video) for video in videos]
            given |= {"do_sample_frames": False, "return_metadata": True}
        if "image" in self.kinds:
            given.setdefault("images", None)
        given |= {"text": [text], "add_special_tokens": add_special_tokens}
        try:
            try:
                made = self._processor(return_tensors="np", **given)
            except (ValueError, AttributeError, TypeError) as error:
                if isinstance(error, ValueError) and "ScalarType" not in str(error):
                    raise  # numpy has no bfloat16, and some processors ask tensors of it
                made = self._processor(return_tensors="pt", **given)
        except ImportError as error:
            raise InvalidRequest(f"{where}: cannot be read here: {error}", where) from None
        except (ValueError, IndexError, TypeError, KeyError, StopIteration) as error:
            raise InvalidRequest(f"{where}: text and media do not fit: {error}", where) from None
        return {name: _array(value) for name, value in made.items()}

    def _media(
        self, made: dict[str, Any], pieces: Sequence[_Piece], ids: Ids, where: str
    ) -> tuple[Media, ...]:
        """One media a piece if each alone gives as many places, else one of all of a kind."""
        kinds = [kind for kind in MODALITIES if any(piece.kind == kind for piece in pieces)]
        kinds = ["image"] if self._spec.video == "images" else kinds
        media: list[Media] = []
        for kind in kinds if pieces else ():
            places = self._places(made, kind)
            if not len(places):
                raise InvalidRequest(f"{where}: the text has no place for its {kind}", where)
            own = [p for p in pieces if p.kind == kind or self._spec.video == "images"]
            parts, counts = [made], [len(places)]
            if len(pieces) > 1:
                alone = [self._call(self._alone(p.kind), [p], False, where) for p in own]
                sizes = [len(self._places(part, kind)) for part in alone]
                if sum(sizes) == len(places) and 0 not in sizes:
                    parts, counts = alone, sizes
            bounds = np.cumsum([0, *counts])
            for part, first, last in zip(parts, bounds, bounds[1:], strict=False):
                media.append(self._one(kind, part, places[first:last], ids))
        return tuple(sorted(media, key=lambda one: one.spans[0]))

    def _alone(self, kind: Modality) -> str:
        """The text of a single piece."""
        text = self.token(kind)
        if self._spec.rope_by_image_index:  # which its processor takes between marks only
            text = text.join((self._processor.image_start_token, self._processor.image_end_token))
        return text

    def _in_order(self, text: str, pieces: Sequence[_Piece]) -> Sequence[_Piece]:
        """Images and videos as the text names them, where both make the same places."""
        if self._spec.video != "images" or len({piece.kind for piece in pieces}) < 2:
            return pieces
        kind_of: dict[str, Modality] = {self.token("image"): "image", self.token("video"): "video"}
        named = [kind_of[one] for one in re.findall("|".join(map(re.escape, kind_of)), text)]
        left = {kind: iter([p for p in pieces if p.kind == kind]) for kind in kind_of.values()}
        return [piece for kind in named for piece in [next(left[kind], None)] if piece is not None]

    def _places(self, made: dict[str, Any], kind: Modality) -> NDArray[np.int64]:
        """Where the encoder's rows go."""
        wanted = [self._ids[kind], *self._spec.visual_indicator_tokens]
        if self._spec.adds_to_embeddings:
            wanted = self._processor.image_token_ids
        ids = made["input_ids"].reshape(-1)
        found = np.isin(ids, [token for token in wanted if token is not None])
        if "mm_token_type_ids" in made and kind != "audio":  # frames may bear an image's id
            is_frame = made["mm_token_type_ids"].reshape(-1) == _TYPE_OF_FRAMES
            found = is_frame if kind == "video" else found & ~is_frame
        return np.flatnonzero(found)

    def _one(
        self, kind: Modality, made: dict[str, Any], places: NDArray[np.int64], ids: Ids
    ) -> Media:
        inputs = {
            name: Array.of(value)
            for name, value in sorted(made.items())
            if name not in _OF_TEXT and value.dtype.kind not in "OUS"
        }
        if self._spec.encoder == "class_forward" or self._spec.needs_token_ids:
            inputs["input_ids"] = Array.of(ids[places].astype(np.int64)[None])
        parts = [
            p for name, a in inputs.items() for p in (name.encode(), repr(a.shape).encode(), a.data)
        ]
        return Media(kind, content_digest(kind.encode(), *parts), _spans(places), inputs)

    def _turns(self, ids: Ids, media: tuple[Media, ...]) -> Ids:
        """int32 [3, T]: what a rope with sections turns by."""
        canvas = self._spec.canvas
        if self._spec.rope_by_image_index:
            return numbered_ids(len(ids), (g for one in media for g in _rows(one, self._merge)))
        if canvas is None:
            return rope_ids(len(ids), self._grids(media))
        crops = []
        for one in media:
            sizes = one.inputs[self._size_name(one.kind)].read().reshape(-1, 2).tolist()
            if len(sizes) != len(one.spans):
                message = f"{len(sizes)} crops of an image for {len(one.spans)} runs of places"
                raise InvalidRequest(f"messages: {message}", "messages")
            for (start, count), (rows, columns) in zip(one.spans, sizes, strict=True):
                size = (rows // canvas.merge, columns // canvas.merge)
                if size[0] * size[1] != count:
                    message = f"{count} places for a crop of {size[0]} x {size[1]}"
                    raise InvalidRequest(f"messages: {message}", "messages")
                crops.append(Crop(start, start + count, size))
        return canvas_ids(ids, crops, canvas)

    def _grids(self, media: tuple[Media, ...]) -> list[Grid]:
        """Each image's first place and its grid of places."""
        rate = self._spec.tokens_per_second
        return [grid for one in media for grid in _boxes(one, self._merge, rate)]


def _boxes(media: Media, merge: int, rate: float) -> Iterator[Grid]:
    """A box for each image and video; for each frame of videos whose frames stand apart."""
    held = media.inputs.get(f"{media.kind}_grid_thw")
    places = [place for start, count in media.spans for place in range(start, start + count)]
    seconds = media.inputs.get("second_per_grid_ts")
    steps = (seconds.read().reshape(-1) * rate).tolist() if seconds is not None and rate else []
    at = 0
    grids = held.read().reshape(-1, 3).tolist() if held is not None else []
    for index, (times, rows, columns) in enumerate(grids):
        size = rows * columns // merge**2
        apart = places[at + times * size - 1] - places[at] != times * size - 1
        step = steps[index] if index < len(steps) else 1.0
        for _ in range(times if apart else 1):
            yield Grid(places[at], 1 if apart else times, rows // merge, columns // merge, step)
            at += size if apart else times * size


def _rows(media: Media, merge: int) -> Iterator[Grid]:
    """Each image's places without the mark before and the one behind; a mark ends each row."""
    grids = media.inputs["image_grid_thw"].read().reshape(-1, 3).tolist()
    for (start, _), (_, rows, columns) in zip(media.spans, grids, strict=True):
        yield Grid(start + 1, 1, rows // merge, columns // merge + 1)


def _array(value: Any) -> NDArray[Any]:
    """Of an array, a list or a tensor of torch."""
    if hasattr(value, "is_floating_point") and value.is_floating_point():
        value = value.float()
    return np.asarray(value)


def _metadata(video: Video) -> dict[str, Any]:
    """What a processor wants to know of frames that are sampled already."""
    count = len(video.frames)
    return {
        "total_num_frames": count,
        "fps": video.fps,
        "duration": count / video.fps,
        "frames_indices": list(range(count)),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }


def _mutual(media: tuple[Media, ...], num_tokens: int, rule: str) -> tuple[Media, ...]:
    """With the places that see one another forwards: each image's own, or the whole prompt's,
    which the first media names."""
    replace = msgspec.structs.replace
    if rule == "image":
        return tuple(
            one if one.kind == "audio" else replace(one, bidirectional_spans=one.spans)
            for one in media
        )
    if rule == "prompt" and media:
        return (replace(media[0], bidirectional_spans=((0, num_tokens),)), *media[1:])
    return media


def _spans(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Runs of neighbouring places."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), len(run)) for run in np.split(places, cuts))
