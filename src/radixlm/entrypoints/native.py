"""The native request and answer of ``/generate``: a JSON object in, GenerateRequests out, and back.

Served over HTTP and by the offline engine alike. Rows SP-01..22 and MI-01..10 of the API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from radixlm.base.errors import InvalidRequest
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.intake.validation import processor_name
from radixlm.multimodal.features import is_features
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish, Logprob, TopLogprobs
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams

# fields whose feature is not built: a value other than these is refused by name
UNBUILT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lora_path": ("adapters are not supported yet (--enable-lora)", (None, [])),
    "bootstrap_host": ("disaggregation is not supported yet", (None,)),
    "bootstrap_port": ("disaggregation is not supported yet", (None,)),
    "bootstrap_room": ("disaggregation is not supported yet", (None,)),
    "return_routed_experts": ("routed experts are not recorded", (None, False)),
    "return_sampling_mask": ("sampling masks are not returned", (None, False)),
    "return_prompt_token_ids": ("prompt ids are not returned; POST /tokenize", (None, False)),
    "return_entropy": ("entropies are not returned", (None, False)),
    "session_id": ("send session_params with the id of an open session", (None,)),
    "max_thinking_tokens": ("the length of the thinking is not bounded", (None,)),
    "watermark": ("watermarking is not built", (None, {})),
    "sampling_logprobs_mode": ("log-probabilities are the model's", (None,)),
    "return_indexer_topk": ("indexers are not recorded", (None, False)),
    "encoder_urls": ("disaggregation is not supported yet", (None, [])),
    "decode_tp_size": ("disaggregation is not supported yet", (None,)),
    "disagg_prefill_dp_rank": ("disaggregation is not supported yet", (None,)),
}
_LATER = (
    "lora_id video_config use_audio_in_video max_dynamic_patch min_dynamic_patch "
    "image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs mm_hashes "
    "mm_content_hashes need_wait_for_mm_inputs num_items_assigned positional_embed_overrides "
    "multi_item_delimiter_indices token_indices_to_pool routed_experts_start_len kv_hints "
    "require_reasoning return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs "
    "return_flat_raw_top_logprobs_b64 http_worker_ipc"
).split()
# routers send every field of the reference, most of them empty
UNBUILT |= dict.fromkeys(_LATER, ("not built", (None, False, 0, [], {})))
# accepted, and without effect on the answer by their meaning
IGNORED = frozenset(
    "log_metrics modalities background conversation_id label return_bytes no_logs custom_labels "
    "routing_key bootstrap_pair_key external_trace_header "
    "received_time".split()
)
FIELDS = frozenset(
    "text input_ids input_embeds image_data video_data audio_data sampling_params rid "
    "return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
    "return_text_in_logprobs stream return_hidden_states session_params priority "
    "extra_key cache_salt timeout logit_processor custom_logit_processor data_parallel_rank "
    "routed_dp_rank".split()
)
MAX_BATCH = 4096
KINDS: tuple[Literal["image", "video", "audio"], ...] = ("image", "video", "audio")
MAX_RID_CHARS = 256


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image, video or audio as the client names it; a tuple holds the frames of a video, an
    object what a processor or an encoder made (``multimodal/features.py``). ``where`` is the field
    that errors name."""

    value: str | bytes | tuple[str | bytes, ...] | Mapping[str, Any]
    where: str
    kind: Literal["image", "video", "audio"] = "image"


@dataclass(slots=True)
class Batch:
    """The requests of one call, and what their answers must look like."""

    requests: list[GenerateRequest]
    is_list: bool
    stream: bool
    wants_logprobs: list[bool] = field(default_factory=list)
    logprob_text: bool = False
    images: list[list[MediaSource]] = field(default_factory=list)
    stream_disjoint: bool = False


