"""A program's backend by Google's client library for Vertex AI."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.chat_template import get_chat_template

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams

_MODELS = "vertexai.preview.generative_models"


class VertexAI(BaseBackend):
    """The project and the place are those of GCP_PROJECT_ID and GCP_LOCATION in the environment."""

    def __init__(self, model_name: str, safety_settings: Any = None) -> None:
        super().__init__()
        self._model = load(f"{_MODELS}:GenerativeModel")
        load("vertexai:init")(
            project=os.environ["GCP_PROJECT_ID"], location=os.environ.get("GCP_LOCATION")
        )
        self.model_name, self.safety_settings = model_name, safety_settings
        self.chat_template = get_chat_template("default")

    def get_model_name(self) -> str:
        return self.model_name

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        return self._call(s, sampling_params).text, {}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        for piece in self._call(s, sampling_params, stream=True):
            yield piece.text, {}

    def _call(self, s: StreamExecutor, params: SglSamplingParams, **options: Any) -> Any:
        config = load(f"{_MODELS}:GenerationConfig")(**params.to_vertexai_kwargs())
        return self._model(self.model_name).generate_content(
            messages_to_contents(s.messages_) if s.messages_ else self._parts(s),
            generation_config=config,
            safety_settings=self.safety_settings,
            **options,
        )

    def _parts(self, s: StreamExecutor) -> Any:
        """The text of a program without roles, its images in their places."""
        if not s.cur_images:
            return s.text_
        make_image = load(f"{_MODELS}:Image").from_bytes
        texts = s.text_.split(self.chat_template.image_token)
        images = [make_image(base64.b64decode(data)) for _, data in s.cur_images]
        mixed = [part for pair in zip(texts, [*images, ""], strict=False) for part in pair]
        return [part for part in mixed if part != ""]


def messages_to_contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of OpenAI's form in Vertex AI's; a system text becomes a first exchange."""
    contents: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        pieces: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts: list[dict[str, Any]] = []
        for piece in pieces:
            if piece["type"] == "text":
                parts.append({"text": piece["text"]})
            else:
                data = piece["image_url"]["url"].split(",", 1)[1]
                parts.append({"inline_data": {"data": data, "mime_type": "image/jpeg"}})
        if message["role"] == "system":
            text = "System prompt: " + parts[0]["text"]
            contents.append({"role": "user", "parts": [{"text": text}]})
            contents.append({"role": "model", "parts": [{"text": "Understood."}]})
        else:
            role = "model" if message["role"] == "assistant" else "user"
            contents.append({"role": role, "parts": parts})
    return contents
