"""``ReasoningParser``, over the parsers of RadixLM."""

from __future__ import annotations

from typing import Any, NamedTuple

from radixlm.text.reasoning import registry
from radixlm.text.reasoning.base import split_all


class Detector(NamedTuple):
    """The markers between which the reasoning stands."""

    think_start_token: str
    think_end_token: str


class ReasoningParser:
    """Splits what a model wrote into reasoning and text. ``model_type``: a value of
    ``--reasoning-parser`` in any case; ConfigError lists them. No parser reads ``tokenizer``."""

    def __init__(
        self,
        model_type: str,
        stream_reasoning: bool = True,
        force_reasoning: bool | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._name, self._inside = model_type.lower(), force_reasoning
        self.detector = Detector(registry.start_marker(self._name), registry.end_marker(self._name))
        self._streams = stream_reasoning
        self._parser = self._new()

    def _new(self) -> registry.ReasoningParser:
        return registry.create(
            self._name, starts_inside=self._inside, stream_reasoning=self._streams
        )

    def parse_non_stream(self, full_text: str) -> tuple[str, str]:
        """(reasoning, text) of a whole message."""
        return split_all(self._new(), full_text)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """(reasoning, text) that the next chunk adds."""
        return self._parser.feed(chunk_text)

    def parse_stream_end(self) -> tuple[str, str]:
        """(reasoning, text) that was held back at the end of the stream."""
        return self._parser.finish()
