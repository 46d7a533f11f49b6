"""Media of a request: the parts of messages that name some, and prompts made with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.config.root import ServerConfig
from radixlm.engine.modelinfo import ModelInfo
from radixlm.entrypoints.native import Batch, Source
from radixlm.multimodal.fetch import FetchRules, fetch
from radixlm.multimodal.processor import MediaProcessor, Prompt

MAX_PICTURES = 256
KINDS = frozenset(
    (
        "image image_url input_image video video_url audio audio_url input_audio file input_file"
    ).split()
)
_PICTURES = ("image", "image_url", "input_image")
_TEXT_ONLY = "this model reads text only"


class MediaReader:
    """Fetches pictures and has them read."""

    def __init__(self, processor: MediaProcessor, rules: FetchRules) -> None:
        self._processor, self._rules = processor, rules

    def warm(self) -> None:
        """Load the processor in a thread of its own: the first picture need not wait for it."""
        threading.Thread(target=self._processor.warm, name="processor", daemon=True).start()

    def read(self, text: str, sources: Sequence[Source], add_special_tokens: bool) -> Prompt:
        """The prompt; takes as long as the slowest fetch. InvalidRequest names the field."""
        images = [
            one.value if isinstance(one.value, bytes) else fetch(one.value, self._rules, one.where)
            for one in sources
        ]
        where = sources[0].where if sources else "text"
        return self._processor.read(text, images, add_special_tokens, where)

    async def prompt(
        self, text: str, sources: Sequence[Source], add_special_tokens: bool
    ) -> Prompt:
        """``read`` in a thread."""
        return await asyncio.to_thread(self.read, text, sources, add_special_tokens)


def make_reader(config: ServerConfig, info: ModelInfo) -> MediaReader | None:
    """None for a model that reads text only, or with --enable-multimodal off."""
    if not info.is_multimodal or config.media.enable_multimodal is False:
        return None
    folders = tuple(Path(folder) for folder in config.media.allow_local_media or ())
    rules = FetchRules(allow_private=Path("/") in folders, folders=folders)
    assert info.media is not None
    has_sections = any(r.sections for r in info.ropes)
    return MediaReader(MediaProcessor(info.folder, info.media, has_sections), rules)


def sources_of(messages: Sequence[Mapping[str, Any]], reader: MediaReader | None) -> list[Source]:
    """The pictures of a conversation in order; InvalidRequest for what the model cannot read."""
    found = [_source(part, kind, where, reader) for part, kind, where in _parts(messages)]
    if len(found) > MAX_PICTURES:
        raise InvalidRequest(f"messages: at most {MAX_PICTURES} pictures a request", "messages")
    return found


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in KINDS:
                yield part, kind, f"messages[{index}].content[{place}]"


def _source(part: Mapping[str, Any], kind: str, where: str, reader: MediaReader | None) -> Source:
    if reader is None:
        raise InvalidRequest(f"{where}: {_TEXT_ONLY}, not {kind}", where)
    if kind not in _PICTURES:
        raise InvalidRequest(f"{where}: this model reads text and images, not {kind}", where)
    held = part.get("image_url", part.get("image", part.get("url")))
    if isinstance(held, Mapping):
        held = held.get("url")
    if not isinstance(held, str) or not held:
        raise InvalidRequest(f"{where}.{kind}: must hold a URL, a data URI or base64", where)
    return Source(held, where)


def resolve(batch: Batch, reader: MediaReader | None) -> None:
    """Give native requests with pictures their prompts; InvalidRequest for a text-only model.
    Takes as long as the fetches."""
    for request, sources in zip(batch.requests, batch.images, strict=True):
        if not sources:
            continue
        if reader is None:
            raise InvalidRequest(f"image_data: {_TEXT_ONLY}", "image_data")
        if request.text is None:
            raise InvalidRequest("image_data needs a text with its placeholders", "image_data")
        request.prompt = reader.read(request.text, sources, request.add_special_tokens)
        request.text = None
