"""The form of a transcription request: OpenAI's fields, each checked, all others refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.speech.languages import code_of
from radixlm.wire.fields import fields_of
from radixlm.wire.sampling_params import SAMPLING_FIELDS
from radixlm.wire.unknown import note_unknown

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
TIMED = ("srt", "verbose_json", "vtt")
MAX_PROMPT_CHARS = 20_000
_GRANULARITIES = "timestamp_granularities"
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_SAMPLING = fields_of("speech", SAMPLING_FIELDS)


@dataclass(slots=True)
class Form:
    """``language``: an ISO code, of the speech. ``sampling``: fields of SamplingParams.
    ``into_english``: translate the transcript to English."""

    data: bytes
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    stream: bool = False
    wants_logprobs: bool = False
    into_english: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def is_timed(self) -> bool:
        """Whether the answer has timestamps."""
        return self.response_format in TIMED


async def read_form(request: Request, into_english: bool) -> Form:
    """InvalidRequest names the field."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("send the audio as multipart/form-data", "file")
    async with request.form(max_files=2, max_fields=32) as sent:
        file = sent.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: send the audio in the form field 'file'", "file")
        form = Form(await file.read(), into_english=into_english)
        for name, value in sent.multi_items():
            if name != "file":
                if not isinstance(value, str):
                    raise InvalidRequest(f"{name}: must be text", name)
                _take(form, name, value)
    if not form.data:
        raise InvalidRequest("file: is empty", "file")
    _check(form)
    return form


def _take(form: Form, name: str, value: str) -> None:
    name = name.removesuffix("[]")
    if name in _SAMPLING:
        if value != "":
            parameter = _SAMPLING[name]
            form.sampling[parameter.name] = _number(name, value, parameter.kind)
    elif name in _TAKEN:
        _TAKEN[name](form, value)
    elif name != "user":
        note_unknown(name)


def _number(name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}: must be a number, not {value!r:.40}", name)
    return number


def _model(form: Form, value: str) -> None:
    form.model = value or None


def _language(form: Form, value: str) -> None:
    form.language = code_of(value) if value.strip() else None


def _to_language(form: Form, value: str) -> None:
    if value and not form.into_english:
        raise InvalidRequest("to_language: is of /v1/audio/translations", "to_language")
    if value.strip().lower() not in ("", "en", "english"):
        raise InvalidRequest("to_language: translations are into English", "to_language")


def _prompt(form: Form, value: str) -> None:
    if len(value) > MAX_PROMPT_CHARS:
        raise InvalidRequest(f"prompt: more than {MAX_PROMPT_CHARS} characters", "prompt")
    form.prompt = value


def _format(form: Form, value: str) -> None:
    if value and value not in FORMATS:
        raise InvalidRequest(
            f"response_format must be one of {', '.join(FORMATS)}, not {value!r:.40}",
            "response_format",
        )
    form.response_format = value or "json"


def _stream(form: Form, value: str) -> None:
    if value.lower() not in (*_TRUE, *_FALSE):
        raise InvalidRequest(f"stream must be true or false, not {value!r:.40}", "stream")
    form.stream = value.lower() in _TRUE


def _times(form: Form, value: str) -> None:
    if value == "word":
        raise InvalidRequest(f"{_GRANULARITIES}: words have no times here", _GRANULARITIES)
    if value not in ("segment", ""):
        raise InvalidRequest(f"{_GRANULARITIES} must be segment", _GRANULARITIES)


def _chunks(form: Form, value: str) -> None:
    if value not in ("auto", ""):
        raise InvalidRequest("chunking_strategy must be auto", "chunking_strategy")


def _include(form: Form, value: str) -> None:
    if value != "logprobs":
        raise InvalidRequest("include must be logprobs", "include")
    form.wants_logprobs = True


_TAKEN: dict[str, Callable[[Form, str], None]] = {
    "model": _model,
    "language": _language,
    "to_language": _to_language,
    "prompt": _prompt,
    "response_format": _format,
    "stream": _stream,
    _GRANULARITIES: _times,
    "chunking_strategy": _chunks,
    "include": _include,
}


def _check(form: Form) -> None:
    if form.stream and form.response_format not in ("json", "text"):
        raise InvalidRequest("stream: a stream is of json or text", "response_format")
    if form.wants_logprobs and form.response_format != "json":
        raise InvalidRequest("include: logprobs need response_format json", "include")
