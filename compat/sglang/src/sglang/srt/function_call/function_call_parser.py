"""``FunctionCallParser``, over the parsers of RadixLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixlm.text.tools import registry
from radixlm.text.tools.base import parse_all, tool_specs
from sglang.srt.managers.io_struct import Tool


@dataclass
class ToolCallItem:
    """A call, or a part of one: ``parameters`` is the text of a JSON object."""

    tool_index: int
    parameters: str
    name: str | None = None


class FunctionCallParser:
    """Finds the calls in what a model wrote. ``tool_call_parser``: a value of
    ``--tool-call-parser``; ConfigError lists them."""

    def __init__(self, tools: Sequence[Tool], tool_call_parser: str) -> None:
        self._name = tool_call_parser
        self._tools = tool_specs([tool.model_dump() for tool in tools])
        self._parser = self._new()

    def _new(self) -> registry.ToolParser:
        return registry.create(self._name, self._tools)

    def has_tool_call(self, text: str) -> bool:
        """Whether a whole message holds a call."""
        return bool(parse_all(self._new(), text)[1])

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """(text, calls) of a whole message."""
        text, calls = parse_all(self._new(), full_text)
        return text, [ToolCallItem(call.index, call.arguments, call.name) for call in calls]

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """(text, parts of calls) that the next chunk adds."""
        part = self._parser.feed(chunk_text)
        return part.text, [ToolCallItem(d.index, d.arguments, d.name) for d in part.calls]
