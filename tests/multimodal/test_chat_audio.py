"""Audio models through /v1/chat/completions, with audio as base64 and data URIs, and through
/v1/audio/transcriptions, against Hugging Face's generate of the same prompt."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

pytest.importorskip("transformers")

from tests.multimodal.app_server import PARTS, PLACE, Served, served, user
from tests.multimodal.test_audio_models import AUDIOS, wav
from tests.multimodal.tiny import save
from tests.multimodal.tiny_audio import AUDIO, NEEDS, inputs_of

NUM_NEW = 12
QUICK = ("voxtral", "qwen3_asr")
# the text of a transcription request around the placeholder, in one language
ASKED = {
    "voxtral": ("<s>[INST]{}[/INST][TRANSCRIBE]", "<s>[INST]{}[/INST]lang:de[TRANSCRIBE]"),
    "qwen3_asr": ("<user>{}\n<assistant>", "<user>{}\n<assistant>language German<asr_text>"),
    "qwen2_audio": (
        "<user>{}Transcribe the audio into text.\n<assistant>",
        "<user>{}Transcribe the audio into text. It is in German.\n<assistant>",
    ),
    "audio_flamingo": (
        "<user>{}Transcribe the input speech.\n<assistant>",
        "<user>{}Transcribe the input speech. It is in German.\n<assistant>",
    ),
    "glmasr": (
        "<user>{}Please transcribe this audio into text\n<assistant>",
        "<user>{}Please transcribe this audio into text It is in German.\n<assistant>",
    ),
}


class Oracle:
    """Hugging Face's model and processor on hand-written prompts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.tiny = AUDIO[name]()
        model = save(self.tiny, folder)
        self.model = self.tiny.processor.model = getattr(model, "thinker", model)
        self.tokenizer = self.tiny.processor.tokenizer

    def answer(self, text: str, chosen: list[int]) -> tuple[list[int], list[int], float]:
        """(prompt ids, greedy tokens, log-probability of the first)."""
        audios = [AUDIOS[i].astype(np.float32) / 32768 for i in chosen]
        given = inputs_of(self.tiny, text.replace(PLACE, self.tiny.placeholder), audios)
        prompt = given["input_ids"]
        with torch.no_grad():
            made = self.model.generate(
                **given, max_new_tokens=NUM_NEW, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        first = made.scores[0][0].log_softmax(-1).max().item()
        return prompt[0].tolist(), made.sequences[0, prompt.shape[1] :].tolist(), first

    def num_placeholders(self, ids: list[int]) -> int:
        """Placeholder tokens of audio in the prompt."""
        raw = self.tiny.config.to_dict()
        raw = raw.get("thinker_config", raw)
        token = raw.get("audio_token_id", raw.get("audio_token_index"))
        return ids.count(token)


def by_base64(index: int) -> dict[str, Any]:
    data = wav(AUDIOS[index]).partition(",")[2]
    assert base64.b64decode(data)[:4] == b"RIFF"
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def by_uri(index: int) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": wav(AUDIOS[index])}}


async def compare(
    server: Served, oracle: Oracle, messages: list[dict[str, Any]], text: str, chosen: list[int]
) -> tuple[str, int, int]:
    """Compare prompt, tokens and the first log-probability; (answer, cached tokens, audio
    tokens)."""
    prompt, want, first = oracle.answer(text, chosen)
    answer = await server.chat(
        messages, max_tokens=NUM_NEW, logprobs=True, return_token_ids=True,
        return_prompt_token_ids=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    made = answer.json()
    got = made["choices"][0]
    assert (got["prompt_token_ids"], got["token_ids"]) == (prompt, want)
    assert got["logprobs"]["content"][0]["logprob"] == pytest.approx(first, abs=1e-4)
    cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
    return got["message"]["content"], cached, oracle.num_placeholders(prompt)


async def streamed(server: Served, messages: list[dict[str, Any]]) -> str:
    answer = await server.chat(messages, max_tokens=NUM_NEW, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"] for line in lines for choice in orjson.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def converse(server: Served, oracle: Oracle) -> None:
    one = user(by_base64(1), "what is said?")
    first_text = f"<user>{PLACE}what is said?\n<assistant>"
    said, _, _ = await compare(server, oracle, [one], first_text, [1])
    two = user("this ", by_uri(0), " or ", by_base64(2), "?")
    await compare(server, oracle, [two], f"<user>this {PLACE} or {PLACE}?\n<assistant>", [0, 2])
    again = [one, {"role": "assistant", "content": said}, user("and then?")]
    text = f"{first_text}{said}\n<user>and then?\n<assistant>"
    _, cached, num_placeholders = await compare(server, oracle, again, text, [1])
    assert cached > num_placeholders > 0
    assert await streamed(server, [one]) == said


async def transcribe(server: Served, oracle: Oracle, asked: tuple[str, str]) -> None:
    data = base64.b64decode(wav(AUDIOS[0]).partition(",")[2])
    for text, fields in zip(asked, ({}, {"language": "de"}), strict=True):
        _, want, _ = oracle.answer(text.replace("{}", PLACE), [0])
        answer = await server.client.post(
            "/v1/audio/transcriptions",
            files={"file": ("a.wav", data)},
            data={"max_completion_tokens": str(NUM_NEW), **fields},
        )
        assert answer.status_code == 200, answer.text
        expected = oracle.tokenizer.decode(want, skip_special_tokens=True)
        assert answer.json()["text"] == expected.strip()
    refused = await server.client.post(
        "/v1/audio/transcriptions",
        files={"file": ("a.wav", data)},
        data={"response_format": "srt"},
    )
    assert refused.status_code == 400 and "no times" in refused.text


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in AUDIO]
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_conversation_with_audio(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    oracle = Oracle(name, tmp_path)

    async def run() -> None:
        async with served(tmp_path, PARTS.replace(PLACE, oracle.tiny.placeholder)) as server:
            await converse(server, oracle)
            if name in ASKED:
                await transcribe(server, oracle, ASKED[name])

    asyncio.run(run())
