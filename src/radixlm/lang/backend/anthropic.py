"""A program's backend by Anthropic's client library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.chat_template import get_chat_template

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams


class Anthropic(BaseBackend):
    """``args`` and ``kwargs``: of anthropic.Anthropic."""

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.model_name = model_name
        self.chat_template = get_chat_template("claude")
        self.client = load("anthropic:Anthropic")(*args, **kwargs)

    def get_model_name(self) -> str:
        return self.model_name

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        answer = self.client.messages.create(**self._request(s, sampling_params))
        return "".join(part.text for part in answer.content if part.type == "text"), {}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        with self.client.messages.stream(**self._request(s, sampling_params)) as stream:
            for text in stream.text_stream:
                yield text, {}

    def _request(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        """The program's list of messages stays as it is: the system text is a field here."""
        messages = s.messages_ or [{"role": "user", "content": s.text_}]
        is_system = messages[0]["role"] == "system"
        return {
            "model": self.model_name,
            "system": messages[0]["content"] if is_system else "",
            "messages": messages[1:] if is_system else messages,
            **sampling_params.to_anthropic_kwargs(),
        }
