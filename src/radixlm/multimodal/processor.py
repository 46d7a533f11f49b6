"""Runs the checkpoint's processor: text with placeholders and media -> token ids and arrays.

The Hugging Face processor decides how many placeholder tokens an image has and what the encoder
reads. Media are processed one by one where that gives the same result, so that each is cached by
its content.
"""

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.spec import MODALITIES, Modality, MultimodalSpec
from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.base.record import Record
from radixlm.multimodal import image, positions
from radixlm.multimodal.audio import Samples, read_audio
from radixlm.multimodal.canvas import Crop, canvas_ids
from radixlm.multimodal.checkpoint import load_image_processor, load_processor
from radixlm.multimodal.features import Features, shared_out, spread
from radixlm.multimodal.image import open_image
from radixlm.multimodal.options import bound_pixels, checked_options, limit_pixels
from radixlm.multimodal.video import MAX_FRAMES, read_frames, read_video
from radixlm.wire.media import ROWS, Array, Media, content_digest, media_ids

log = logging.getLogger(__name__)

MAX_PIXELS = 4 * image.MAX_PIXELS  # of all images of a prompt
VIDEO_FPS = 2.0  # frames sampled a second
DEFAULT_RATE = 16_000  # samples a second, for a feature extractor that does not say
Ids = NDArray[np.int32]
# outputs of a processor that are about the text
_TEXT_OUTPUTS = frozenset(
    "input_ids attention_mask cross_attention_mask mm_token_type_ids token_type_ids labels"
    " moe_mm_token_type_ids".split()
)
_TYPE_OF_FRAMES = 2  # in mm_token_type_ids
# what a processor raises for input that it cannot read
_PROCESSOR_ERRORS = (ValueError, IndexError, TypeError, KeyError, StopIteration, RuntimeError)
_TENSORS = "ScalarType|return_tensors='pt'"  # in errors of those that make no arrays
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_TOKENS = {
    "image": ("image_placeholder_token", "image_token", "boi_token"),
    "video": ("video_token",),
    "audio": ("audio_token",),
}


class RawMedia(Record):
    """One piece of media as a client sent it."""

    kind: Modality
    # a file's bytes; a video's frames, each a file; or audio that ``read_audio`` has decoded
    data: bytes | tuple[bytes, ...] | Samples
    # the request's field, for error messages
    where: str
    # ``mm_processor_kwargs`` of the request
    options: Mapping[str, Any] | None = None


class Prompt(Record):
    # token ids; in place of placeholders, ids made of the content (``wire/media.py``)
    ids: Ids
    # the same with the checkpoint's placeholder tokens
    plain: Ids
    media: tuple[Media, ...]
    # int32 [3, T], for M-RoPE
    rope_ids: Ids | None

    def packed_rope_ids(self) -> bytes | None:
        """As they are sent to the engine."""
        return None if self.rope_ids is None else self.rope_ids.astype("<i4").tobytes()


class _Piece(Record):
    """One decoded piece: an image of Pillow, a ``Video``, or samples."""

    kind: Modality
    value: Any

    @property
    def num_pixels(self) -> int:
        """Of an image; videos have a limit of their own."""
        return int(self.value.width * self.value.height) if self.kind == "image" else 0


