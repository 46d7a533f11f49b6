"""The HTTP APIs that a server may speak: how a request is written and its answer is read.

A `Meter` times one answer as SGLang's benchmark does: time to first token (TTFT), and inter-token
latency (ITL), where the time between two events is divided by the tokens of the later one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from radixlm.base.errors import ConfigError
from radixlm.bench.datasets import Row

DONE = b"[DONE]"


@dataclass(slots=True)
class Outcome:
    """The result of one request; times in seconds. `num_prompt` and `num_output` are the server's
    own token counts, or -1 if it does not report them."""

    is_ok: bool = False
    error: str = ""
    status: int = 0
    retry_after: str | None = None
    start_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    num_prompt: int = -1
    num_output: int = -1
    num_cached: int = 0
    queue_s: float = -1.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that all requests of a run share."""

    model: str
    is_stream: bool = True
    ignore_eos: bool = True
    return_logprob: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, float]:
        """The fields of a body that say how tokens are drawn."""
        top_p = {"top_p": self.top_p} if self.top_p != 1 else {}
        return {"temperature": self.temperature, **top_p}


class Meter:
    """Reads and times the events of one answer."""

    def __init__(self, start_s: float) -> None:
        self.out = Outcome(start_s=start_s)
        self._last_s = start_s
        self._num_seen = 0

    def event(self, data: bytes, now_s: float) -> None:
        """One event of the stream."""
        raise NotImplementedError

    def whole(self, answer: Any) -> None:
        """A whole answer, without a stream."""
        raise NotImplementedError

    def finish(self) -> None:
        """The stream has ended without an error."""

    def _tokens(self, num_new: int, now_s: float) -> None:
        if self.out.ttft_s == 0.0:
            self.out.ttft_s = now_s - self.out.start_s
        else:
            self.out.itls_s.extend([(now_s - self._last_s) / num_new] * num_new)
        self._last_s = now_s
        self.out.latency_s = now_s - self.out.start_s

    def _failed(self, error: Any) -> None:
        self.out.error = error_text(error)
        if isinstance(error, dict) and isinstance(error.get("code"), int):
            self.out.status = error["code"]


class NativeMeter(Meter):
    """``/generate``: each event repeats the whole text, so only the last one is parsed."""

    _COUNT = b'"completion_tokens":'

    def __init__(self, start_s: float) -> None:
        super().__init__(start_s)
        self._last = b""

    def event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            return
        self._last = data
        at = data.rfind(self._COUNT)
        if at < 0:
            return
        count = _leading_int(data, at + len(self._COUNT))
        if count > self._num_seen:
            self._tokens(count - self._num_seen, now_s)
            self._num_seen = count

    def finish(self) -> None:
        self.whole(orjson.loads(self._last) if self._last else {})

    def whole(self, answer: Any) -> None:
        if isinstance(answer, list):
            answer = answer[0]
        if answer.get("error"):
            self._failed(answer["error"])
            return
        meta = answer.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            self.out.status = reason.get("status_code") or 0
            self.out.error = reason.get("message") or "aborted"
        self.out.text = answer.get("text") or ""
        self.out.num_prompt = meta.get("prompt_tokens", -1)
        self.out.num_output = meta.get("completion_tokens", -1)
        self.out.num_cached = meta.get("cached_tokens") or 0
        self.out.queue_s = float(meta.get("queue_time", -1.0))


class OpenAiMeter(Meter):
    """``/v1/completions`` and ``/v1/chat/completions``: each event has new text only."""

    def __init__(self, start_s: float) -> None:
        super().__init__(start_s)
        self._parts: list[str] = []

    def event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            return
        answer = orjson.loads(data)
        if answer.get("error"):
            self._failed(answer["error"])
            return
        new = "".join(_new_text(choice, "delta") for choice in answer.get("choices") or ())
        if new:
            self._parts.append(new)
            self._tokens(1, now_s)
        self._usage(answer.get("usage"))

    def finish(self) -> None:
        self.out.text = "".join(self._parts)

    def whole(self, answer: Any) -> None:
        if answer.get("error"):
            self._failed(answer["error"])
            return
        choices = answer.get("choices") or ()
        self.out.text = "".join(_new_text(choice, "message") for choice in choices)
        self._usage(answer.get("usage"))

    def _usage(self, usage: Any) -> None:
        if not usage:
            return
        self.out.num_prompt = usage.get("prompt_tokens", -1)
        self.out.num_output = usage.get("completion_tokens", -1)
        self.out.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _new_text(choice: Mapping[str, Any], part: str) -> str:
    """Text, reasoning and calls of one choice."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get(part) or {}
    calls = message.get("tool_calls") or ()
    names = [str(call.get("function", {}).get("arguments") or "") for call in calls]
    return "".join([message.get("reasoning_content") or "", message.get("content") or "", *names])


def _leading_int(data: bytes, at: int) -> int:
    end = at
    while end < len(data) and data[end] in b" 0123456789":
        end += 1
    return int(data[at:end])


def error_text(error: Any) -> str:
    """The message of an error body in any of the usual forms."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner)
        return str(inner)
    return str(error)


