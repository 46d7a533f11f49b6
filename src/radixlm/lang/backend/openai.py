"""A program's backend by the client library of OpenAI, for any server that speaks its API."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.chat_template import ChatTemplate, get_chat_template_by_model_path
from radixlm.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from radixlm.lang.ir import SglSamplingParams

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor

_INSTRUCT_MODELS = ("gpt-3.5-turbo-instruct",)
CRUSOE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"
_TRIES = 3
_MAX_BIASES = 300  # of one call


@dataclass
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0


@dataclass
class Term:
    """A text of a turn, or a call whose text is cut out of the model's one answer."""

    text: str
    name: str | None = None
    stops: list[str] | None = None
    params: SglSamplingParams | None = None


class OpenAI(BaseBackend):
    """``args`` and ``kwargs``: of openai.OpenAI, or of openai.AzureOpenAI with ``is_azure``."""

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        client = load("openai:AzureOpenAI" if is_azure else "openai:OpenAI")
        self.client, self.model_name = client(*args, **kwargs), model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        is_chat = model_name not in _INSTRUCT_MODELS
        self.is_chat_model = is_chat if is_chat_model is None else is_chat_model
        self.token_usage = TokenUsage(0, 0)
        self._lock = threading.Lock()
        self._encoding: Any = None

    def get_model_name(self) -> str:
        return self.model_name

    @property
    def tokenizer(self) -> Any:
        """tiktoken's, loaded when ``select`` or an int needs it."""
        if self._encoding is None:
            try:
                self._encoding = load("tiktoken:encoding_for_model")(self.model_name)
            except KeyError:
                self._encoding = load("tiktoken:get_encoding")("cl100k_base")
        return self._encoding

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        dtype = sampling_params.dtype
        kwargs = self._kwargs(sampling_params)
        if dtype is None:
            return self._complete(self._prompt(s), **kwargs), {}
        if self.is_chat_model:
            raise ValueError("dtype is for completion models; a chat model takes none")
        kwargs.pop("stop")
        if dtype in (str, "str", "string"):
            found = self._complete(s.text_ + '"', stop='"', **kwargs)
            return _each(found, lambda text: f'"{text}"'), {}
        if dtype in (int, "int"):
            bias = self._int_bias()
            return self._complete(s.text_, stop=[" "], logit_bias=bias, **kwargs), {}
        raise ValueError(f"Unknown dtype: {dtype}")

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        if sampling_params.dtype is not None:
            raise ValueError(f"Unknown dtype: {sampling_params.dtype}")
        kwargs = {**self._kwargs(sampling_params), "stream_options": {"include_usage": True}}
        for event in self._create(self._prompt(s), stream=True, **kwargs):
            self._count(event.usage)
            if event.choices:
                choice = event.choices[0]
                piece = choice.delta.content if self.is_chat_model else choice.text
                yield piece or "", {}

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        """Token by token: each call may answer only with a token that goes on a choice that is
        left. ``choices_method`` has no meaning for such a server."""
        if self.is_chat_model:
            raise NotImplementedError("select needs a completion model: is_chat_model=False")
        encode = self.tokenizer.encode
        ids = {choice: encode(choice) for choice in choices}
        left, prompt = list(choices), encode(s.text_)
        for place in range(max(map(len, ids.values()))):
            if len(left) == 1:
                break
            going_on = {ids[c][place]: 100 for c in left if len(ids[c]) > place}
            found = self._create(prompt, logit_bias=going_on, temperature=0, max_tokens=1)
            self._count(found.usage)
            token = encode(found.choices[0].text)[0]
            fitting = [c for c in left if len(ids[c]) > place and ids[c][place] == token]
            left, prompt = fitting or left[:1], [*prompt, token]
        scores = [1 if choice == left[0] else 0 for choice in choices]
        return ChoicesDecision(left[0], {"scores": scores})

    # ---- a turn answered by one call --------------------------------------------------------

    def spec_fill(self, s: StreamExecutor, value: str) -> None:
        s.api_spec.append(Term(value))

    def spec_gen(self, s: StreamExecutor, params: SglSamplingParams, name: str) -> None:
        s.api_spec.append(Term("", name, params.stops(), params))

    def role_end_generate(self, s: StreamExecutor) -> None:
        """Fill the turn's terms from one answer that fits them. RuntimeError if none of three
        does."""
        params = next((term.params for term in s.api_spec if term.params is not None), None)
        if params is None:
            return
        kwargs = {**self._kwargs(params), "stop": None}
        limit = "max_tokens" if "max_tokens" in kwargs else "max_completion_tokens"
        kwargs[limit] = s.num_api_spec_tokens
        for _ in range(_TRIES):
            found = self._complete(s.messages_, **kwargs)
            if _fill_terms(s.api_spec, found if isinstance(found, str) else found[0]):
                return
        raise RuntimeError(f"none of {_TRIES} answers has the form of the assistant's turn")

    # ---- the client ------------------------------------------------------------------------

    def _prompt(self, s: StreamExecutor) -> Any:
        if not self.is_chat_model:
            return s.text_
        if not s.text_.endswith(self.chat_template.role_prefix_and_suffix["assistant"][0]):
            raise RuntimeError(
                "This use case is not supported if api speculative execution is off. "
                "For OpenAI chat models, sgl.gen must be right after sgl.assistant. "
                "Example of adding api speculative execution: @function(num_api_spec_tokens=128)."
            )
        return s.messages_

    def _kwargs(self, params: SglSamplingParams) -> dict[str, Any]:
        kwargs = params.to_openai_kwargs()
        is_reasoning = any(name in self.model_name for name in ("o1", "o3"))
        kwargs.pop("max_tokens" if is_reasoning else "max_completion_tokens")
        return kwargs

    def _create(self, prompt: Any, **kwargs: Any) -> Any:
        if self.is_chat_model:
            return self.client.chat.completions.create(
                model=self.model_name, messages=prompt, **kwargs
            )
        return self.client.completions.create(model=self.model_name, prompt=prompt, **kwargs)

    def _complete(self, prompt: Any, **kwargs: Any) -> str | list[str]:
        answer = self._create(prompt, **kwargs)
        self._count(answer.usage)
        is_chat = self.is_chat_model
        texts = [(c.message.content if is_chat else c.text) or "" for c in answer.choices]
        return texts[0] if kwargs.get("n") in (None, 1) else texts

    def _count(self, usage: Any) -> None:
        if usage is not None:
            with self._lock:
                self.token_usage.prompt_tokens += usage.prompt_tokens
                self.token_usage.completion_tokens += usage.completion_tokens

    def _int_bias(self) -> dict[int, int]:
        """Tokens of digits alone, and the end of text."""
        encoding = self.tokenizer
        texts = ((i, encoding.decode([i])) for i in range(encoding.n_vocab - 1000))
        digits = [i for i, text in texts if text == " " or text.isdigit()][: _MAX_BIASES - 1]
        return dict.fromkeys([*digits, encoding.eot_token], 100)


