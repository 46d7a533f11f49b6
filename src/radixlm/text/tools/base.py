"""Records of tool calls, and the protocol of tool-call parsers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.text.json_schema import standard_types


class ToolSpec(msgspec.Struct, frozen=True):
    """A function the model may call. ``parameters`` is its JSON schema, None when it takes none."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of one call: the first has ``name``, later ones fragments of ``arguments``.

    The fragments of an ``index`` join to one valid JSON object. ``call_id`` is set only where the
    model writes ids (kimi_k2); elsewhere the caller makes one.
    """

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None


class ParsedText(msgspec.Struct, frozen=True):
    """What a chunk contained: text for the user, and deltas of calls in order.

    ``incomplete``: indices of calls whose arguments end early (by length or by a mistake of the
    model). They were closed to a valid JSON object, so such a call must be checked before it is
    run; an API reports it as "length" or by its finish reason.
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
    """Parses one message. Any split into chunks gives the same text and calls."""

    def feed(self, chunk: str) -> ParsedText:
        """Parse the next chunk of the message; never raises for text of a model."""

    def finish(self) -> ParsedText:
        """The message is over: returns what was held back. Further calls return nothing."""


def parse_all(parser: ToolParser, text: str) -> tuple[str, list[ParsedCall]]:
    """Parse a whole message with a new ``parser``: (text for the user, calls)."""
    parts = (parser.feed(text), parser.finish())
    deltas = [delta for part in parts for delta in part.calls]
    return "".join(part.text for part in parts), join_deltas(deltas)


def join_deltas(deltas: Iterable[ToolCallDelta]) -> list[ParsedCall]:
    """Join the deltas of a message to calls, as a client does."""
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

    InvalidRequest names an entry without a function name or whose parameters are no schema.
    """
    specs = []
    for place, tool in enumerate(tools):
        function = tool.get("function") or tool
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{place}] has no function name", param="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(
                f"tools[{place}] ({name}): parameters must be an object", param="tools"
            )
        try:
            parameters = standard_types(parameters)
        except (ValueError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else "nested too deep"
            text = f"tools: Tool {place} function has invalid 'parameters' schema: {why}"
            raise InvalidRequest(text, param="tools") from None
        strict = bool(function.get("strict"))
        specs.append(ToolSpec(name, parameters, function.get("description"), strict))
    return specs
