"""How each model is asked for a transcript, and how its answer is read (``MultimodalSpec``).

instruct: by an instruction in its chat format. tokens: by special tokens for language and task
(Whisper). marked: by a token behind the audio (Voxtral). tagged: the answer has a tag between the
language and the transcript (Qwen3-ASR).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.speech.form import Form
from radixlm.entrypoints.http.speech.formats import Span
from radixlm.entrypoints.http.speech.languages import LANGUAGES, code_of
from radixlm.entrypoints.http.state import ServerState

_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
_STEP_S = 0.02  # seconds between two timestamp tokens
_TAG = "<asr_text>"
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt with a placeholder for the audio; ``options``: of the logit processor."""

    text: str
    options: Options | None = None


class Reader(Protocol):
    """Reads one answer as it comes."""

    language: str  # a code; "" as long as it is not known

    def feed(self, text: str) -> str:
        """The new part of the transcript."""

    def finish(self) -> str:
        """The rest, which was held back."""


class PlainReader:
    """The answer is the transcript."""

    language = ""

    def feed(self, text: str) -> str:
        return _TIMESTAMP.sub("", text)

    def finish(self) -> str:
        return ""


class TaggedReader:
    """The language, a tag, then the transcript; all of it where no tag comes early."""

    _MAX_HEAD = 200  # characters before a tag

    def __init__(self) -> None:
        self.language, self._held, self._is_read = "", "", False

    def feed(self, text: str) -> str:
        if self._is_read:
            return text
        self._held += text
        head, tag, rest = self._held.partition(_TAG)
        if not tag and len(self._held) < self._MAX_HEAD:
            return ""
        self._is_read = True
        if not tag:
            return self._held
        self._name(head)
        return rest

    def finish(self) -> str:
        return "" if self._is_read else self._held

    def _name(self, head: str) -> None:
        name = head.strip().removeprefix("language").strip()
        try:
            self.language = code_of(name)
        except InvalidRequest:
            self.language = ""


class Transcriber:
    """Asks with an instruction, in the model's chat format."""

    knows_times = False
    finds_language = False  # can tell the language before the transcript

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def check(self, form: Form) -> None:
        """InvalidRequest for options that the model does not have."""
        if form.is_timed and not self.knows_times and form.response_format != "verbose_json":
            raise InvalidRequest(
                f"response_format: this model gives no times for {form.response_format}",
                "response_format",
            )

    def ask(self, form: Form, language: str) -> Ask:
        """The prompt for an audio clip; ``language`` is a code or ""."""
        translate = "Translate the audio into English text." if form.into_english else None
        row = self._state.info.media
        trained = row.instruction if row is not None else ""
        text = translate or trained or "Transcribe the audio into text."
        if language:
            text += f" It is in {LANGUAGES[language].title()}."
        if form.prompt:
            text += f" {form.prompt}"
        parts = [{"type": "audio"}, {"type": "text", "text": text}]
        return Ask(self._state.require_template().render([{"role": "user", "content": parts}]))

    def reader(self) -> Reader:
        return PlainReader()


class TaggedTranscriber(Transcriber):
    """The prompt is the audio alone; a known language starts the answer."""

    def check(self, form: Form) -> None:
        super().check(form)
        if form.into_english:
            raise InvalidRequest("this model transcribes and does not translate", "model")

    def ask(self, form: Form, language: str) -> Ask:
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "audio"}]}]
        if form.prompt:
            messages.insert(0, {"role": "system", "content": form.prompt})
        text = self._state.require_template().render(messages)
        return Ask(text + (f"language {LANGUAGES[language].title()}{_TAG}" if language else ""))

    def reader(self) -> Reader:
        return TaggedReader()