def read_generate(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Batch:
    """Check a ``/generate`` body; InvalidRequest names the field. ``defaults``: sampling values of
    the model's generation_config.json, for what the request leaves out."""
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body must be a JSON object")
    for name, value in body.items():
        _check_field(name, value)
    prompts, is_list = _prompts(body)
    stream = _bool(body, "stream")
    each = _Each(body, len(prompts), is_list)
    base = default_sampling(defaults or {})
    requests = [_request(each, i, prompt, base, stream) for i, prompt in enumerate(prompts)]
    counts = {r.sampling.n for r in requests}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params.n must be the same in a batch", param="n")
    return Batch(
        requests=requests,
        is_list=is_list or counts != {1},
        stream=stream,
        wants_logprobs=[bool(each("return_logprob", i)) for i in range(len(prompts))],
        images=[media_of(body, i, is_list) for i in range(len(prompts))],
        logprob_text=_bool(body, "return_text_in_logprobs"),
    )


def media_of(body: Mapping[str, Any], i: int, is_list: bool) -> list[MediaSource]:
    """The media of prompt i: a field holds one or a list for a single prompt, and for a list of
    prompts one or a list each; URLs, base64, paths or bytes; a video may be a list of frames."""
    sources = []
    for kind in KINDS:
        where = f"{kind}_data"
        value = body.get(where)
        if is_list and isinstance(value, list):
            value = value[i] if i < len(value) else None
        for one in value if isinstance(value, list) else [value]:
            if one is not None and is_features(one):
                sources.append(MediaSource(one, where, kind))
                continue
            held = one.get("url") if isinstance(one, Mapping) else one
            if held is not None:
                sources.append(MediaSource(_named(held, kind, where), where, kind))
    return sources


def _named(held: Any, kind: str, where: str) -> str | bytes | tuple[str | bytes, ...]:
    if kind == "video" and isinstance(held, list) and held:
        return tuple(_file(one, where) for one in held)
    return _file(held, where)


def _file(held: Any, where: str) -> str | bytes:
    if not isinstance(held, str | bytes) or not held:
        raise InvalidRequest(f"{where} must hold URLs, data URIs or base64", where)
    return held


def default_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """What generation_config.json says about sampling, over our defaults."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {n: generation[n] for n in names if generation.get(n) is not None}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    if values.get("top_k") == 0:
        values["top_k"] = -1
    return SamplingParams.from_dict(values)


def _check_field(name: str, value: Any) -> None:
    if name in FIELDS or name in IGNORED:
        return
    if name in UNBUILT:
        message, harmless = UNBUILT[name]
        if value not in harmless:
            raise InvalidRequest(f"{name}: {message}", param=name)
        return
    raise InvalidRequest(f"unknown field {name!r}", param=str(name))


def _bool(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return value


def _prompts(body: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], bool]:
    """[(kind, prompt)] and whether a list was given."""
    given = [k for k in ("text", "input_ids", "input_embeds") if body.get(k) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "exactly one of text, input_ids and input_embeds must be given", param="text"
        )
    kind = given[0]
    value = body[kind]
    depth = {"text": 0, "input_ids": 1, "input_embeds": 2}[kind]
    if kind == "text" and isinstance(value, str):
        return [(kind, value)], False
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{kind} must be a prompt or a list of prompts", param=kind)
    nested = value
    for _ in range(depth):
        nested = nested[0] if isinstance(nested, list) and nested else None
    is_list = kind == "text" or isinstance(nested, list)
    prompts = value if is_list else [value]
    if len(prompts) > MAX_BATCH:
        raise InvalidRequest(f"{kind}: at most {MAX_BATCH} prompts a call", param=kind)
    for prompt in prompts:
        _check_prompt(kind, prompt)
    return [(kind, prompt) for prompt in prompts], is_list


def _check_prompt(kind: str, prompt: Any) -> None:
    if kind == "text":
        fits = isinstance(prompt, str)
    elif kind == "input_ids":
        fits = isinstance(prompt, list) and set(map(type, prompt)) <= {int}
    else:
        fits = isinstance(prompt, list) and all(isinstance(row, list) for row in prompt)
    if not fits:
        wanted = {"text": "strings", "input_ids": "lists of integers"}.get(kind, "lists of rows")
        raise InvalidRequest(f"{kind} must hold {wanted}", param=kind)


class _Each:
    """A field's value for prompt i: fields are scalar, or lists as long as the batch."""

    def __init__(self, body: Mapping[str, Any], count: int, is_list: bool) -> None:
        self._body, self._count, self._is_list = body, count, is_list

    def is_shared(self, name: str) -> bool:
        """Whether one value stands for several prompts."""
        return self._count > 1 and not isinstance(self._body.get(name), list)

    def __call__(self, name: str, i: int) -> Any:
        value = self._body.get(name)
        if not isinstance(value, list):
            return value
        if name == "token_ids_logprob" and not any(isinstance(v, list | None) for v in value):
            return value
        if len(value) != self._count:
            raise InvalidRequest(
                f"{name} has {len(value)} entries for {self._count} prompts", param=name
            )
        return value[i]


def _request(
    each: _Each, i: int, prompt: tuple[str, Any], base: SamplingParams, stream: bool
) -> GenerateRequest:
    kind, value = prompt
    params = each("sampling_params", i)
    if params is not None and not isinstance(params, Mapping):
        raise InvalidRequest("sampling_params must be an object", param="sampling_params")
    sampling = SamplingParams.from_dict(params or {}, base)
    request = GenerateRequest(
        sampling=sampling,
        rid=_rid(each, i),
        stream=stream,
        logprobs=_logprob_need(each, i, sampling.max_new_tokens == 0),
        return_hidden_states=bool(_typed(each, "return_hidden_states", i, bool)),
        extra_key=prefix_key(_typed(each, "extra_key", i, str), _typed(each, "cache_salt", i, str)),
        priority=_within(each, "priority", i, int, -(1 << 31), (1 << 31) - 1) or 0,
        timeout_s=_within(each, "timeout", i, float, 0, 1e9),
        replica=replica_of(
            _typed(each, "data_parallel_rank", i, int), _typed(each, "routed_dp_rank", i, int)
        ),
        session=each("session_params", i),
        processor=processor_name(each("custom_logit_processor", i), each("logit_processor", i)),
        names={"max_tokens": "max_new_tokens", "prompt": kind, "text": kind}
        | {"top_logprobs": "top_logprobs_num"},
    )
    if each("routed_dp_rank", i) is not None:
        request.names["data_parallel_rank"] = "routed_dp_rank"
    if kind == "text":
        request.text = value
    elif kind == "input_ids":
        request.input_ids = value
    else:
        request.embeds, request.num_embeds = _embeds(value)
    return request


def prefix_key(extra_key: str | None, cache_salt: str | None) -> str | None:
    """What separates prefix caches: the two together, each counting by itself."""
    if cache_salt is None:
        return extra_key
    return f"{extra_key or ''}\0{cache_salt}"


def replica_of(data_parallel_rank: int | None, routed_dp_rank: int | None) -> int | None:
    """The replica that a request wants, under its older and its newer name."""
    if None not in (data_parallel_rank, routed_dp_rank) and data_parallel_rank != routed_dp_rank:
        raise InvalidRequest("routed_dp_rank says other than data_parallel_rank", "routed_dp_rank")
    return data_parallel_rank if routed_dp_rank is None else routed_dp_rank


def _embeds(rows: list[Any]) -> tuple[bytes, int]:
    try:
        array = np.asarray(rows, dtype="<f4")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("input_embeds must be rows of numbers", "input_embeds") from error
    if array.ndim != 2 or not np.isfinite(array).all():
        raise InvalidRequest("input_embeds must be finite rows of one length", "input_embeds")
    return array.tobytes(), len(array)


def _typed(each: _Each, name: str, i: int, kind: type) -> Any:
    value = each(name, i)
    if value is None:
        return None
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise InvalidRequest(f"{name} must be of type {kind.__name__}", param=name)
    return value


def _within(each: _Each, name: str, i: int, kind: type, low: float, high: float) -> Any:
    value = _typed(each, name, i, kind)
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}", param=name)
    return value


