"""The records of tool calling, and the protocol every call format is read through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from radixlm.base.errors import InvalidRequest


class ToolSpec(msgspec.Struct, frozen=True):
    """A function the model may call. ``parameters`` is its JSON schema, None when it takes none."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one call: the first carries ``name``, the later ones fragments of ``arguments``.

    The fragments of an ``index``, put together, are one valid JSON object. ``call_id`` is set
    only where the model itself writes ids (kimi_k2); elsewhere the caller draws one.
    """

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None


class ParsedText(msgspec.Struct, frozen=True):
    """What a chunk brought: text for the reader, and deltas of calls in order.

    ``incomplete`` names the calls whose arguments broke off (by length or by a fault of the
    model): what had come was closed to a valid JSON object, so such a call must not be run
    without a look; a face reports it as "length" or leaves it to its finish reason.
    """

    text: str
    calls: list[ToolCallDelta]
    incomplete: list[int] = []


class ParsedCall(msgspec.Struct, frozen=True):
    """A whole call; ``arguments`` is the text of a JSON object."""

    index: int
    name: str
    arguments: str
    call_id: str | None = None


class ToolParser(Protocol):
    """Reads one message. Any split of the text into chunks gives the same text and calls."""

    def feed(self, chunk: str) -> ParsedText:
        """Take the next piece of the message; never raises on what a model may write."""
        ...

    def finish(self) -> ParsedText:
        """The message is over: give what was held back. Further calls give nothing."""
        ...


def parse_all(parser: ToolParser, text: str) -> tuple[str, list[ParsedCall]]:
    """Parse a whole message with a fresh ``parser``: (text for the reader, calls)."""
    parts = (parser.feed(text), parser.finish())
    deltas = [delta for part in parts for delta in part.calls]
    return "".join(part.text for part in parts), join_deltas(deltas)


def join_deltas(deltas: Iterable[ToolCallDelta]) -> list[ParsedCall]:
    """Put the deltas of a message together, as a client does."""
    heads: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        ParsedCall(index, head.name or "", "".join(arguments[index]), head.call_id)
        for index, head in heads.items()
    ]


def tool_specs(tools: Sequence[Mapping[str, Any]]) -> list[ToolSpec]:
    """Read the OpenAI form, ``{"type": "function", "function": {...}}`` or the flat one.

    Raises InvalidRequest naming the entry that has no function name or whose parameters are
    no object.
    """
    specs = []
    for place, tool in enumerate(tools):
        function = tool.get("function") or tool
        name = function.get("name")
        parameters = function.get("parameters")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{place}] has no function name", param="tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(
                f"tools[{place}] ({name}): parameters must be an object", param="tools"
            )
        strict = bool(function.get("strict"))
        specs.append(ToolSpec(name, parameters, function.get("description"), strict))
    return specs
