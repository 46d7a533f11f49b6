"""Every embedding and scoring architecture through a whole engine, against Hugging Face in
float32."""

from __future__ import annotations

import random

import pytest
from tests.fakes.pooled_checkpoint import ENCODERS, HEADS, expected, made

import radixlm

LENGTHS = (29, 1, 60)


def engine(folder: object, **options: object) -> radixlm.Engine:
    options = {"max_total_tokens": 2048, "chunked_prefill_size": 32, **options}
    return radixlm.Engine(
        model_path=str(folder), cpu_threads=1, random_seed=1, log_level="error", **options
    )


def prompts(seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 120) for _ in range(n)] for n in LENGTHS]


FEW = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text")
ALWAYS = [name for name in HEADS if name.removesuffix("Model") in FEW or "Gemma3" in name]
GATHERED = ("JetMoe",)  # its attention experts are torch products, whose bits depend on the batch
# names, forms, states, a head of several layers
OTHERS = ("GPT2", "Falcon", "Jamba", "ModernBertDecoder")
ALWAYS += ["GraniteModel", "Lfm2Model"]  # without scores
ALWAYS += [f"{stem}ForSequenceClassification" for stem in (*FEW[:-1], *OTHERS)]


@pytest.mark.parametrize("architecture", [*ENCODERS, *ALWAYS])
def test_embeddings_and_scores_equal_hugging_face(architecture: str) -> None:
    check(architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in HEADS if name not in ALWAYS])
def test_heads_of_all_decoders_equal_hugging_face(architecture: str) -> None:
    check(architecture)


def check(architecture: str) -> None:
    """Prompts of different lengths in one batch (a decoder's longest in two chunks); alone the same
    bits."""
    folder = made(architecture)
    texts = prompts(architecture)
    with engine(folder) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
        alone = served.encode(input_ids=texts[0])["embedding"]
    for text, vector in zip(texts, got, strict=True):
        assert vector == pytest.approx(expected(folder, text), abs=1e-4)
    near = architecture.startswith(GATHERED)
    assert alone == (pytest.approx(got[0], abs=1e-6) if near else got[0])
    assert len({tuple(vector) for vector in got}) == len(got)


@pytest.mark.parametrize(
    "changes",
    [
        {"pos_att_type": ["c2p"], "position_biased_input": True},
        {"pos_att_type": "p2c"},
        {"relative_attention": False, "pos_att_type": None},
    ],
)
def test_parts_of_debertas_attention(changes: dict[str, object]) -> None:
    folder, texts = made("DebertaV2Model", **changes), prompts("parts")
    with engine(folder) as served:
        got = [one["embedding"] for one in served.encode(input_ids=texts)]
    for text, vector in zip(texts, got, strict=True):
        assert vector == pytest.approx(expected(folder, text), abs=1e-4)