def _rid(each: _Each, i: int) -> str | None:
    """An id that can stand in logs and addresses."""
    rid: str | None = _typed(each, "rid", i, str)
    if rid is None:
        return None
    if not 0 < len(rid) <= MAX_RID_CHARS or not rid.isascii() or not rid.isprintable():
        raise InvalidRequest(f"rid must be 1 to {MAX_RID_CHARS} printable characters", param="rid")
    return f"{rid}_{i}" if each.is_shared("rid") else rid


def _logprob_need(each: _Each, i: int, is_only_prompt: bool) -> LogprobParams | None:
    """``is_only_prompt``: no token comes, so the prompt's are what is wanted."""
    if not _typed(each, "return_logprob", i, bool):
        return None
    start = _typed(each, "logprob_start_len", i, int)
    top = _typed(each, "top_logprobs_num", i, int) or 0
    asked = each("token_ids_logprob", i) or []
    if top < 0:
        raise InvalidRequest("top_logprobs_num must be 0 or more", param="top_logprobs_num")
    if not isinstance(asked, list) or not all(type(t) is int and t >= 0 for t in asked):
        raise InvalidRequest("token_ids_logprob must be token ids", param="token_ids_logprob")
    if start in (None, -1):
        start = 0 if is_only_prompt else -1
    return LogprobParams(start, top, tuple(asked))


# ---- answers -------------------------------------------------------------------------------


