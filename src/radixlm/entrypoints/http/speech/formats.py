"""What a transcript looks like: JSON with and without times, text, SubRip and WebVTT."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixlm.entrypoints.http.speech.languages import LANGUAGES


@dataclass(slots=True)
class Span:
    """The transcript from ``start_s`` to ``end_s`` of the audio. ``seek``: where its
    window begins, in hundredths of a second."""

    start_s: float
    end_s: float
    text: str
    tokens: list[int] = field(default_factory=list)
    seek: int = 0
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """How often a text repeats itself: bytes by bytes of its compression."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw)) if raw else 0.0


@dataclass(slots=True)
class Transcript:
    """``language``: a code, or "" where nothing is known of it."""

    text: str
    duration_s: float
    language: str = ""
    task: str = "transcribe"
    spans: Sequence[Span] = ()
    logprobs: list[dict[str, Any]] | None = None


def usage_of(duration_s: float) -> dict[str, Any]:
    """Begun seconds."""
    return {"type": "duration", "seconds": math.ceil(duration_s)}


def plain_json(transcript: Transcript) -> dict[str, Any]:
    """response_format json."""
    answer: dict[str, Any] = {"text": transcript.text, "usage": usage_of(transcript.duration_s)}
    return answer if transcript.logprobs is None else answer | {"logprobs": transcript.logprobs}


def verbose_json(transcript: Transcript, temperature: float) -> dict[str, Any]:
    """response_format verbose_json."""
    segments = [
        {
            "id": index,
            "seek": span.seek,
            "start": round(span.start_s, 3),
            "end": round(span.end_s, 3),
            "text": span.text,
            "tokens": span.tokens,
            "temperature": temperature,
            "avg_logprob": span.avg_logprob,
            "compression_ratio": span.compression_ratio,
            "no_speech_prob": span.no_speech_prob,
        }
        for index, span in enumerate(transcript.spans)
    ]
    return {
        "task": transcript.task,
        "language": LANGUAGES.get(transcript.language, transcript.language),
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "segments": segments,
        "usage": usage_of(transcript.duration_s),
    }


def srt(transcript: Transcript) -> str:
    """SubRip."""
    cues = [
        f"{index}\n{_clock(span.start_s, ',')} --> {_clock(span.end_s, ',')}\n{_line(span)}\n"
        for index, span in enumerate(transcript.spans, 1)
    ]
    return "\n".join(cues)


def vtt(transcript: Transcript) -> str:
    """WebVTT."""
    cues = [
        f"{_clock(span.start_s, '.')} --> {_clock(span.end_s, '.')}\n{_line(span)}\n"
        for span in transcript.spans
    ]
    return "\n".join(("WEBVTT\n", *cues))


def _line(span: Span) -> str:
    return span.text.strip().replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