@dataclass(frozen=True, slots=True)
class Backend:
    """One API. `takes_ids`: whether a prompt may be token ids."""

    path: str
    meter: type[Meter]
    takes_ids: bool
    port: int = 30000

    def body(self, row: Row, options: RequestOptions) -> dict[str, Any]:
        if self.meter is NativeMeter:
            return _native_body(row, options)
        if row.images and self.takes_ids:
            raise ConfigError(f"{self.path} takes no images: use --backend sglang-oai-chat")
        body: dict[str, Any] = {
            "model": row.adapter or options.model,
            "stream": options.is_stream,
            "ignore_eos": options.ignore_eos,
            **options.sampling,
        }
        if options.is_stream:
            body["stream_options"] = {"include_usage": True}
        if self.takes_ids:
            body |= {"prompt": row.prompt, "max_tokens": row.num_output}
            body |= {"logprobs": 1} if options.return_logprob else {}
        else:
            content: Any = row.text
            if row.images:
                parts = [{"type": "image_url", "image_url": {"url": url}} for url in row.images]
                content = [*parts, {"type": "text", "text": row.text}]
            message = {"role": "user", "content": content}
            body |= {"messages": [message], "max_completion_tokens": row.num_output}
            body |= {"logprobs": True} if options.return_logprob else {}
        return body | dict(options.extra)


def _native_body(row: Row, options: RequestOptions) -> dict[str, Any]:
    """The body of `/generate`. `--extra-request-body` may hold sampling parameters at the top level
    or inside sampling_params."""
    extra = dict(options.extra)
    sampling = {
        "max_new_tokens": row.num_output,
        "ignore_eos": options.ignore_eos,
        **options.sampling,
        **extra.pop("sampling_params", {}),
    }
    body: dict[str, Any] = {"sampling_params": sampling, "stream": options.is_stream}
    body |= {"input_ids": row.ids} if row.ids is not None else {"text": row.text}
    if row.images:
        body |= {"text": row.shown, "image_data": list(row.images)}
    if options.return_logprob:
        body |= {"return_logprob": True, "logprob_start_len": -1}
    if row.adapter is not None:
        body["lora_path"] = row.adapter
    return body | extra


_NATIVE = Backend("/generate", NativeMeter, True)
_TEXT = Backend("/v1/completions", OpenAiMeter, True)
_CHAT = Backend("/v1/chat/completions", OpenAiMeter, False)
# known by name, with the reason why they are refused
REFUSED = {
    "trt": "Triton's own generate_stream; put its OpenAI front end behind --backend vllm-chat",
    "gserver": "SGLang's benchmark names it and has no client for it either",
    "sglang-embedding": "what it measures is the making of tokens, and an embedding has none",
    "vllm-embedding": "what it measures is the making of tokens, and an embedding has none",
    "truss": "Baseten's API is OpenAI's: use --backend vllm-chat --base-url",
}
BACKENDS: dict[str, Backend] = {
    "sglang": _NATIVE,
    "sglang-native": _NATIVE,
    "sglang-oai": _TEXT,
    "sglang-oai-chat": _CHAT,
    "vllm": Backend(_TEXT.path, OpenAiMeter, True, 8000),
    "vllm-chat": Backend(_CHAT.path, OpenAiMeter, False, 8000),
    "lmdeploy": Backend(_TEXT.path, OpenAiMeter, True, 23333),
    "lmdeploy-chat": Backend(_CHAT.path, OpenAiMeter, False, 23333),
}
