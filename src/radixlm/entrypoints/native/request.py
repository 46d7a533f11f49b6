"""The request of ``/generate``, over HTTP and to the offline engine: a JSON object in,
GenerateRequests out."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import Field, WithJsonSchema

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.config.serve import ServeConfig
from radixlm.entrypoints.media import MediaReader, MediaSource, media_of, with_options
from radixlm.entrypoints.request_model import (
    Body,
    Ints,
    PerPrompt,
    ResumeBody,
    Rid,
    Strings,
    make,
    of_prompt,
    reject_unsupported,
    with_fields,
)
from radixlm.entrypoints.request_options import request_options, unheld_of
from radixlm.intake.records import GenerateRequest
from radixlm.multimodal.processor import Prompt
from radixlm.text.answer_check import UnheldSchema
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams, parameter_names

MAX_BATCH = 4096
_ROW = {"type": "array", "items": {"type": "number"}}
_EMBEDS = {"type": "array", "items": {"anyOf": [_ROW, {"type": "array", "items": _ROW}]}}
Rows = Annotated[list[Any], WithJsonSchema(_EMBEDS)]  # numpy checks the numbers


class _SamplingSchema:
    """Shows ``sampling_params`` in the OpenAPI document; SamplingParams.from_dict reads them."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        schema = with_fields("sampling_params")(Body).model_json_schema()
        return schema | {"title": "SamplingParams", "description": "All are optional."}


Sampling = Annotated[dict[str, Any], _SamplingSchema()]

MAX_SCORED_CHARS = 64 << 20  # of the prompts that score_choices makes: no body has more