class Crusoe(OpenAI):
    """Crusoe's managed inference, by OpenAI's API. ``api_key``: None, that of CRUSOE_API_KEY."""

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = True,
        chat_template: ChatTemplate | None = None,
        api_key: str | None = None,
        base_url: str = CRUSOE_URL,
        **kwargs: Any,
    ) -> None:
        key = api_key or os.environ.get("CRUSOE_API_KEY")
        if not key:
            raise ValueError("Crusoe needs a key: api_key=..., or CRUSOE_API_KEY")
        fields = {"api_key": key, "base_url": base_url, **kwargs}
        super().__init__(model_name, is_chat_model, chat_template, **fields)


def _each(found: str | list[str], change: Any) -> str | list[str]:
    return [change(text) for text in found] if isinstance(found, list) else change(found)


def _fill_terms(terms: list[Term], answer: str) -> bool:
    """Whether the answer has the constant texts of ``terms`` in their places; the calls' texts are
    what stands between them."""
    for index, term in enumerate(terms):
        if term.name is None:
            if not answer.startswith(term.text):
                return False
            answer = answer[len(term.text) :]
            continue
        ends = [found for stop in term.stops or () if (found := answer.find(stop)) >= 0]
        following = terms[index + 1] if index + 1 < len(terms) else None
        if not ends and following is not None:
            if following.name is not None or (end := answer.find(following.text)) < 0:
                return False
            ends = [end]
        end = min(ends, default=len(answer))
        term.text, answer = answer[:end], answer[end:]
    return True
