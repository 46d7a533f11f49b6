"""Encoder-decoder models (Whisper) through a whole engine, against Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.entrypoints.offline import Engine

transformers = pytest.importorskip("transformers")

from tests.multimodal.test_audio_models import AUDIOS, wav  # noqa: E402
from tests.multimodal.tiny_whisper import START, save_whisper  # noqa: E402

NUM_NEW = 24
PROMPTS = (
    f"{START}<|en|><|transcribe|><|notimestamps|>",
    f"<|startofprev|> what came before, so long that it fills pages{START}<|de|><|transcribe|>",
)


def expected(model: Any, folder: Path, text: str, audio: Any) -> tuple[list[int], float]:
    """Greedy tokens of the raw model, and the log-probability of the first."""
    tok = transformers.AutoTokenizer.from_pretrained(folder)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    bands = extractor(audio, sampling_rate=16_000, return_tensors="pt")["input_features"]
    ids = tok(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    first, made = 0.0, []
    with torch.no_grad():
        rows = model.get_encoder()(bands)
        for _ in range(NUM_NEW):
            logits = model(encoder_outputs=rows, decoder_input_ids=ids).logits[0, -1]
            first = first or logits.log_softmax(-1).max().item()
            made.append(int(logits.argmax()))
            ids = torch.cat([ids, torch.tensor([[made[-1]]])], 1)
    return made, first


def answer_of(engine: Engine, text: str, index: int) -> Any:
    return engine.generate(
        text, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
        audio_data=[wav(AUDIOS[index])], return_logprob=True,
    )["meta_info"]  # fmt: skip


OTHERS = {
    "decoder_layers": 3, "encoder_layers": 1, "activation_function": "relu", "d_model": 48,
    "decoder_attention_heads": 3, "scale_embedding": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, pytest.param(OTHERS, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_tokens_equal_hugging_face(more: dict[str, Any], tmp_path: Path) -> None:
    model = save_whisper(tmp_path, **more)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=16,
    )  # fmt: skip
    try:
        seen = set()
        for text in PROMPTS:
            for index in (0, 1):
                audio = AUDIOS[index].astype(np.float32) / 32768
                want, first = expected(model, tmp_path, text, audio)
                for turn in range(2):
                    meta = answer_of(engine, text, index)
                    found = [token for _, token, *_ in meta["output_token_logprobs"]]
                    assert (text, index, turn, found) == (text, index, turn, want)
                    assert meta["output_token_logprobs"][0][0] == pytest.approx(first, abs=1e-4)
                    whole, tail = divmod(meta["prompt_tokens"] - 1, 16)
                    num_cached = 16 * whole + (tail if tail >= 4 else 0)
                    assert meta["cached_tokens"] == (num_cached if turn else 0)
                seen.add(tuple(want))
        assert len(seen) == 4  # both audio and prompts count
    finally:
        engine.shutdown()
