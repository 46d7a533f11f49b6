"""Incremental parsing of a model's message into reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixlm.text.reasoning.base import ReasoningParser
from radixlm.text.tools.base import ParsedCall, ParsedText, ToolCallDelta, ToolParser, join_deltas


@dataclass(slots=True)
class ParsedDelta:
    """What one chunk adds. ``broken``: indices of calls whose arguments are incomplete."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)

    def absorb(self, later: ParsedDelta) -> None:
        self.reasoning += later.reasoning
        self.text += later.text
        self.calls += later.calls
        self.broken += later.broken

    def whole_calls(self) -> list[ParsedCall]:
        """The complete calls."""
        return join_deltas(self.calls)


class OutputParser:
    """Parses one message: the text that the reasoning parser returns goes to the tool parser."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        only_first_call: bool = False,
    ) -> None:
        self._reasoning, self._tools, self._only_first = reasoning, tools, only_first_call
        self.num_calls = 0

    def feed(self, chunk: str) -> ParsedDelta:
        """Parse the next chunk of the message."""
        if self._reasoning is None:
            return self._read("", chunk)
        return self._read(*self._reasoning.feed(chunk))

    def finish(self) -> ParsedDelta:
        """End the message; what the parsers held back."""
        parsed = ParsedDelta()
        if self._reasoning is not None:
            parsed = self._read(*self._reasoning.finish())
        if self._tools is not None:
            parsed.absorb(self._tool_calls("", self._tools.finish()))
        return parsed

    def _read(self, reasoning: str, text: str) -> ParsedDelta:
        if self._tools is None or not text:
            return ParsedDelta(reasoning, text)
        return self._tool_calls(reasoning, self._tools.feed(text))

    def _tool_calls(self, reasoning: str, parsed: ParsedText) -> ParsedDelta:
        calls = parsed.calls
        if self._only_first:
            calls = [call for call in calls if call.index == 0]
        self.num_calls = max([self.num_calls, *(call.index + 1 for call in calls)])
        return ParsedDelta(reasoning, parsed.text, calls, list(parsed.incomplete))