class MarkedTranscriber(Transcriber):
    """A token behind the audio; the model takes no prompt beside it."""

    def check(self, form: Form) -> None:
        super().check(form)
        if form.into_english:
            raise InvalidRequest("this model transcribes and does not translate", "model")
        if form.prompt:
            raise InvalidRequest("prompt: this model takes none with a transcription", "prompt")

    def ask(self, form: Form, language: str) -> Ask:
        prefix = f"lang:{language}" if language else ""
        return Ask(f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{prefix}[TRANSCRIBE]")


class TokenTranscriber(Transcriber):
    """Special tokens: the previous text, the start, the language, the task, no timestamps."""

    knows_times = True

    def check(self, form: Form) -> None:
        if "<|" in form.prompt:
            raise InvalidRequest("prompt: must hold no special tokens", "prompt")
        if form.language and form.language not in self.languages:
            known = self.languages or ("en",)
            if form.language not in known:
                raise InvalidRequest(f"language: this model knows {', '.join(known)}", "language")
        if form.into_english and not self.languages:
            raise InvalidRequest("this model knows English only", "model")

    @property
    def finds_language(self) -> bool:  # type: ignore[override]
        """Whether the model knows several."""
        return bool(self.languages)

    @cached_property
    def languages(self) -> dict[str, int]:
        """Code -> token id; none where the model knows English only."""
        if self._generation.get("is_multilingual") is False:
            return {}
        ids = {code: self._id(f"<|{code}|>") for code in LANGUAGES}
        return {code: token for code, token in ids.items() if token is not None}

    @cached_property
    def no_times(self) -> int:
        """The token for "no timestamps"; the ids behind it are the timestamps."""
        listed = self._generation.get("no_timestamps_token_id")
        token = listed if isinstance(listed, int) else self._id("<|notimestamps|>")
        if token is None:
            raise InvalidRequest("this model has no timestamps", "response_format")
        return token

    def ask(self, form: Form, language: str) -> Ask:
        task = "translate" if form.into_english else "transcribe"
        marks = f"<|{language}|><|{task}|>" if language and self.languages else ""
        times = "" if form.is_timed else self._piece(self.no_times)
        text = f"{self._before(form.prompt)}{self._start}{marks}{times}"
        return Ask(text, self._options(form.is_timed))

    def probe(self) -> Ask:
        """A prompt whose first token is the language."""
        return Ask(self._start)

    @property
    def no_speech(self) -> int:
        """The token for "no speech"."""
        return self.no_times - 1

    def spans(self, ids: list[int], began_s: float, ended_s: float) -> list[Span]:
        """Segments of an answer with times about [began_s, ended_s) of the audio."""
        tokenizer, seek = self._state.require_tokenizer(), round(began_s * 100)
        spans: list[Span] = []
        start_s, segment = began_s, list[int]()
        for token in ids:
            if token <= self.no_times:
                segment.append(token)
                continue
            at_s = min(began_s + (token - self.no_times - 1) * _STEP_S, ended_s)
            if segment:
                spans.append(Span(start_s, at_s, tokenizer.decode(segment), segment, seek))
                segment = []
            start_s = at_s
        if segment and tokenizer.decode(segment):
            spans.append(Span(start_s, ended_s, tokenizer.decode(segment), segment, seek))
        return spans

    def _before(self, prompt: str) -> str:
        """The end of the previous text, in at most half of the context."""
        if not prompt.strip():
            return ""
        tokenizer, limit = self._state.require_tokenizer(), self._state.info.context_len // 2 - 1
        ids = tokenizer.encode(" " + prompt.strip(), False)
        return "<|startofprev|>" + tokenizer.decode(ids[-limit:])

    def _options(self, is_timed: bool) -> Options:
        generation, vocab = self._generation, self._state.info.decoder.vocab
        options: Options = {
            "suppress": _known(generation.get("suppress_tokens"), vocab),
            "first_suppress": _known(generation.get("begin_suppress_tokens"), vocab),
        }
        if is_timed:
            latest = generation.get("max_initial_timestamp_index")
            end = next(iter(self._state.info.eos_ids), 0)
            options |= {"times_from": self.no_times + 1, "end": end, "latest_first": latest}
        return options

    @property
    def _generation(self) -> dict[str, Any]:
        return self._state.info.generation

    @property
    def _start(self) -> str:
        media = self._state.info.media
        assert media is not None
        return self._piece(media.tokens["audio"])

    def _id(self, piece: str) -> int | None:
        return self._state.require_tokenizer().token_id(piece)

    def _piece(self, token: int) -> str:
        return self._state.require_tokenizer().id_to_piece(token) or ""


def _known(ids: Any, vocab: int) -> list[int]:
    return [i for i in ids or () if isinstance(i, int) and 0 <= i < vocab]


_KINDS: dict[str, type[Transcriber]] = {
    "instruct": Transcriber,
    "tokens": TokenTranscriber,
    "marked": MarkedTranscriber,
    "tagged": TaggedTranscriber,
}


def transcriber_of(state: ServerState) -> Transcriber:
    """The model's; InvalidRequest for a model without audio input."""
    if state.media is None or "audio" not in state.media.kinds:
        raise InvalidRequest("this model has no audio input: serve one that has", "model")
    cached = state.extras.get(Transcriber)
    if cached is None:
        assert state.info.media is not None
        kind = _KINDS[state.info.media.transcriber]
        cached = state.extras[Transcriber] = kind(state)
    transcriber: Transcriber = cached
    return transcriber
