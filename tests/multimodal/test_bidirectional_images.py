"""Images with bidirectional attention in sliding-window layers, larger than the window: cached, in
chunks, in batches and after another question as in Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixlm.entrypoints.offline import Engine

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from tests.multimodal.test_families import IMAGES, NUM_NEW, encoded, expected
from tests.multimodal.tiny import save
from tests.multimodal.tiny_later import gemma4, gemma4_bidirectional

GREEDY = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
TAIL = " and then say in many words what this may be of, please"
CHOSEN = ([0], [0, 1], [1])
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs


def _question(images: list[int]) -> str:
    return "look " + " and ".join("<image>" for _ in images) + TAIL


def _given(images: list[int]) -> list[str]:
    return [encoded(IMAGES[i]) for i in images]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A checkpoint, and Hugging Face's answers for each choice of images."""
    folder = tmp_path_factory.mktemp("ahead")
    tiny = gemma4_bidirectional()
    model = save(tiny, folder)
    made = [
        expected(tiny, model, _question(chosen), [IMAGES[i] for i in chosen]) for chosen in CHOSEN
    ]
    return folder, made


def _engine(folder: Path, **options: Any) -> Engine:
    options = {"chunked_prefill_size": 4096, "max_total_tokens": 4096, **options}
    return Engine(model_path=str(folder), dtype="float32", cpu_threads=1, **options)


def test_a_prefix_that_cuts_the_image_is_not_used(
    answers: tuple[Path, list[tuple[Any, ...]]],
) -> None:
    folder, made = answers
    with _engine(folder) as engine:
        for chosen, (num_prompt, want, first) in zip(CHOSEN, made, strict=True):
            for turn in range(2):
                got = engine.generate(
                    _question(chosen), GREEDY, image_data=_given(chosen), return_logprob=True
                )
                meta = got["meta_info"]
                assert got["output_ids"] == want
                assert meta["output_token_logprobs"][0][0] == pytest.approx(first, abs=1e-4)
                if turn:
                    assert num_prompt - 4 <= meta["cached_tokens"] <= num_prompt - 1


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_chunks_and_batches(answers: tuple[Path, list[tuple[Any, ...]]], backend: str) -> None:
    folder, made = answers
    options = {"chunked_prefill_size": 16, "attention_backend": backend}
    with _engine(folder, max_running_requests=4, **options) as engine:
        got = engine.generate(
            [_question(chosen) for chosen in CHOSEN],
            GREEDY,
            image_data=[_given(chosen) for chosen in CHOSEN],
        )
    assert [one["output_ids"] for one in got] == [want for _, want, _ in made]


def test_the_config_matters(tmp_path: Path) -> None:
    tiny = gemma4(sliding_window=20)
    model = save(tiny, tmp_path)
    causal = expected(tiny, model, _question([0]), [IMAGES[0]])
    model.config.text_config.use_bidirectional_attention = "vision"
    ahead = expected(tiny, model, _question([0]), [IMAGES[0]])
    assert abs(causal[2] - ahead[2]) > 1e-3
