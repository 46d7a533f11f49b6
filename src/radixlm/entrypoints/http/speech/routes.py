"""/v1/audio/transcriptions and /v1/audio/translations."""

import math
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.middleware import fair_share_key
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.sampling import check_sampling
from radixlm.entrypoints.http.speech import formats
from radixlm.entrypoints.http.speech.form import FORMATS, Form, read_form
from radixlm.entrypoints.http.speech.formats import Span, Transcript
from radixlm.entrypoints.http.speech.transcribers import (
    Ask,
    TokenTranscriber,
    Transcriber,
    transcriber_of,
)
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import DONE, cancel_on_disconnect, event, stream_response
from radixlm.entrypoints.media import MediaReader
from radixlm.intake.records import GenerateRequest, Output
from radixlm.multimodal.audio import Samples, cut
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams, parameter_names

router = APIRouter(tags=["openai"])

MAX_AT_ONCE = 8  # windows of one audio clip
PROCESSOR = "transcript"


@dataclass(slots=True)
class Call:
    """One audio clip, read and cut into windows: (where it begins in seconds, samples)."""

    state: ServerState
    media: MediaReader
    transcriber: Transcriber
    form: Form
    model: str
    sampling: SamplingParams
    windows: list[tuple[float, Samples]]
    duration_s: float
    language: str = ""
    id: str = field(default_factory=lambda: f"trsc-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def end_s(self, index: int) -> float:
        began_s, samples = self.windows[index]
        return began_s + len(samples) / self.media.rate

    async def request(
        self, ask: Ask, samples: Samples, sampling: SamplingParams, need: LogprobParams | None
    ) -> GenerateRequest:
        """A request about one window."""
        options = {"custom_params": ask.options} if ask.options else {}
        return GenerateRequest(
            sampling=SamplingParams.from_dict(options, sampling),
            prompt=await self.media.audio_prompt(ask.text, samples, "file"),
            stream=self.form.stream,
            logprobs=need,
            processor=PROCESSOR if ask.options else None,
            fair_key=fair_share_key(),
        )


def _documented() -> dict[str, Any]:
    text, flag, number = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
    fields: dict[str, Any] = {
        "file": {"type": "string", "format": "binary"},
        "model": text,
        "language": text,
        "prompt": text,
        "response_format": {"type": "string", "enum": list(FORMATS)},
        "temperature": number,
        "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment"]}},
        "include[]": {"type": "array", "items": {"enum": ["logprobs"]}},
        "stream": flag,
    }
    schema = {"type": "object", "required": ["file"], "properties": fields}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


@router.post("/v1/audio/transcriptions", openapi_extra=_documented())
async def transcriptions(request: Request) -> Response:
    """The transcript of an audio file."""
    return await _answer(request, into_english=False)


@router.post("/v1/audio/translations", openapi_extra=_documented())
async def translations(request: Request) -> Response:
    """The transcript of an audio file, translated to English."""
    return await _answer(request, into_english=True)


async def _answer(request: Request, into_english: bool) -> Response:
    state = state_of(request)
    transcriber = transcriber_of(state)
    form = await read_form(request, into_english)
    call = await _call(state, transcriber, form)
    if form.stream:
        return await stream_response(request, _events(call))
    transcript = await cancel_on_disconnect(request, _transcript(call))
    match form.response_format:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(formats.srt(transcript))
        case "vtt":
            return PlainTextResponse(formats.vtt(transcript), media_type="text/vtt")
        case "verbose_json":
            return json_response(formats.verbose_json(transcript, call.sampling.temperature))
        case _:
            return json_response(formats.plain_json(transcript))


async def _call(state: ServerState, transcriber: Transcriber, form: Form) -> Call:
    """Check the form and read the audio."""
    assert state.media is not None
    model = state.check_model(form.model)
    transcriber.check(form)
    base = SamplingParams(temperature=0.0, max_new_tokens=None)
    sampling = SamplingParams.from_dict(form.sampling, base)
    check_sampling(state, sampling, parameter_names("sampling_params", "speech"))
    await state.media.ready()
    samples = await state.media.audio(form.data, "file")
    longest_s = state.media.window_s or math.inf
    duration_s = len(samples) / state.media.rate
    is_short = duration_s <= longest_s
    windows = [(0.0, samples)] if is_short else cut(samples, state.media.rate, longest_s)
    call = Call(state, state.media, transcriber, form, model, sampling, windows, duration_s)
    call.language = form.language or ""
    return call