class Reply:
    """Makes the answers of one call from Outputs."""

    def __init__(
        self, tokenizer: Tokenizer | None, batch: Batch, weight_version: str, dim: int = 0
    ) -> None:
        """``dim``: numbers of a hidden state."""
        self._tokenizer, self._batch, self._version = tokenizer, batch, weight_version
        self._dim = dim
        self._began_s = time.monotonic()
        self.last_finish = Finish("abort")  # of the sample that ended last

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """The finished answer of sample ``output`` of prompt ``index``."""
        answer: dict[str, Any] = {}
        if self._tokenizer is not None:
            answer["text"] = output.text
        answer["output_ids"] = output.token_ids
        answer["meta_info"] = self._meta(index, output)
        return answer

    def _meta(self, index: int, output: Output) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": finish_reason(output.finish, output.completion_tokens),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "weight_version": self._version,
            "num_retractions": output.retractions,
            "queue_time": output.queue_time_s,
        }
        if output.finish is not None:
            self.last_finish = output.finish
            meta["e2e_latency"] = time.monotonic() - self._began_s
        if self._batch.wants_logprobs[index]:
            self._add_logprobs(self._batch.requests[index].logprobs, output, meta)
        if output.hidden_states is not None:
            meta["hidden_states"] = hidden_rows(output, self._dim)
        if output.pooled is not None:
            meta["pooled"] = output.pooled
        return meta

    def _add_logprobs(
        self, need: LogprobParams | None, output: Output, meta: dict[str, Any]
    ) -> None:
        assert need is not None
        for side, got in (("input", output.prompt_logprobs), ("output", output.logprobs)):
            chosen = got.chosen if got else []
            meta[f"{side}_token_logprobs"] = [self._chosen(c) for c in chosen]
            if need.top:
                meta[f"{side}_top_logprobs"] = [self._top(t) for t in (got.top if got else [])]
            if need.token_ids:
                asked = got.asked if got else []
                meta[f"{side}_token_ids_logprobs"] = [self._top(t) for t in asked]

    def _chosen(self, chosen: Logprob) -> list[Any]:
        return [chosen[0], chosen[1], self._text_of(chosen[1])]

    def _top(self, top: TopLogprobs | None) -> list[Any] | None:
        return None if top is None else [[lp, t, self._text_of(t)] for lp, t in top]

    def _text_of(self, token_id: int) -> str | None:
        if not self._batch.logprob_text or self._tokenizer is None:
            return None
        return self._tokenizer.token_text(token_id)

    async def stream(self, intake: TokenizerManager) -> AsyncIterator[dict[str, Any]]:
        """Answers so far, one as often as something is new; cumulative unless disjoint."""
        queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for output in intake.stream(self._batch.requests[index]):
                    await queue.put((index, output))
                await queue.put(None)
            except Exception as error:  # handed to the reader, who raises it
                await queue.put(error)

        tasks = [asyncio.create_task(pump(i)) for i in range(len(self._batch.requests))]
        total: dict[tuple[int, int], Output] = {}
        left = len(tasks)
        try:
            while left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    left -= 1
                    continue
                yield self._event(event[0], event[1], total)
        finally:
            for task in tasks:
                task.cancel()

    def _event(
        self, index: int, output: Output, total: dict[tuple[int, int], Output]
    ) -> dict[str, Any]:
        key = (index, output.index)
        if key in total and not self._batch.stream_disjoint:
            total[key].absorb(output)
        else:
            total[key] = output
        answer = self.whole(index, total[key])
        answer["output_ids"] = list(answer["output_ids"])
        if self._batch.is_list:
            answer["index"] = index * self._batch.requests[index].sampling.n + output.index
        return answer


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """Row MI-02."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": length}
    return {
        "type": "abort",
        "message": finish.message or "aborted",
        "status_code": finish.status or None,
        "err_type": None if finish.kind == "abort" else "EngineError",
    }


def hidden_rows(output: Output, dim: int) -> list[Any]:
    """Hidden states as the reference gives them, an entry a step: the rows of the prompt together,
    then one row a token. ``dim`` numbers a row; what has come last is at the end of ``output``."""
    rows = np.frombuffer(b"".join(output.hidden_states or ()), np.float32)
    rows = rows.reshape(-1, dim if dim and not len(rows) % dim else max(1, len(rows)))
    num_placeholders = output.prompt_tokens + max(output.completion_tokens - 1, 0)
    num_prompt = min(len(rows), max(0, output.prompt_tokens - (num_placeholders - len(rows))))
    prompt = [rows[:num_prompt].tolist()] if num_prompt else []
    return [*prompt, *rows[num_prompt:].tolist()]


def last_hidden(output: Output, dim: int) -> list[float]:
    """The hidden state of the last place, all that OpenAI's routes give."""
    rows = np.frombuffer((output.hidden_states or [b""])[-1], np.float32)
    return list(rows[-dim:].tolist())
