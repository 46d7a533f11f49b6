"""PaliGemma: all tokens of a prompt attend to each other, whatever the step's budgets and the
windows of PaliGemma 2, as in Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixlm.entrypoints.offline import Engine

pytest.importorskip("PIL")
transformers = pytest.importorskip("transformers")

from tests.multimodal.test_families import IMAGES, NUM_NEW, encoded, expected  # noqa: E402
from tests.multimodal.tiny import Tiny, paligemma, save, text  # noqa: E402

GREEDY = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
CHOSEN = ([0], [0, 1], [0, 1, 2])
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs


def paligemma2(window: int) -> Tiny:
    """Half of the layers have a sliding window."""
    tiny = paligemma()
    fields: dict[str, Any] = {"head_dim": 16, "sliding_window": window, "query_pre_attn_scalar": 16}
    tiny.config.text_config = transformers.Gemma2Config(**text("gemma2", **fields))
    return tiny


def _question(images: list[int]) -> str:
    return "look " + " and ".join("<image>" for _ in images) + " and then say what this may be"


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("window", [0, 24])
def test_prompts_of_several_images(window: int, backend: str, tmp_path: Path) -> None:
    """Two images of 16 placeholders pass the budget of a step."""
    tiny = paligemma2(window) if window else paligemma()
    model = save(tiny, tmp_path)
    made = [expected(tiny, model, _question(c), [IMAGES[i] for i in c]) for c in CHOSEN]
    with Engine(
        model_path=str(tmp_path), dtype="float32", cpu_threads=1, chunked_prefill_size=16,
        max_total_tokens=4096, max_running_requests=4, attention_backend=backend,
    ) as engine:  # fmt: skip
        got = engine.generate(
            [_question(chosen) for chosen in CHOSEN], GREEDY,
            image_data=[[encoded(IMAGES[i]) for i in chosen] for chosen in CHOSEN],
            return_logprob=True,
        )  # fmt: skip
    for one, (num_prompt, want, first) in zip(got, made, strict=True):
        meta = one["meta_info"]
        assert meta["prompt_tokens"] == num_prompt
        assert one["output_ids"] == want
        assert meta["output_token_logprobs"][0][0] == pytest.approx(first, abs=1e-4)