class MediaProcessor:
    """The processor of one checkpoint. Thread-safe: it handles one prompt at a time."""

    def __init__(
        self,
        folder: Path,
        spec: MultimodalSpec,
        has_sections: bool,
        on_pillow: bool = False,
        processing: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """``has_sections``: the model uses M-RoPE. ``on_pillow``: see ``load_processor``.
        ``processing``: the server's options of each modality (``--mm-process-config``)."""
        of_videos = processing.get("video", {})
        self._processing = processing
        self._fps = float(of_videos.get("fps", VIDEO_FPS))
        self._max_frames = int(of_videos.get("max_frames", MAX_FRAMES))
        self._on_pillow = on_pillow
        self._merge = spec.spatial_merge_size if has_sections else 0
        self._folder, self._spec = folder, spec
        self._lock = threading.Lock()
        self._options: dict[str, int] = {}  # of the prompt that is read

    def warm(self) -> None:
        """Load the processor; errors are logged, and raised by the first request that needs it."""
        try:
            self.load()
        except RadixError as error:
            log.warning("%s", error)

    def load(self) -> None:
        """Load the processor, once. CheckpointError or ConfigError if that fails."""
        with self._lock:
            _ = self._processor

    @property
    def is_loaded(self) -> bool:
        """Whether ``load`` has been done."""
        return "_processor" in vars(self)

    @property
    def kinds(self) -> tuple[Modality, ...]:
        """The modalities that prompts may have."""
        video = self._spec.video
        tokens = self._spec.tokens
        named = tuple(k for k in MODALITIES if k in tokens or (k == "video" and video == "images"))
        return named or (("image", "video") if video == "processor" else ("image",))

    @property
    def embeds_images(self) -> bool:
        """Whether ``read_vector`` processes images."""
        return self._spec.embeds_images

    def token(self, kind: Modality) -> str:
        """The placeholder of a piece of media in a text."""
        processor = self._processor
        for name in _TOKENS[kind]:
            token = getattr(processor, name, None)
            if isinstance(token, str):
                return token
        return str(processor.tokenizer.convert_ids_to_tokens(self._ids[kind]))

    @cached_property
    def _processor(self) -> Any:
        load = load_image_processor if self._spec.embeds_images else load_processor
        processor = load(self._folder, self._on_pillow)
        bound_pixels(processor, self._processing)
        limit_pixels(processor)
        return processor

    @cached_property
    def _ids(self) -> dict[Modality, int | None]:
        """The id of each modality's placeholder token."""
        listed = ((kind, self._spec.tokens.get(kind)) for kind in MODALITIES)
        processor = self._processor
        return {
            kind: getattr(processor, f"{kind}_token_id", None) if token is None else token
            for kind, token in listed
        }

    def read(
        self,
        text: str,
        media: Sequence[RawMedia],
        add_special_tokens: bool,
        where: str = "messages",
    ) -> Prompt:
        """The prompt of ``text``, whose placeholders stand for ``media`` in order.

        InvalidRequest for media that cannot be read, and where text and media do not fit."""
        pixels_left, pieces = MAX_PIXELS, []
        for one in media:
            pieces.append(self._decode(one))
            pixels_left -= pieces[-1].num_pixels
            if pixels_left < 0:
                raise InvalidRequest(f"{one.where}: more than {MAX_PIXELS} pixels in all", where)
        options = next((one.options for one in media if one.options), None)
        with self._lock:
            self._options = checked_options(self._processor, options)
            outputs = self._call(text, pieces, add_special_tokens, where)
            ids = outputs["input_ids"].reshape(-1).astype(np.int32)
            processed = self._media(outputs, self._in_order(text, pieces), ids, where)
        return self._prompt(ids, processed)

    def read_features(
        self, prompt: str | Sequence[int], features: Sequence[Features], add_special_tokens: bool
    ) -> Prompt:
        """The prompt of a text or of token ids, with a placeholder for each embedding of
        ``features`` or for each image. InvalidRequest where the two do not fit."""
        if isinstance(prompt, str):
            tokenizer = self._processor.tokenizer
            with self._lock:
                prompt = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        ids = np.asarray(prompt, np.int32)
        media: list[Media] = []
        for kind in MODALITIES:
            of_kind = [one for one in features if one.kind == kind]
            if not of_kind:
                continue
            places = self._placeholders({"input_ids": ids}, kind)
            self._check_features(of_kind)
            ids, places = spread(ids, places, of_kind)
            at = 0
            for one, count in shared_out(of_kind, places):
                if not count:
                    raise InvalidRequest(
                        f"{one.where}: the prompt has no placeholder for it", one.where
                    )
                arrays = dict(one.arrays)
                if one.rows is not None:
                    arrays[ROWS] = one.rows.copy()
                    arrays[ROWS][0] *= self._spec.embed_scale
                one_media = self._one(kind, arrays, places[at : at + count], ids)
                media.append(msgspec.structs.replace(one_media, is_preprocessed=True))
                at += count
        return self._prompt(ids, tuple(sorted(media, key=lambda one: one.spans[0])))

    def _check_features(self, features: Sequence[Features]) -> None:
        for one in features:
            if one.rows is not None and self._spec.uses_cross_attention:
                message = f"{one.where}: this model attends to images; send a processor's output"
                raise InvalidRequest(message, one.where)
            name = self._size_name(one.kind)
            if self._merge and one.kind != "audio" and name not in one.arrays:
                raise InvalidRequest(f"{one.where}: this model needs {name} besides", one.where)

    def _size_name(self, kind: str) -> str:
        """The processor's name for the sizes of images or videos."""
        if not self._spec.canvas:
            return f"{kind}_grid_thw"
        return "target_sizes_videos" if kind == "video" else "target_sizes"

    def read_vector(self, media: RawMedia) -> Prompt:
        """The prompt of an image that the encoder alone embeds: one placeholder."""
        image = self._decode(media).value
        with self._lock:
            try:
                outputs = self._processor(images=[image], return_tensors="np")
            except _PROCESSOR_ERRORS as error:
                why = _reason(error) or "this model's processor cannot read it"
                message = f"{media.where}: cannot be read here: {why}"
                raise InvalidRequest(message, media.where) from None
        ids, places = np.zeros(1, np.int32), np.zeros(1, np.int64)
        arrays = {name: _array(value) for name, value in outputs.items()}
        return self._prompt(ids, (self._one("image", arrays, places, ids),))

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._processor.tokenizer.decode(list(ids)))

    def _prompt(self, ids: Ids, media: tuple[Media, ...]) -> Prompt:
        """With ids of the content in place of placeholders."""
        rule, limit = self._spec.bidirectional, self._spec.max_image_tokens
        large = next((one for one in media if limit and one.num_placeholders > limit), None)
        if large is not None:
            size = large.num_placeholders
            message = f"a {large.kind} has {size} placeholders, this model takes {limit}"
            raise InvalidRequest(f"messages: {message}", "messages")
        media = _with_bidirectional_spans(media, len(ids), rule)
        if self._spec.uses_cross_attention and media and media[0].spans[0][0]:
            replace = msgspec.structs.replace
            media = tuple(replace(one, affects_earlier_tokens=True) for one in media)
        # every token of a bidirectional prompt depends on all of it: only the same prompt may
        # share its cache
        whole = b"".join((ids.tobytes(), *(one.digest for one in media)))
        plain, ids = ids, ids.copy()
        for one in media:
            at = 0
            name = content_digest(one.digest, whole) if rule == "prompt" else one.digest
            keys = media_ids(name, one.num_placeholders)
            for start, count in one.spans:
                ids[start : start + count] = keys[at : at + count]
                at += count
        return Prompt(ids, plain, media, self._rope_ids(plain, media) if media else None)

    @property
    def rate(self) -> int:
        """Samples a second that the model reads."""
        extractor = getattr(self._processor, "feature_extractor", None)
        return int(getattr(extractor, "sampling_rate", None) or DEFAULT_RATE)

    @property
    def window_s(self) -> float | None:
        """The longest audio clip that the encoder reads at once; None: the context is the limit."""
        window: float | None = getattr(self._processor, "window_s", None)
        return window

    def read_audio(self, data: bytes, where: str) -> Samples:
        """A file's samples at the model's rate; InvalidRequest."""
        return read_audio(data, self.rate, where)

    def _decode(self, media: RawMedia) -> _Piece:
        where, data = media.where, media.data
        if media.kind == "image":
            assert isinstance(data, bytes)
            return _Piece("image", open_image(data, where))
        if media.kind == "audio":
            assert not isinstance(data, tuple)
            samples = self.read_audio(data, where) if isinstance(data, bytes) else data
            return _Piece("audio", samples)
        assert not isinstance(data, np.ndarray)
        if isinstance(data, bytes):
            return _Piece("video", read_video(data, self._fps, where, self._max_frames))
        return _Piece("video", read_frames(data, self._fps, where, self._max_frames))

    def _call(
        self, text: str, pieces: Sequence[_Piece], add_special_tokens: bool, where: str
    ) -> dict[str, Any]:
        """The processor's outputs as arrays."""
        arguments: dict[str, Any] = {}
        if self._spec.single_image and len(pieces) > 1:
            raise InvalidRequest(f"{where}: this model reads one image a prompt", where)
        if self._spec.image_first:
            text = text.replace(self.token("image"), "")
        for piece in pieces:
            value = piece.value.frames if piece.kind == "video" else piece.value
            arguments.setdefault(_ARGUMENTS[piece.kind], []).append(value)
        if metadata := [piece.value.metadata for piece in pieces if piece.kind == "video"]:
            arguments |= {"video_metadata": metadata, "return_metadata": True}
            arguments["do_sample_frames"] = False
        if "image" in self.kinds:
            arguments.setdefault("images", None)
        arguments |= {"text": [text], "add_special_tokens": add_special_tokens} | self._options
        try:
            try:
                outputs = self._processor(return_tensors="np", **arguments)
            except (ValueError, AttributeError, TypeError) as error:
                if isinstance(error, ValueError) and not re.search(_TENSORS, str(error)):
                    raise  # numpy has no bfloat16, and some processors need tensors
                outputs = self._processor(return_tensors="pt", **arguments)
        except ImportError as error:
            raise InvalidRequest(f"{where}: cannot be read here: {error}", where) from None
        except _PROCESSOR_ERRORS as error:
            why = _reason(error) or self._misfit(text, pieces)
            raise InvalidRequest(f"{where}: text and media do not fit: {why}", where) from None
        return {name: _array(value) for name, value in outputs.items()}

    def _misfit(self, text: str, pieces: Sequence[_Piece]) -> str:
        """Why the processor may have refused ``text`` with ``pieces``."""
        for kind in self.kinds:
            token, count = self.token(kind), sum(piece.kind == kind for piece in pieces)
            if text.count(token) != count:
                return f"{text.count(token)} placeholders {token} for media of kind {kind}: {count}"
        return "this model's processor cannot read them"

    def _media(
        self, outputs: dict[str, Any], pieces: Sequence[_Piece], ids: Ids, where: str
    ) -> tuple[Media, ...]:
        """One ``Media`` a piece if each alone has as many placeholders as here, else one of all
        pieces of a modality."""
        kinds = [kind for kind in MODALITIES if any(piece.kind == kind for piece in pieces)]
        kinds = ["image"] if self._spec.video == "images" else kinds
        media: list[Media] = []
        for kind in kinds if pieces else ():
            places = self._placeholders(outputs, kind)
            if not len(places):
                raise InvalidRequest(f"{where}: the text has no placeholder for its {kind}", where)
            of_kind = [p for p in pieces if p.kind == kind or self._spec.video == "images"]
            parts, counts = [outputs], [len(places)]
            if len(pieces) > 1:
                alone = [self._call(self._alone(p.kind), [p], False, where) for p in of_kind]
                sizes = [len(self._placeholders(part, kind)) for part in alone]
                if sum(sizes) == len(places) and 0 not in sizes:
                    parts, counts = alone, sizes
            bounds = np.cumsum([0, *counts])
            for part, first, last in zip(parts, bounds, bounds[1:], strict=False):
                media.append(self._one(kind, part, places[first:last], ids))
        return tuple(sorted(media, key=lambda one: one.spans[0]))

    def _alone(self, kind: Modality) -> str:
        """The text of a single piece."""
        text = self.token(kind)
        if self._spec.rope_by_image_index:  # its processor needs the boundary tokens
            text = text.join((self._processor.image_start_token, self._processor.image_end_token))
        return text

    def _in_order(self, text: str, pieces: Sequence[_Piece]) -> Sequence[_Piece]:
        """Images and videos in the order of the text, where both have the same placeholder."""
        if self._spec.video != "images" or len({piece.kind for piece in pieces}) < 2:
            return pieces
        kind_of: dict[str, Modality] = {self.token("image"): "image", self.token("video"): "video"}
        named = [kind_of[one] for one in re.findall("|".join(map(re.escape, kind_of)), text)]
        left = {kind: iter([p for p in pieces if p.kind == kind]) for kind in kind_of.values()}
        return [piece for kind in named for piece in [next(left[kind], None)] if piece is not None]

    def _placeholders(self, outputs: dict[str, Any], kind: Modality) -> NDArray[np.int64]:
        """Positions of a modality's placeholders."""
        tokens = [self._ids[kind], *self._spec.visual_indicator_tokens]
        if self._spec.adds_to_embeddings:
            tokens = self._processor.image_token_ids
        ids = outputs["input_ids"].reshape(-1)
        matches = np.isin(ids, [token for token in tokens if token is not None])
        if "mm_token_type_ids" in outputs and kind != "audio":  # frames may have the image's token
            is_frame = outputs["mm_token_type_ids"].reshape(-1) == _TYPE_OF_FRAMES
            matches = is_frame if kind == "video" else matches & ~is_frame
        return np.flatnonzero(matches)

    def _one(
        self, kind: Modality, outputs: dict[str, Any], places: NDArray[np.int64], ids: Ids
    ) -> Media:
        inputs = {
            name: Array.of(value)
            for name, value in sorted(outputs.items())
            if name not in _TEXT_OUTPUTS and value.dtype.kind not in "OUS"
        }
        if self._spec.encoder == "class_forward" or self._spec.needs_token_ids:
            inputs["input_ids"] = Array.of(ids[places].astype(np.int64)[None])
        parts = [
            p for name, a in inputs.items() for p in (name.encode(), repr(a.shape).encode(), a.data)
        ]
        return Media(kind, content_digest(kind.encode(), *parts), _spans(places), inputs)

    def _rope_ids(self, ids: Ids, media: tuple[Media, ...]) -> Ids | None:
        """int32 [3, T], the positions of M-RoPE; None for a model without."""
        if not self._merge:
            return None
        if self._spec.rope_by_image_index:
            grids = (g for one in media for g in positions.without_boundaries(one, self._merge))
            return positions.numbered_ids(len(ids), grids)
        if self._spec.has_row_ends or self._spec.has_one_position:
            read = positions.with_row_ends if self._spec.has_row_ends else positions.at_one_place
            grids = (g for one in media for g in read(one, self._merge))
            return positions.rope_ids(len(ids), grids)
        if (canvas := self._spec.canvas) is None:
            rate = self._spec.tokens_per_second
            return positions.rope_ids(
                len(ids), (g for one in media for g in positions.boxes(one, self._merge, rate))
            )
        crops = []
        for one in media:
            sizes = one.inputs[self._size_name(one.kind)].read().reshape(-1, 2).tolist()
            if len(sizes) != len(one.spans):
                message = (
                    f"{len(sizes)} crops of an image for {len(one.spans)} runs of placeholders"
                )
                raise InvalidRequest(f"messages: {message}", "messages")
            for (start, count), (rows, columns) in zip(one.spans, sizes, strict=True):
                size = (rows // canvas.merge, columns // canvas.merge)
                if size[0] * size[1] != count:
                    message = f"{count} placeholders for a crop of {size[0]} x {size[1]}"
                    raise InvalidRequest(f"messages: {message}", "messages")
                crops.append(Crop(start, start + count, size))
        return canvas_ids(ids, crops, canvas)


def _array(value: Any) -> NDArray[Any]:
    """Of an array, a list or a tensor of torch."""
    if hasattr(value, "is_floating_point") and value.is_floating_point():
        value = value.float()
    return np.asarray(value)


def _reason(error: Exception) -> str:
    """What a processor says about its input; "" for an error inside of it, which is logged."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    log.warning("the processor raised %s: %s", type(error).__name__, error)
    return ""


def _with_bidirectional_spans(
    media: tuple[Media, ...], num_tokens: int, rule: str
) -> tuple[Media, ...]:
    """``rule``: "image": each image is bidirectional; "start": the first one is with all that
    stands before it; "prompt": the whole prompt is, which the first media says."""
    replace = msgspec.structs.replace
    if rule == "image":
        return tuple(
            one if one.kind == "audio" else replace(one, bidirectional_spans=one.spans)
            for one in media
        )
    if rule == "start" and media:
        runs = ((0, sum(media[0].spans[-1])),)
        first = replace(media[0], bidirectional_spans=runs, affects_earlier_tokens=True)
        return (first, *media[1:])
    if rule == "prompt" and media:
        whole = ((0, num_tokens),)
        first = replace(media[0], bidirectional_spans=whole, spans_ignore_window=True)
        return (first, *media[1:])
    return media


def _spans(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Runs of neighbouring positions: (first, count)."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), len(run)) for run in np.split(places, cuts))
