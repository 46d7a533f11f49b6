"""Finds the media of a request, fetches them, and makes prompts with them."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from radixlm.arch.media.spec import MODALITIES, Modality
from radixlm.base.errors import InvalidRequest
from radixlm.base.thread_pool import FairThreadPool
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.client import current_client, run_in
from radixlm.multimodal.audio import Samples
from radixlm.multimodal.checkpoint import num_deep_layers
from radixlm.multimodal.features import Features, is_features, read_features
from radixlm.multimodal.fetch import FetchRules, fetch, host_of, is_web
from radixlm.multimodal.processor import MediaProcessor, Prompt, RawMedia
from radixlm.multimodal.video import MAX_FRAMES

T = TypeVar("T")
MAX_MEDIA = 256
# Threads that wait for web servers. One client may hold half of them, and a host that it names a
# quarter: a server that says nothing holds its threads for FetchRules.timeout_s.
_FETCHES, _FETCHES_OF_ONE = 64, (32, 16)
_WORKERS, _WORKERS_OF_ONE = 4, (2,)  # threads that decode and process
# type of a message part -> its modality; None: no model reads it
KINDS: Mapping[str, Modality | None] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("file", "input_file")),
}
_TEXT_ONLY = "this model reads text only"
_PLURALS = {"image": "images", "video": "videos"}


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image, video or audio as the client sent it: a URL, a path, base64 or bytes; a tuple of a
    video's frames; or preprocessed media (``multimodal/features.py``). Errors name ``where``."""

    value: str | bytes | tuple[str | bytes, ...] | Mapping[str, Any]
    where: str
    kind: Modality = "image"
    options: Mapping[str, Any] | None = None  # of the processor


class PlacedPart(dict[str, Any]):
    """A part of a message that a route made of a field of its own. Errors name ``where``, the
    client's name of that field ("input[0].content[1].image_url")."""

    def __init__(self, part: Mapping[str, Any], where: str) -> None:
        super().__init__(part)
        self.where = where


def image_part(url: Any, where: str) -> PlacedPart:
    """An image in OpenAI's form, found at ``where``."""
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, where)


def with_options(
    sources: list[MediaSource], options: Mapping[str, Any] | None
) -> list[MediaSource]:
    """The sources with ``mm_processor_kwargs``. InvalidRequest for preprocessed media."""
    done = next((one.where for one in sources if isinstance(one.value, Mapping)), None)
    if options and done is not None:
        raise InvalidRequest(
            f"mm_processor_kwargs: {done} is preprocessed already", "mm_processor_kwargs"
        )
    return [replace(one, options=options) for one in sources] if options else sources


