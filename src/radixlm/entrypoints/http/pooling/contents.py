"""Queries and documents that may hold images or videos beside text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.pooling.pool import MultimodalPrompt, Prompt
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.media import KINDS, MediaSource, sources_of
from radixlm.entrypoints.request_model import Body, Objects

_TEXTS = ("text", "input_text")


class Document(Body):
    """A document as an object: a text, an image, a video (URL, data URI, base64), of these
    together, or ``content``, the parts of a message."""

    text: str | None = None
    image: str | None = None
    video: str | None = None
    content: Objects | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """One query or document. ``parts``: those of a message, a text among them; none of a text
    alone, which has no ``sources``."""

    text: str
    parts: tuple[Mapping[str, Any], ...] = ()
    sources: tuple[MediaSource, ...] = ()

    def as_parts(self) -> tuple[Mapping[str, Any], ...]:
        """The parts of a message with this content."""
        return self.parts or ({"type": "text", "text": self.text},)


def content_of(state: ServerState, value: Any, where: str) -> Content:
    """A text, a list of parts or a Document; InvalidRequest names ``where``."""
    if isinstance(value, str):
        return Content(value)
    parts, at = value, where
    if isinstance(value, Document):
        parts, at = _parts(value), where
        if value.content is not None:
            parts, at = value.content, f"{where}.content"
    if not parts:
        raise InvalidRequest(f"{where}: needs a text, an image or a video", where)
    for index, part in enumerate(parts):
        kind = part.get("type")
        is_text = kind in _TEXTS and isinstance(part.get("text"), str)
        if not is_text and not (isinstance(kind, str) and kind in KINDS):
            message = f"{at}[{index}]: must be a part such as {{'type': 'text', 'text': ...}}"
            raise InvalidRequest(message, f"{at}[{index}]")
    text = "".join(part["text"] for part in parts if part["type"] in _TEXTS)
    sources = _sources(state, parts, at)
    return Content(text, tuple(parts), tuple(sources)) if sources else Content(text)


def _parts(one: Document) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for kind, url in (("image", one.image), ("video", one.video)):
        parts += [{"type": kind, kind: url}] if url else []
    return parts if one.text is None else [*parts, {"type": "text", "text": one.text}]


def _sources(
    state: ServerState, parts: Sequence[Mapping[str, Any]], where: str
) -> list[MediaSource]:
    """Their media, with ``where`` in the place of a message's content."""
    inside = "messages[0].content"
    try:
        found = sources_of([{"content": parts}], state.media)
    except InvalidRequest as error:
        param = (error.param or "").replace(inside, where) or None
        raise InvalidRequest(error.message.replace(inside, where), param) from None
    return [replace(one, where=one.where.replace(inside, where)) for one in found]


def prompt_of(state: ServerState, content: Content) -> Prompt:
    """What an embedding model reads, where some of the texts it is compared with have media."""
    writes = state.media is not None and not state.media.embeds_images
    if content.sources or writes:
        return MultimodalPrompt(content.text or None, content.sources)
    return content.text


def listed(state: ServerState, value: Any, where: str) -> list[Content]:
    """The documents of a list, or the only one."""
    if not isinstance(value, list):
        return [content_of(state, value, where)]
    return [content_of(state, one, f"{where}[{index}]") for index, one in enumerate(value)]
