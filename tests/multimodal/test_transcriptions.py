"""/v1/audio/transcriptions with Whisper against Hugging Face's generate: language, prompt,
timestamps, formats, streams, long audio, other sample rates, and refused inputs."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

tf = pytest.importorskip("transformers")

from transformers.generation import logits_process as logits  # noqa: E402

from radixlm.multimodal.audio import cut, resample  # noqa: E402
from tests.multimodal.app_server import Served, served  # noqa: E402
from tests.multimodal.tiny_whisper import TIMES, save_whisper  # noqa: E402

Samples = np.ndarray[Any, Any]
RATE, PATH = 16_000, "/v1/audio/transcriptions"
NUM_NEW = 40


def noise(seed: int, seconds: float, rate: int = RATE) -> Samples:
    """16-bit samples, louder and softer."""
    count = int(seconds * rate)
    made = np.random.default_rng(seed).normal(0, 5000, count)
    return (made * (1.2 + np.sin(np.arange(count) / rate * 5))).clip(-32768, 32767).astype(np.int16)


def wav(samples: Samples, rate: int = RATE) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return data.getvalue()


class Oracle:
    """Hugging Face's model, whose generate follows all of Whisper's rules."""

    def __init__(self, folder: Path) -> None:
        self.model = save_whisper(folder)
        self.tok = tf.AutoTokenizer.from_pretrained(folder)
        self.extractor = tf.AutoFeatureExtractor.from_pretrained(folder)
        self.first_time = self.tok.convert_tokens_to_ids(TIMES[0])

    def ids(
        self, samples: Samples, language: str, before: str = "", task: str = "transcribe",
        is_timed: bool = False,
    ) -> list[int]:  # fmt: skip
        """Tokens of one window after the prompt by the rules and the model. `generate` does the
        same, and continues at two adjacent timestamps."""
        held = self.model.generation_config
        times = "" if is_timed else "<|notimestamps|>"
        marks = f"<|{language}|><|{task}|>" if language else ""
        text = f"<|startoftranscript|>{marks}{times}"
        text = f"<|startofprev|> {before}{text}" if before else text
        ids = self.tok(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        rules = [
            logits.SuppressTokensAtBeginLogitsProcessor(held.begin_suppress_tokens, start),
            logits.SuppressTokensLogitsProcessor(held.suppress_tokens),
        ]
        if is_timed:
            rules.append(logits.WhisperTimeStampLogitsProcessor(held, start))
        with torch.no_grad():
            rows = self.model.get_encoder()(self.bands(samples))
            while ids.shape[1] < start + NUM_NEW and ids[0, -1] != self.tok.eos_token_id:
                scores = self.model(encoder_outputs=rows, decoder_input_ids=ids).logits[:, -1]
                for rule in rules:
                    scores = rule(ids, scores)
                ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        return [i for i in ids[0, start:].tolist() if i != self.tok.eos_token_id]

    def bands(self, samples: Samples) -> torch.Tensor:
        if samples.dtype == np.int16:
            samples = samples.astype(np.float32) / 32768
        made = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        assert isinstance(made, torch.Tensor)
        return made

    def language(self, samples: Samples) -> str:
        with torch.no_grad():
            found = self.model.detect_language(self.bands(samples))
        return str(self.tok.decode(found)).strip("<|>")

    def text(self, ids: list[int]) -> str:
        words = [i for i in ids if i < self.first_time]
        return str(self.tok.decode(words, skip_special_tokens=True))


Answer = dict[str, Any]


async def ask(server: Served, data: bytes, path: str = PATH, **fields: Any) -> Any:
    fields = {"max_completion_tokens": str(NUM_NEW), **fields}
    return await server.client.post(path, files={"file": ("a.wav", data)}, data=fields)


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[Served]:
    async with served(folder, **options) as server:
        yield server


def run(folder: Path, check: Callable[[Served, Oracle], Awaitable[None]]) -> None:
    oracle = Oracle(folder)

    async def whole() -> None:
        strict = {"unknown_fields": "refuse", "strict_model_name": True}
        async with started(folder, **strict) as server:
            await check(server, oracle)

    asyncio.run(whole())


async def languages_and_prompts(server: Served, oracle: Oracle) -> None:
    audio = noise(1, 1.2)
    found = oracle.language(audio)
    seen = set()
    for language, before in (("de", ""), ("en", "Tea, Mr. Ooyen"), ("", "Tea"), ("", "")):
        want = oracle.text(oracle.ids(audio, language or found, before))
        fields = {"language": language, "prompt": before}
        answer = await ask(server, wav(audio), **{k: v for k, v in fields.items() if v})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == want.strip()
        assert answer.json()["usage"] == {"type": "duration", "seconds": 2}
        seen.add(want)
    assert len(seen) == 4
    want = oracle.text(oracle.ids(audio, found, task="translate"))
    english = await ask(server, wav(audio), "/v1/audio/translations")
    assert english.json()["text"] == want.strip() and want not in seen
    german = {"language": "de", "to_language": "en"}
    english = await ask(server, wav(audio), "/v1/audio/translations", **german)
    want = oracle.text(oracle.ids(audio, "de", task="translate"))
    assert english.json()["text"] == want.strip() and want not in seen
    said = await ask(server, wav(audio), response_format="verbose_json")
    assert said.json()["language"] == {"en": "english", "de": "german", "ja": "japanese"}[found]
    named = await ask(server, wav(audio), language="German", response_format="text")
    code = await ask(server, wav(audio), language="de-AT", response_format="text")
    assert named.text == code.text and code.headers["content-type"].startswith("text/plain")


async def times(server: Served, oracle: Oracle) -> None:
    audio = noise(2, 1.7)
    ids = oracle.ids(audio, "en", is_timed=True)
    marks = [(i - oracle.first_time) * 0.02 for i in ids if i >= oracle.first_time]
    assert len(marks) > 2
    answer = await ask(server, wav(audio), language="en", response_format="verbose_json")
    made = answer.json()
    assert answer.status_code == 200, answer.text
    assert (made["task"], made["language"], made["duration"]) == ("transcribe", "english", 1.7)
    assert made["text"] == oracle.text(ids).strip()
    found = [time for one in made["segments"] for time in (one["start"], one["end"])]
    assert found[0] == pytest.approx(marks[0]) and found == sorted(found)
    assert [t for one in made["segments"] for t in one["tokens"]] == [
        i for i in ids if i < oracle.first_time
    ]
    assert set(made["segments"][0]) == set(
        "id seek start end text tokens temperature avg_logprob compression_ratio no_speech_prob"
        .split()
    )  # fmt: skip
    assert 0 < made["segments"][0]["no_speech_prob"] < 1 and made["segments"][0]["avg_logprob"] < 0
    cues = (await ask(server, wav(audio), language="en", response_format="srt")).text
    assert cues.startswith("1\n00:00:0") and " --> 00:00:01," in cues
    cues = (await ask(server, wav(audio), language="en", response_format="vtt")).text
    assert cues.startswith("WEBVTT\n\n00:00:0")


async def streams(server: Served, oracle: Oracle) -> None:
    audio = noise(3, 1.5)
    want = oracle.text(oracle.ids(audio, "en")).strip()
    answer = await ask(server, wav(audio), language="en", stream="true")
    lines = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
    assert lines.pop() == "[DONE]"
    events = [orjson.loads(one) for one in lines]
    last = events.pop()
    assert {one["type"] for one in events} == {"transcript.text.delta"}
    assert "".join(one["delta"] for one in events).rstrip() == want
    assert [one["choices"][0]["delta"]["content"] for one in events] == [
        one["delta"] for one in events
    ]
    assert (last["type"], last["text"]) == ("transcript.text.done", want)
    assert last["choices"][0]["finish_reason"] == "stop" and last["usage"]["seconds"] == 2


async def long_and_other_rates(server: Served, oracle: Oracle) -> None:
    audio = noise(4, 4.6)
    read = audio.astype(np.float32) / 32768
    pieces = cut(read, RATE, 2.0)
    assert len(pieces) == 3 and sum(len(one) for _, one in pieces) == len(audio)
    want = "".join(oracle.text(oracle.ids(one, "en")) for _, one in pieces).strip()
    answer = await ask(server, wav(audio), language="en")
    assert answer.json()["text"] == want
    timed = (await ask(server, wav(audio), language="en", response_format="verbose_json")).json()
    seeks = {one["seek"] for one in timed["segments"]}
    assert seeks == {round(began * 100) for began, _ in pieces}
    for rate in (8000, 44100):
        other = noise(5, 1.1, rate)
        resampled = resample(other.astype(np.float32) / 32768, rate, RATE)
        want = oracle.text(oracle.ids(resampled, "en")).strip()
        assert (await ask(server, wav(other, rate), language="en")).json()["text"] == want


async def refusals(server: Served, oracle: Oracle) -> None:
    good = wav(noise(6, 0.5))
    for data, fields, name in (
        (good, {"language": "xx-tongue"}, "language"), (good, {"language": "fr"}, "language"),
        (good, {"response_format": "xml"}, "response_format"), (good, {"color": "red"}, "color"),
        (good, {"temperature": "hot"}, "temperature"), (good, {"temperature": "-1"}, "temperature"),
        (good, {"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (good, {"prompt": "<|endoftext|>"}, "prompt"), (good, {"stream": "perhaps"}, "stream"),
        (good, {"stream": "true", "response_format": "srt"}, "response_format"),
        (b"", {}, "file"), (b"no audio", {}, "file"), (good[:60], {}, "file"),
        (wav(noise(6, 0.01)), {}, "file"), (good, {"to_language": "en"}, "to_language"),
    ):  # fmt: skip
        answer = await ask(server, data, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    wrong = await server.client.post(PATH, json={"file": "a"})
    assert wrong.status_code == 400 and "multipart" in wrong.text
    nothing = await server.client.post(PATH, files={"other": ("a.wav", good)})
    assert nothing.status_code == 400 and nothing.json()["error"]["param"] == "file"
    elsewhere = await ask(server, good, model="another")
    assert elsewhere.status_code == 404
    told = await server.chat([{"role": "user", "content": "hello"}])
    assert told.status_code == 400 and "chat template" in told.text
    uri = "data:audio/wav;base64," + base64.b64encode(good).decode()
    native = await server.post(
        "/generate", text="", audio_data=uri, sampling_params={"max_new_tokens": 3}
    )
    assert native.status_code == 200 and native.json()["meta_info"]["prompt_tokens"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_an_english_only_model_gets_no_language_tokens(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"is_multilingual": False}))

    async def check() -> None:
        async with started(tmp_path) as server:
            audio = noise(8, 0.9)
            timed = await ask(server, wav(audio), response_format="verbose_json")
            assert timed.json()["language"] == "english"
            made = (await ask(server, wav(audio))).json()["text"]
            assert (await ask(server, wav(audio), language="en")).json()["text"] == made
            want = oracle.text(oracle.ids(audio, "")).strip()
            assert made == want
            for path, fields in ((PATH, {"language": "de"}), ("/v1/audio/translations", {})):
                assert (await ask(server, wav(audio), path, **fields)).status_code == 400

    asyncio.run(check())


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_transcripts_equal_hugging_face(tmp_path: Path) -> None:
    async def check(server: Served, oracle: Oracle) -> None:
        for part in (times, streams, long_and_other_rates, refusals, languages_and_prompts):
            await part(server, oracle)

    run(tmp_path, check)