class MediaReader:
    """Fetches media and runs the processor on them."""

    def __init__(
        self,
        processor: MediaProcessor,
        rules: FetchRules,
        row: tuple[int, int, int],
        vocab: int,
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``row``: width, depth and merge of ``read_features``; ``vocab``: number of token ids;
        ``limits``: modality -> most of a request."""
        self._limits = limits
        self._processor, self._rules, self._row, self._vocab = processor, rules, row, vocab
        self._fetches = FairThreadPool("fetches of media", _FETCHES, _FETCHES_OF_ONE)
        self._workers = FairThreadPool("requests with media", _WORKERS, _WORKERS_OF_ONE)

    def warm(self) -> None:
        """Load the processor in a thread, before the first image needs it."""
        threading.Thread(target=self._processor.warm, name="processor", daemon=True).start()

    def read(
        self, prompt: str | Sequence[int], sources: Sequence[MediaSource], add_special_tokens: bool
    ) -> Prompt:
        """The prompt of a text or of token ids. Blocks while fetching. InvalidRequest names
        the field."""
        if not isinstance(prompt, str):
            bad = next((i for i in prompt if not 0 <= i < self._vocab), None)
            if bad is not None:
                raise InvalidRequest(f"input_ids: {bad} is not a token id", "input_ids")
        features = [self._features(one) for one in sources if isinstance(one.value, Mapping)]
        if features:
            if len(features) < len(sources):
                where = sources[0].where
                raise InvalidRequest(f"{where}: either images or features of them", where)
            return self._processor.read_features(prompt, features, add_special_tokens)
        if isinstance(prompt, str):
            text = prompt
        else:
            text, add_special_tokens = self._processor.text_of(prompt), False
        media = [RawMedia(one.kind, self._bytes(one), one.where, one.options) for one in sources]
        where = sources[0].where if sources else "text"
        return self._processor.read(text, media, add_special_tokens, where)

    def _features(self, source: MediaSource) -> Features:
        assert isinstance(source.value, Mapping)
        return read_features(source.value, source.kind, source.where, *self._row)

    def _bytes(self, source: MediaSource) -> bytes | tuple[bytes, ...]:
        assert not isinstance(source.value, Mapping)
        if isinstance(source.value, tuple):
            return tuple(self._fetched(one, source.where) for one in source.value)
        return self._fetched(source.value, source.where)

    def _fetched(self, value: str | bytes, where: str) -> bytes:
        return value if isinstance(value, bytes) else fetch(value, self._rules, where)

    @property
    def kinds(self) -> tuple[Modality, ...]:
        """The modalities that the model reads."""
        return self._processor.kinds

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Modality -> its placeholder in a text. Reading one loads the processor, if ``ready`` was
        not awaited before."""
        return _Placeholders(self._processor)

    async def ready(self) -> None:
        """Load the processor in a thread. CheckpointError or ConfigError if that fails."""
        if not self._processor.is_loaded:
            await self._run(self._processor.load)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await run_in(self._workers, function, *args)

    @property
    def embeds_images(self) -> bool:
        """Whether images are embedded without text (CLIP)."""
        return self._processor.embeds_images

    async def vector(self, source: MediaSource) -> Prompt:
        """The prompt of a single image, made in a thread."""
        if isinstance(source.value, Mapping | tuple):
            raise InvalidRequest(f"{source.where}: must be one image", source.where)
        (fetched,) = await self._fetch_urls([source])
        return await self._run(self._vector, fetched)

    def _vector(self, source: MediaSource) -> Prompt:
        return self._processor.read_vector(RawMedia("image", self._bytes(source), source.where))

    @property
    def window_s(self) -> float | None:
        """The longest audio clip that the encoder reads at once; None: the context is the limit.
        Await ``ready`` first."""
        return self._processor.window_s

    @property
    def rate(self) -> int:
        """Samples a second of ``audio``. Await ``ready`` first."""
        return self._processor.rate

    async def audio(self, data: bytes, where: str) -> Samples:
        """A file's samples at the model's rate, decoded in a thread."""
        return await self._run(self._processor.read_audio, data, where)

    async def audio_prompt(self, text: str, audio: Samples, where: str) -> Prompt:
        """The prompt of a text with one audio clip, made in a thread."""
        media = [RawMedia("audio", audio, where)]
        return await self._run(self._processor.read, text, media, False, where)

    async def prompt(
        self, prompt: str | Sequence[int], sources: Sequence[MediaSource], add_special_tokens: bool
    ) -> Prompt:
        """``read`` in threads: some fetch, others decode and process."""
        for kind, most in self._limits.items():
            count = sum(source.kind == kind for source in sources)
            if count > most:
                raise InvalidRequest(
                    f"{count} {kind} inputs; --limit-mm-data-per-request allows {most}",
                    next(source.where for source in sources if source.kind == kind),
                )
        fetched = await self._fetch_urls(sources)
        return await self._run(self.read, prompt, fetched, add_special_tokens)

    async def _fetch_urls(self, sources: Sequence[MediaSource]) -> list[MediaSource]:
        """Sources with bytes in place of web addresses, which are fetched at the same time."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch_url(source)) for source in sources]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _fetch_url(self, source: MediaSource) -> MediaSource:
        value, where = source.value, source.where
        if isinstance(value, Mapping):
            return source
        files = value if isinstance(value, tuple) else (value,)
        data = [await self._fetch_one(one, where) for one in files]
        return replace(source, value=tuple(data) if isinstance(value, tuple) else data[0])

    async def _fetch_one(self, value: str | bytes, where: str) -> str | bytes:
        if isinstance(value, bytes) or not is_web(value):
            return value
        key = current_client(), host_of(value)
        return await self._fetches.run(key, fetch, value, self._rules, where)


class _Placeholders(Mapping[str, str]):
    def __init__(self, processor: MediaProcessor) -> None:
        self._processor = processor

    def __getitem__(self, kind: str) -> str:
        modality = next((one for one in self._processor.kinds if one == kind), None)
        if modality is None:
            raise KeyError(kind)
        return self._processor.token(modality)

    def __iter__(self) -> Iterator[str]:
        return iter(self._processor.kinds)

    def __len__(self) -> int:
        return len(self._processor.kinds)


def make_reader(config: ServerConfig, info: ModelInfo) -> MediaReader | None:
    """None for a model that reads text only, or with --enable-multimodal off."""
    if not info.is_multimodal or config.media.enable_multimodal is False:
        return None
    folders = tuple(Path(folder) for folder in config.media.allow_local_media or ())
    rules = FetchRules(
        max_bytes=config.media.media_url_max_file_size_mb << 20,
        allow_private=Path("/") in folders,
        folders=folders,
        domains=tuple(name.lower().strip(".") for name in config.media.allowed_media_domains or ()),
    )
    assert info.media is not None
    has_sections = any(r.mrope_sections for r in info.ropes)
    row = info.decoder.dim, num_deep_layers(info.folder), info.media.spatial_merge_size
    return MediaReader(
        MediaProcessor(
            info.folder,
            info.media,
            has_sections,
            config.media.disable_fast_image_processor,
            json.loads(config.media.mm_process_config),
        ),
        rules,
        row,
        info.decoder.vocab,
        json.loads(config.media.limit_mm_data_per_request or "{}"),
    )


def sources_of(
    messages: Sequence[Mapping[str, Any]], reader: MediaReader | None
) -> list[MediaSource]:
    """The media of a conversation in order; InvalidRequest for what the model cannot read."""
    sources = [_source(part, kind, where, reader) for part, kind, where in _parts(messages)]
    if len(sources) > MAX_MEDIA:
        raise InvalidRequest(f"messages: at most {MAX_MEDIA} media a request", "messages")
    return sources


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in KINDS:
                where = f"messages[{index}].content[{place}]"
                yield part, kind, part.where if isinstance(part, PlacedPart) else where


def _source(
    part: Mapping[str, Any], type_: str, where: str, reader: MediaReader | None
) -> MediaSource:
    kind = KINDS[type_]
    if reader is None:
        raise InvalidRequest(f"{where}: {_TEXT_ONLY}, not {type_}", where)
    if kind is None or kind not in reader.kinds:
        reads = " and ".join(("text", *(_PLURALS.get(one, one) for one in reader.kinds)))
        raise InvalidRequest(f"{where}: this model reads {reads}, not {type_}", where)
    value: Any = next(
        (part[name] for name in (type_, f"{kind}_url", kind, "url") if name in part), None
    )
    if is_features(value):
        return MediaSource(value, where, kind)
    name = where if isinstance(part, PlacedPart) else f"{where}.{type_}"
    return MediaSource(_value(value, kind, name, where), where, kind)


def _value(content: Any, kind: str, name: str, where: str) -> str | tuple[str, ...]:
    """A URL or base64; ``{"url": ...}``, and of an audio clip ``{"data": ..., "format": ...}``; of
    a video also a list of frames."""
    if isinstance(content, Mapping):
        content = content.get("url", content.get("data"))
    if kind == "video" and isinstance(content, list) and 0 < len(content) <= MAX_FRAMES:
        return tuple(str(_value(one, "image", name, where)) for one in content)
    if not isinstance(content, str) or not content:
        raise InvalidRequest(f"{name}: must hold a URL, a data URI or base64", where)
    return content


def media_of(body: Any, i: int, is_list: bool) -> list[MediaSource]:
    """The media of prompt i: ``image_data``, ``video_data`` and ``audio_data`` hold one or a list
    for a single prompt, and for a list of prompts one or a list each: URLs, base64, paths or
    bytes; a video may be a list of frames."""
    sources = []
    for kind in MODALITIES:
        where = f"{kind}_data"
        value = getattr(body, where)
        if value is None:
            continue
        if is_list and isinstance(value, list):
            value = value[i] if i < len(value) else None
        for one in value if isinstance(value, list) else [value]:
            if one is not None and is_features(one):
                sources.append(MediaSource(one, where, kind))
                continue
            content = one.get("url") if isinstance(one, Mapping) else one
            if content is not None:
                sources.append(MediaSource(_frames(content, kind, where), where, kind))
    return sources


def _frames(content: Any, kind: str, where: str) -> str | bytes | tuple[str | bytes, ...]:
    if kind == "video" and isinstance(content, list) and content:
        return tuple(_file(one, where) for one in content)
    return _file(content, where)


def _file(content: Any, where: str) -> str | bytes:
    if not isinstance(content, str | bytes) or not content:
        raise InvalidRequest(f"{where} must hold URLs, data URIs or base64", where)
    return content
