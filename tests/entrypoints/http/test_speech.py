"""Transcriptions: languages, parsing of the model's output, formats; refusals of a model without
audio input."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.http_server import ScriptedServer

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.speech.formats import Span, Transcript, srt, verbose_json, vtt
from radixlm.entrypoints.http.speech.languages import LANGUAGES, code_of
from radixlm.entrypoints.http.speech.transcribers import PlainReader, TaggedReader


@pytest.mark.parametrize(
    ("given_", "code"),
    [
        ("en", "en"), ("EN-us", "en"), ("German", "de"), (" haitian creole ", "ht"), ("iw", "he"),
        ("Mandarin", "zh"), ("yue", "yue"), ("zh_CN", "zh"),
    ],
)  # fmt: skip
def test_languages_go_by_code_and_name(given_: str, code: str) -> None:
    assert code_of(given_) == code


def test_every_language_is_found_by_its_own_name() -> None:
    assert {code_of(name) for name in LANGUAGES.values()} == set(LANGUAGES)
    for wrong in ("", "xx", "klingon", "-en"):
        with pytest.raises(InvalidRequest, match="language"):
            code_of(wrong)


def _fed(reader: TaggedReader | PlainReader, text: str, cuts: list[int]) -> str:
    bounds = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    return "".join(map(reader.feed, parts)) + reader.finish()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=8))
def test_a_language_tag_is_found_in_any_chunks(cuts: list[int]) -> None:
    reader = TaggedReader()
    assert _fed(reader, "language German<asr_text>Guten Tag, <b>Welt</b>", cuts) == (
        "Guten Tag, <b>Welt</b>"
    )
    assert reader.language == "de"
    plain = TaggedReader()
    assert _fed(plain, "no tag at all comes here", cuts) == "no tag at all comes here"
    assert plain.language == ""
    long = TaggedReader()
    assert _fed(long, "words " * 60, cuts) == "words " * 60


def test_timestamps_are_not_text() -> None:
    assert PlainReader().feed("<|0.00|> Hello<|1.24|><|1.24|> world") == " Hello world"


SPANS = (Span(0.0, 2.5, " One"), Span(3661.25, 3662.0, " two --> three", [5, 6], 300, -0.5, 0.25))
MADE = Transcript("One two", 3662.4, "de", spans=SPANS)


def test_subtitles_have_times() -> None:
    assert srt(MADE) == (
        "1\n00:00:00,000 --> 00:00:02,500\nOne\n\n2\n01:01:01,250 --> 01:01:02,000\ntwo -> three\n"
    )
    assert vtt(MADE) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nOne\n\n"
        "01:01:01.250 --> 01:01:02.000\ntwo -> three\n"
    )


def test_verbose_json_has_each_segment() -> None:
    made = verbose_json(MADE, 0.2)
    assert (made["language"], made["duration"], made["usage"]["seconds"]) == (
        "german",
        3662.4,
        3663,
    )
    last = made["segments"][1]
    assert (last["id"], last["seek"], last["tokens"], last["temperature"]) == (1, 300, [5, 6], 0.2)
    assert last["avg_logprob"] == -0.5 and last["no_speech_prob"] == 0.25
    assert Span(0, 1, "ha " * 100).compression_ratio > 5


async def test_a_model_without_audio_input_refuses(server: ScriptedServer) -> None:
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        answer = await server.client.post(path, files={"file": ("a.wav", b"RIFF")})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "no audio input" in answer.json()["error"]["message"]