@with_fields("generate", per_prompt=True)
class GenerateBody(Body):
    """POST /generate: exactly one of ``text``, ``input_ids`` and ``input_embeds``, each one prompt
    or a list. Other fields hold one value for all prompts, or a list with a value a prompt.
    ``score_choices``: texts that might follow ``text``; a list of answers, with the
    log-probabilities of each and of two tokens before it."""

    text: str | Strings | None = None
    input_ids: Ints | list[Ints] | None = None
    input_embeds: Rows | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    sampling_params: PerPrompt[Sampling] = None
    rid: PerPrompt[Rid] = None
    stream: bool | None = None
    timeout: PerPrompt[Annotated[float, Field(ge=0, le=1e9)]] = None
    return_logprob: PerPrompt[bool] = None
    logprob_start_len: PerPrompt[int] = None
    top_logprobs_num: PerPrompt[Annotated[int, Field(ge=0)]] = None
    token_ids_logprob: list[int | Ints | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: PerPrompt[bool] = None
    return_entropy: PerPrompt[bool] = None
    return_prompt_token_ids: PerPrompt[bool] = None
    score_choices: Strings | None = None
    resume: ResumeBody | None = None


@dataclass(slots=True)
class Batch:
    """The requests of one call, and what their answers must look like."""

    requests: list[GenerateRequest]
    is_list: bool
    stream: bool
    wants_logprobs: list[bool] = field(default_factory=list)
    wants_last_hidden: list[bool] = field(default_factory=list)  # no hidden states before the last
    logprob_text: bool = False
    media: list[list[MediaSource]] = field(default_factory=list)
    stream_disjoint: bool = False
    resume: ResumeBody | None = None
    num_shown: int = 1  # samples of each prompt that are answered: n, of best_of

    def read_media(self, reader: MediaReader | None) -> None:
        """Give requests with media their prompts; InvalidRequest for a model that cannot read them.
        Takes as long as the fetches."""
        for request, sources in zip(self.requests, self.media, strict=True):
            if sources:
                able, prompt = _check_media(request, sources, reader)
                _set_prompt(request, able.read(prompt, sources, request.add_special_tokens))

    async def read_media_in_threads(self, reader: MediaReader | None) -> None:
        """``read_media`` in the threads of ``reader``."""
        for request, sources in zip(self.requests, self.media, strict=True):
            if sources:
                able, prompt = _check_media(request, sources, reader)
                adds = request.add_special_tokens
                _set_prompt(request, await able.prompt(prompt, sources, adds))


def read_generate(body: Mapping[str, Any], defaults: SamplingParams | None = None) -> Batch:
    """Check a ``/generate`` body; InvalidRequest names the field. ``defaults``: what a request that
    sets nothing has."""
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body must be a JSON object")
    try:
        checked = make(GenerateBody, dict(body))
    except InvalidRequest as error:
        error.param = re.split(r"[\[.]", error.param or "")[0] or None  # the field, not its items
        raise
    reject_unsupported(checked)
    prefix = checked.text if checked.score_choices is not None else None
    if checked.score_choices is not None:
        _expand_choices(checked)
    kind, prompts, is_list = _prompts(checked)
    count = len(prompts)
    asked = checked.token_ids_logprob or []
    is_flat = [isinstance(token, int) for token in asked]
    if not all(is_flat) and (any(is_flat) or not is_list):
        text = "token_ids_logprob must be a flat list of integers, or of a list for each prompt"
        raise InvalidRequest(text, "token_ids_logprob")
    values = [_values(checked, i, count) for i in range(count)]
    samplings = _Samplings(defaults or SamplingParams())
    requests = [_request(values[i], kind, prompt, samplings) for i, prompt in enumerate(prompts)]
    for request in requests if prefix is not None else ():
        request.scored_after = str(prefix)
    counts = {(r.sampling.n, r.sampling.best_of) for r in requests}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params.n must be the same in a batch", param="n")
    ((num_shown, _),) = counts
    has_beams = any(r.sampling.beam_width for r in requests)
    wants_logprobs = [bool(one.get("return_logprob")) for one in values]
    for request in requests:
        _compute_best_of(request)
    if checked.resume is not None and checked.resume.num_emitted:
        _set_emitted(requests, checked.resume.num_emitted)
    return Batch(
        requests=requests,
        num_shown=num_shown,
        is_list=is_list or (num_shown != 1 and (bool(checked.stream) or not has_beams)),
        stream=bool(checked.stream),
        wants_logprobs=wants_logprobs,
        wants_last_hidden=[one.get("return_hidden_states") == "last" for one in values],
        media=[
            with_options(media_of(checked, i, is_list), values[i].get("mm_processor_kwargs"))
            for i in range(count)
        ],
        logprob_text=bool(checked.return_text_in_logprobs),
        resume=checked.resume,
    )


def _expand_choices(body: GenerateBody) -> None:
    """The text with each of the choices as a prompt whose log-probabilities are asked for."""
    choices = body.score_choices
    if not isinstance(body.text, str) or not choices or body.stream:
        raise InvalidRequest(
            'score_choices needs one text, at least one choice and no stream: {"text": "The sky '
            'is", "score_choices": [" blue", " red"]}',
            "score_choices",
        )
    if any((body.image_data, body.video_data, body.audio_data)):
        raise InvalidRequest("score_choices is for prompts of text only", "score_choices")
    num_chars = len(body.text) * len(choices)
    if num_chars > MAX_SCORED_CHARS:
        raise InvalidRequest(
            f"score_choices: {len(choices)} choices behind {len(body.text)} characters are "
            f"{num_chars}, the limit is {MAX_SCORED_CHARS}: score fewer in one call",
            "score_choices",
        )
    if isinstance(body.sampling_params, list):
        text = 'sampling_params must be one object for all choices: {"temperature": 0}'
        raise InvalidRequest(text, "sampling_params")
    body.text = [body.text + choice for choice in choices]
    body.sampling_params = {**(body.sampling_params or {}), "max_new_tokens": 0}
    body.return_logprob, body.logprob_start_len = True, 0
    body.model_fields_set.update({"return_logprob", "logprob_start_len", "sampling_params"})


def _set_emitted(requests: list[GenerateRequest], count: int) -> None:
    """The last ``count`` ids are output, after which the answer goes on."""
    request = requests[0]
    if len(requests) > 1 or request.sampling.n > 1 or request.input_ids is None:
        text = "resume.num_emitted needs input_ids, of one prompt and with n 1"
        raise InvalidRequest(text, "resume.num_emitted")
    if count >= len(request.input_ids):
        raise InvalidRequest(
            f"resume.num_emitted: at most {len(request.input_ids) - 1} of {len(request.input_ids)} "
            "ids, as one must be the prompt's",
            "resume.num_emitted",
        )
    request.emitted, request.input_ids = request.input_ids[-count:], request.input_ids[:-count]


def _compute_best_of(request: GenerateRequest) -> None:
    """More samples than are answered, with the log-probabilities by which they are ranked."""
    sampling, best_of = request.sampling, request.sampling.best_of
    if best_of is None:
        return
    if best_of < sampling.n:
        raise InvalidRequest(f"best_of ({best_of}) must not be less than n", "best_of")
    if best_of > sampling.n:
        if request.stream:
            raise InvalidRequest("best_of: more samples than n cannot be streamed", "best_of")
        request.logprobs = request.logprobs or LogprobParams()
    request.sampling = msgspec.structs.replace(sampling, n=best_of, best_of=None)


def default_sampling(
    generation: Mapping[str, Any], options: ServeConfig | None = None
) -> SamplingParams:
    """What requests leave out: --preferred-sampling-params of ``options``, over what
    generation_config.json says about sampling, over our defaults. ConfigError names the flag."""
    preferred = json.loads((options and options.preferred_sampling_params) or "{}")
    names = parameter_names("checkpoint", "sampling_params")
    if options is not None and options.sampling_defaults == "openai":
        names = {}
    values = {name: generation[name] for name in names if generation.get(name) is not None}
    if names and generation.get("do_sample") is False:
        values["temperature"] = 0.0
    if values.get("top_k") == 0:
        values["top_k"] = -1
    try:
        found = SamplingParams.from_dict(preferred, SamplingParams.from_dict(values))
        found.validate(sys.maxsize)  # requests compare token ids with the vocabulary
    except InvalidRequest as error:
        raise ConfigError(f"--preferred-sampling-params: {error}") from None
    return found


def _prompts(body: GenerateBody) -> tuple[str, list[Any], bool]:
    """(the field, its prompts, whether it holds a list of them)."""
    kinds = [k for k in ("text", "input_ids", "input_embeds") if getattr(body, k) is not None]
    if len(kinds) != 1:
        raise InvalidRequest(
            "exactly one of text, input_ids and input_embeds must be given", param="text"
        )
    kind = kinds[0]
    value = getattr(body, kind)
    if kind == "text" and isinstance(value, str):
        return kind, [value], False
    if not value:
        raise InvalidRequest(f"{kind} must be a prompt or a list of prompts", param=kind)
    is_list = kind == "text" or (
        isinstance(value[0], list)
        and (kind == "input_ids" or (bool(value[0]) and isinstance(value[0][0], list)))
    )
    prompts = value if is_list else [value]
    if len(prompts) > MAX_BATCH:
        raise InvalidRequest(f"{kind}: at most {MAX_BATCH} prompts a call", param=kind)
    return kind, prompts, is_list


def _values(body: GenerateBody, i: int, count: int) -> dict[str, Any]:
    """The fields of prompt i: a field holds one value for all prompts, or a list with ``count``."""
    values = {}
    for name in body.model_fields_set - _OF_ALL:
        value = getattr(body, name)
        is_for_all = name == "token_ids_logprob" and all(isinstance(v, int) for v in value or ())
        values[name] = value if is_for_all else of_prompt(name, value, i, count)
    rid = values.get("rid")
    if rid is not None and count > 1 and not isinstance(body.rid, list):
        values["rid"] = f"{rid}_{i}"
    return values


_OF_ALL = set("text input_ids input_embeds image_data video_data audio_data".split())
_OF_ALL |= {"resume", "score_choices"}


class _Samplings:
    """Sampling parameters over ``defaults``, and what of their schemas is not enforced. An object
    that many prompts share is read once."""

    def __init__(self, defaults: SamplingParams) -> None:
        self._defaults = defaults
        self._known: dict[int, tuple[SamplingParams, UnheldSchema | None]] = {}

    def read(self, given: dict[str, Any] | None) -> tuple[SamplingParams, UnheldSchema | None]:
        """``given`` lives as long as this object."""
        found = self._known.get(id(given))
        if found is None:
            sampling = SamplingParams.from_dict(given or {}, self._defaults)
            if sampling.beam_width == 1:  # no beam search, as in SGLang
                sampling = msgspec.structs.replace(sampling, beam_width=None)
            unheld = unheld_of(sampling.json_schema, "sampling_params.json_schema")
            found = self._known[id(given)] = sampling, unheld
        return found


def _request(
    values: dict[str, Any], kind: str, prompt: Any, samplings: _Samplings
) -> GenerateRequest:
    """The request of one prompt. ``values``: its fields."""
    sampling, unheld = samplings.read(values.get("sampling_params"))
    options = request_options(values.get)
    options["names"] |= {"max_tokens": "max_new_tokens", "prompt": kind, "text": kind}
    options["names"] |= {"top_logprobs": "top_logprobs_num"}
    request = GenerateRequest(
        sampling=sampling, rid=values.get("rid"), stream=bool(values.get("stream")), **options
    )
    request.unheld = unheld
    if values.get("return_logprob"):
        request.logprobs = _logprobs(values, sampling.max_new_tokens == 0)
    request.routing_key = values.get("routing_key")
    request.requires_reasoning = bool(values.get("require_reasoning"))
    request.max_thinking_tokens = values.get("max_thinking_tokens")
    request.shows_prompt_ids = bool(values.get("return_prompt_token_ids"))
    if values.get("return_sampling_mask"):
        need = request.logprobs or LogprobParams()
        request.logprobs = msgspec.structs.replace(need, kept=True)
    if values.get("return_entropy"):
        need = request.logprobs or LogprobParams()
        request.logprobs = msgspec.structs.replace(need, entropy=True)
    if kind == "text":
        request.text = prompt
    elif kind == "input_ids":
        request.input_ids = prompt
    else:
        request.embeds, request.num_embeds = _embeds(prompt)
    return request


def _logprobs(values: dict[str, Any], is_only_prompt: bool) -> LogprobParams:
    """``is_only_prompt``: no token comes, so the prompt's are what is wanted."""
    start = values.get("logprob_start_len")
    if start in (None, -1):
        start = 0 if is_only_prompt else -1
    token_ids = values.get("token_ids_logprob") or ()
    return LogprobParams(start, values.get("top_logprobs_num") or 0, tuple(token_ids))


def _embeds(rows: list[Any]) -> tuple[bytes, int]:
    try:
        array = np.asarray(rows, dtype="<f4")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("input_embeds must be rows of numbers", "input_embeds") from error
    if array.ndim != 2 or not np.isfinite(array).all():
        raise InvalidRequest("input_embeds must be finite rows of one length", "input_embeds")
    return array.tobytes(), len(array)


def _check_media(
    request: GenerateRequest, sources: list[MediaSource], reader: MediaReader | None
) -> tuple[MediaReader, str | list[int]]:
    """The reader, and the text or token ids that ``sources`` belong to; InvalidRequest."""
    where = sources[0].where
    if reader is None:
        raise InvalidRequest(f"{where}: this model reads text only", where)
    for one in sources:
        if one.kind not in reader.kinds:
            raise InvalidRequest(f"{one.where}: this model does not read it", one.where)
    prompt = request.input_ids if request.text is None else request.text
    if prompt is None:
        raise InvalidRequest(f"{where} needs a text or input_ids with its placeholders", where)
    return reader, prompt


def _set_prompt(request: GenerateRequest, prompt: Prompt) -> None:
    request.prompt, request.text, request.input_ids = prompt, None, None
