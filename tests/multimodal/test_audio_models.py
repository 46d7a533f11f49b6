"""Audio models through a whole engine, against Hugging Face's generate."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.entrypoints.offline import Engine

transformers = pytest.importorskip("transformers")

from tests.multimodal.test_families import IMAGES, encoded  # noqa: E402
from tests.multimodal.tiny import save  # noqa: E402
from tests.multimodal.tiny_audio import AUDIO, NEEDS, inputs_of  # noqa: E402

NUM_NEW = 12
RATE = 16_000


def audio(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    """16 bit samples of noise."""
    return np.random.default_rng(seed).integers(-9000, 9000, int(seconds * RATE), np.int16)


def wav(samples: np.ndarray[Any, Any]) -> str:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return "data:audio/wav;base64," + base64.b64encode(data.getvalue()).decode()


QUICK = ("qwen2_audio", "qwen2_5_omni", "gemma3n", "voxtral")
AUDIOS = (audio(1, 0.7), audio(2, 1.3), audio(3, 0.4))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in AUDIO]
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_family_equals_hugging_face(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    tiny = AUDIO[name]()
    model = save(tiny, tmp_path)
    model = tiny.processor.model = getattr(model, "thinker", model)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    sees = "<|vision_bos|>" in tiny.processor.tokenizer.get_vocab()
    try:
        for chosen, image in (([0], False), ([1, 2], False), ([1], sees)):
            text = "hear " + " and ".join(tiny.placeholder for _ in chosen) + " now tell"
            samples = [AUDIOS[i].astype(np.float32) / 32768 for i in chosen]
            given: dict[str, Any] = {}
            more: dict[str, Any] = {}
            if image:
                text += " <|vision_bos|><|IMAGE|><|vision_eos|> beside"
                given["images"], more["image_data"] = [IMAGES[1]], [encoded(IMAGES[1])]
            inputs = inputs_of(tiny, text, samples, **given)
            num_prompt = inputs["input_ids"].shape[1]
            with torch.no_grad():
                made = model.generate(
                    **inputs, max_new_tokens=NUM_NEW, do_sample=False, output_scores=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
            want = made.sequences[0, num_prompt:].tolist()
            first = made.scores[0][0].log_softmax(-1).max().item()
            for turn in range(2):
                got = engine.generate(
                    text,
                    {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    audio_data=[wav(AUDIOS[i]) for i in chosen],
                    return_logprob=True,
                    **more,
                )
                meta = got["meta_info"]
                found = [token for _, token, *_ in meta["output_token_logprobs"]]
                assert meta["prompt_tokens"] == num_prompt
                assert (chosen, turn, found) == (chosen, turn, want)
                assert meta["output_token_logprobs"][0][0] == pytest.approx(first, abs=1e-4)
                if turn:
                    assert meta["cached_tokens"] >= (num_prompt - 1) // 16 * 16
    finally:
        engine.shutdown()
