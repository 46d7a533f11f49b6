"""Adapters: DSPy and outlines on an engine of this process, or on a server.

``dspy_lm(engine)`` and ``outlines_model(engine)`` take what programs take as a backend. Each needs
its own library; a call is one request of ``/generate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from radixlm.base.lazy import load
from radixlm.lang.backend.generate_api import GenerateBackend
from radixlm.lang.global_config import backend_of
from radixlm.lang.model_template import ModelTemplate

_MAX_TOKENS = 512  # of a call that sets no limit


class _Chat:
    """Messages and texts as bodies of /generate."""

    def __init__(self, backend: Any) -> None:
        """TypeError for a backend that has no /generate."""
        found = backend_of(backend)
        if not isinstance(found, GenerateBackend):
            raise TypeError(f"{type(found).__name__} has no /generate: use an Engine or a server")
        self.backend = found

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of messages, up to where the assistant begins."""
        template = self.backend.get_chat_template()
        if isinstance(template, ModelTemplate):
            return template.rendered.render(list(messages)).removeprefix(template.bos)
        opened = template.get_prefix_and_suffix("assistant", messages)[0]
        return template.get_prompt(messages) + opened

    def body(self, text: str | list[str], **params: Any) -> dict[str, Any]:
        """``params``: of sampling_params; those that are None are left out."""
        stops = list(self.backend.get_chat_template().stop_str)
        given = {name: value for name, value in params.items() if value is not None}
        stop = given.pop("stop", ())
        given["stop"] = [*([stop] if isinstance(stop, str) else stop), *stops]
        return {"text": text, "sampling_params": {"max_new_tokens": _MAX_TOKENS, **given}}

    def post(self, body: dict[str, Any]) -> Any:
        return self.backend._post(body)

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        length = 0
        for event in self.backend._stream({**body, "stream": True}):
            yield event["text"][length:]
            length = len(event["text"])


class DspyEngine:
    """The engine of a ``dspy.LM``: one request, one response (dspy.clients.engines, 3.4)."""

    def __init__(self, backend: Any) -> None:
        self._chat, self._lm15 = _Chat(backend), load("dspy:lm15")

    def complete(self, request: Any) -> Any:
        """A dspy.lm15.Response. ValueError for a request with tools, which DSPy then writes as
        text itself, or with parts that are no text."""
        if request.tools:
            raise ValueError("tools: leave them to DSPy's adapter (use_native_function_calling)")
        config = request.config
        wanted = config.response_format
        schema = None if wanted is None else wanted.get("schema", {"type": "object"})
        body = self._chat.body(
            self._chat.prompt(list(_messages(request))),
            max_new_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=config.stop or None,
            sampling_seed=config.seed,
            frequency_penalty=config.frequency_penalty,
            presence_penalty=config.presence_penalty,
            json_schema=None if schema is None else orjson.dumps(schema).decode(),
        )
        answer = self._chat.post(body)
        meta = answer["meta_info"]
        usage = self._lm15.Usage(
            input_tokens=meta["prompt_tokens"], output_tokens=meta["completion_tokens"]
        )
        is_cut = (meta.get("finish_reason") or {}).get("type") == "length"
        return self._lm15.Response(
            id=meta["id"],
            model=self._chat.backend.get_model_name(),
            message=self._lm15.Message.assistant(answer["text"] or " "),
            finish_reason="length" if is_cut else "stop",
            usage=usage,
        )

    def close(self) -> None:
        """The backend is its owner's."""


def dspy_lm(backend: Any = None, **settings: Any) -> Any:
    """A ``dspy.LM``: ``dspy.configure(lm=dspy_lm(engine))``. ``settings``: its own, such as
    max_tokens, temperature, cache. ImportError without dspy."""
    engine = DspyEngine(backend)
    return load("dspy:LM")(
        f"radixlm/{engine._chat.backend.get_model_name()}", engine=engine, **settings
    )


def _messages(request: Any) -> Iterator[dict[str, str]]:
    if request.system is not None:
        system = request.system
        parts = system if isinstance(system, str) else _text(system)
        yield {"role": "system", "content": parts}
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        yield {"role": role, "content": _text(message.parts)}


def _text(parts: Sequence[Any]) -> str:
    for part in parts:
        if not isinstance(getattr(part, "text", None), str):
            raise ValueError(f"{type(part).__name__}: this adapter takes texts only")
    return "".join(part.text for part in parts)


def outlines_model(backend: Any = None) -> Any:
    """A model of outlines: ``outlines_model(engine)("...", Literal["yes", "no"])``. Types become
    regular expressions, JSON schemas or grammars of the request. ImportError without outlines."""
    base = load("outlines.models.sglang:SGLang")  # outlines takes known classes only
    return type("RadixLM", (_OutlinesCalls, base), {})(backend)


class _OutlinesAdapter:
    """Inputs and types of outlines as fields of /generate."""

    def __init__(self, chat: _Chat) -> None:
        self._chat = chat

    def format_input(self, model_input: Any) -> str:
        if isinstance(model_input, str):
            return self._chat.prompt([{"role": "user", "content": model_input}])
        messages = getattr(model_input, "messages", None)
        if messages is None:
            raise TypeError(f"{type(model_input).__name__}: a text or a Chat works")
        return self._chat.prompt(messages)

    def format_output_type(self, output_type: Any = None) -> dict[str, str]:
        if output_type is None:
            return {}
        term = load("outlines.types.dsl:python_types_to_terms")(output_type)
        if isinstance(term, load("outlines.types.dsl:JsonSchema")):
            return {"json_schema": term.schema}
        if isinstance(term, load("outlines.types.dsl:CFG")):
            return {"lark": term.definition}
        return {"regex": load("outlines.types.dsl:to_regex")(term)}


class _OutlinesCalls:
    """The methods of a model of outlines."""

    def __init__(self, backend: Any) -> None:
        self._chat = _Chat(backend)
        self.type_adapter = _OutlinesAdapter(self._chat)

    def _body(self, inputs: Any, output_type: Any, params: dict[str, Any]) -> dict[str, Any]:
        adapter = self.type_adapter
        is_many = isinstance(inputs, list)
        text = (
            [adapter.format_input(one) for one in inputs]
            if is_many
            else adapter.format_input(inputs)
        )
        renamed = {"max_new_tokens": params.pop("max_tokens", None), **params}
        return self._chat.body(text, **adapter.format_output_type(output_type), **renamed)

    def generate(self, model_input: Any, output_type: Any = None, **inference_kwargs: Any) -> Any:
        """The text, a list of texts for n > 1."""
        answer = self._chat.post(self._body(model_input, output_type, inference_kwargs))
        if isinstance(answer, list):
            return [one["text"] for one in answer]
        return answer["text"]

    def generate_batch(
        self, model_input: list[Any], output_type: Any = None, **inference_kwargs: Any
    ) -> list[str]:
        """One request for all of them."""
        answers = self._chat.post(self._body(list(model_input), output_type, inference_kwargs))
        return [one["text"] for one in answers]

    def generate_stream(
        self, model_input: Any, output_type: Any = None, **inference_kwargs: Any
    ) -> Iterator[str]:
        """The text piece by piece."""
        return self._chat.stream(self._body(model_input, output_type, inference_kwargs))