async def _probe(call: Call, transcriber: TokenTranscriber, index: int) -> tuple[str, float]:
    """The language of a window, and how likely it is that nobody speaks."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    need = LogprobParams(token_ids=(transcriber.no_speech, *transcriber.languages.values()))
    request = await call.request(transcriber.probe(), call.windows[index][1], sampling, need)
    [[output]] = await generate.collect(call.state, [request])
    assert output.logprobs is not None and output.logprobs.asked[0] is not None
    silence, *languages = (logprob for logprob, _ in output.logprobs.asked[0])
    spoken = max(zip(languages, transcriber.languages, strict=True), key=lambda pair: pair[0])
    return spoken[1], math.exp(silence)


async def _find_language(call: Call) -> None:
    transcriber = call.transcriber
    if call.language or not isinstance(transcriber, TokenTranscriber):
        return
    if transcriber.finds_language:
        call.language, _ = await _probe(call, transcriber, 0)
    else:
        call.language = "en"  # the only one that such a model knows


async def _transcript(call: Call) -> Transcript:
    """The whole answer."""
    await _find_language(call)
    is_timed = call.form.is_timed and call.transcriber.knows_times
    need = LogprobParams() if call.form.wants_logprobs or is_timed else None
    outputs: list[Output] = []
    for first in range(0, len(call.windows), MAX_AT_ONCE):
        ask = call.transcriber.ask(call.form, call.language)
        some = call.windows[first : first + MAX_AT_ONCE]
        requests = [await call.request(ask, one, call.sampling, need) for _, one in some]
        outputs += [one for [one] in await generate.collect(call.state, requests)]
    task = "translate" if call.form.into_english else "transcribe"
    transcript = Transcript("", call.duration_s, call.language, task)
    if is_timed:
        transcript.spans = await _spans(call, outputs)
        transcript.text = "".join(span.text for span in transcript.spans).strip()
    else:
        transcript.text = _text(call, outputs, transcript)
    if call.form.wants_logprobs:
        transcript.logprobs = [one for output in outputs for one in _logprobs(call, output)]
    return transcript


def _text(call: Call, outputs: list[Output], transcript: Transcript) -> str:
    text = ""
    for output in outputs:
        reader = call.transcriber.reader()
        text += reader.feed(output.text) + reader.finish()
        transcript.language = transcript.language or reader.language
    return text.strip()


async def _spans(call: Call, outputs: list[Output]) -> list[Span]:
    transcriber = call.transcriber
    assert isinstance(transcriber, TokenTranscriber)
    spans = []
    for index, output in enumerate(outputs):
        segments = transcriber.spans(
            _words(call, output), call.windows[index][0], call.end_s(index)
        )
        wants_more = call.form.response_format == "verbose_json" and transcriber.finds_language
        silence = (await _probe(call, transcriber, index))[1] if wants_more else 0.0
        chosen = [one[0] or 0.0 for one in (output.logprobs.chosen if output.logprobs else [])]
        for span in segments:
            span.avg_logprob = sum(chosen) / max(len(chosen), 1)
            span.no_speech_prob = silence
        spans += segments
    return spans


def _words(call: Call, output: Output) -> list[int]:
    """The tokens without the one that ended them."""
    ids = output.token_ids
    return ids[:-1] if ids and ids[-1] in call.state.info.eos_ids else ids


def _logprobs(call: Call, output: Output) -> list[dict[str, Any]]:
    tokenizer, ids = call.state.require_tokenizer(), _words(call, output)
    chosen = output.logprobs.chosen if output.logprobs else []
    return [
        {
            "token": tokenizer.token_text(token),
            "bytes": list(tokenizer.token_bytes(token)),
            "logprob": one[0],
        }
        for token, one in zip(ids, chosen, strict=False)
    ]


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    """Deltas, window by window, then the whole text; each readable by OpenAI's clients, by its
    type, and by those that expect choices."""
    text = ""
    await _find_language(call)
    for _, samples in call.windows:
        ask = call.transcriber.ask(call.form, call.language)
        need = LogprobParams() if call.form.wants_logprobs else None
        request = await call.request(ask, samples, call.sampling, need)
        reader = call.transcriber.reader()
        held: list[dict[str, Any]] = []  # of tokens whose text is held back
        async with aclosing(generate.stream(call.state, [request])) as deltas:
            async for _, output in deltas:
                new = reader.feed(output.text)
                new += reader.finish() if output.finish is not None else ""
                new = new if text else new.lstrip()
                text += new
                held += _logprobs(call, output) if need else []
                if new or (held and output.finish is not None):
                    yield event(_delta(call, new, held if need else None))
                    held = []
    done = {"type": "transcript.text.done", "text": text.strip()}
    yield event(_chunk(call, {}, "stop") | done | {"usage": formats.usage_of(call.duration_s)})
    yield DONE


def _delta(call: Call, new: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    chunk = _chunk(call, {"content": new}, None) | {"type": "transcript.text.delta", "delta": new}
    return chunk if logprobs is None else chunk | {"logprobs": logprobs}


def _chunk(call: Call, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {
        "id": call.id,
        "object": "transcription.chunk",
        "created": call.created,
        "model": call.model,
        "choices": [choice],
    }
