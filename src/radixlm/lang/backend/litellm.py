"""A program's backend by LiteLLM, which speaks the APIs of many providers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.chat_template import ChatTemplate, get_chat_template_by_model_path

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams

TIMEOUT_S = 600.0


class LiteLLM(BaseBackend):
    """``params``: further arguments of litellm.completion."""

    is_chat_model = True

    def __init__(
        self,
        model_name: str,
        chat_template: ChatTemplate | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = TIMEOUT_S,
        max_retries: int | None = 2,
        default_headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self._completion = load("litellm:completion")
        self.client_params = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": max_retries,
            "default_headers": default_headers,
            **params,
        }

    def get_model_name(self) -> str:
        return self.model_name

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        answer = self._call(s, sampling_params)
        return answer.choices[0].message.content or "", {}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        for chunk in self._call(s, sampling_params, stream=True):
            yield chunk.choices[0].delta.content or "", {}

    def _call(self, s: StreamExecutor, params: SglSamplingParams, stream: bool = False) -> Any:
        messages = s.messages_ or [{"role": "user", "content": s.text_}]
        return self._completion(
            model=self.model_name,
            messages=messages,
            stream=stream,
            **self.client_params,
            **params.to_litellm_kwargs(),
        )
