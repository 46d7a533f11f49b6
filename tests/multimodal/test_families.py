"""Each family with a vision encoder through a whole engine, against Hugging Face's generate."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.entrypoints.offline import Engine

pytest.importorskip("PIL")
transformers = pytest.importorskip("transformers")
from PIL import Image  # noqa: E402

from tests.multimodal.tiny import FAMILIES as FIRST  # noqa: E402
from tests.multimodal.tiny import Tiny, save  # noqa: E402
from tests.multimodal.tiny_later import LATER, PUBLISHED  # noqa: E402
from tests.multimodal.tiny_more import MORE, NEEDS  # noqa: E402
from tests.multimodal.tiny_newer import NEWER, NEWER_NEEDS  # noqa: E402
from tests.multimodal.tiny_vision import ONE_IMAGE  # noqa: E402

FAMILIES = {**FIRST, **MORE, **LATER, **NEWER}

QUICK = (
    "llava_next",
    "qwen2_5_vl",
    "qwen3_vl",
    "idefics3",
    "gemma3",
    "paligemma",
    "ovis2",
    "glm4v_moe",
    "mllama",
    "internvl_chat",
    "hyperclovax_vision_v2",
    "hunyuan_vl",
    "granite4_vision",
)
# bidirectional prompts, or images cut by the last full page: only whole prompts are shared
WHOLE = ("paligemma", "gemma4_unified", "gemma4_bidirectional")
NUM_NEW = 16


def make_image(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


IMAGES = (make_image(40, 30), make_image(30, 64), make_image(56, 56))


def encoded(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def expected(tiny: Tiny, model: Any, text: str, images: list[Any]) -> tuple[int, list[int], float]:
    """(prompt tokens, greedy tokens, log-probability of the first)."""
    given = tiny.processor(
        text=[text], images=images, return_tensors="pt", add_special_tokens=False
    )
    given = {
        k: v.float() if hasattr(v, "float") and v.is_floating_point() else v
        for k, v in given.items()
    }
    num_prompt = given["input_ids"].shape[1]
    with torch.no_grad():
        made = model.generate(
            **given, max_new_tokens=NUM_NEW, do_sample=False, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    first = made.scores[0][0].log_softmax(-1).max().item()
    return num_prompt, made.sequences[0, num_prompt:].tolist(), first


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_family_equals_hugging_face(name: str, tmp_path: Path) -> None:
    if name in (needs := {**NEEDS, **NEWER_NEEDS}):
        pytest.importorskip(needs[name])
    tiny = FAMILIES[name]()
    model = save(tiny, tmp_path)
    if name in PUBLISHED:
        PUBLISHED[name](tmp_path)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    try:
        for chosen in ([0], [1]) if name in ONE_IMAGE else ([0], [1], [0, 2]):
            text = "look " + " and ".join(tiny.placeholder for _ in chosen) + " now tell"
            images = [IMAGES[i] for i in chosen]
            num_prompt, want, first = expected(tiny, model, text, images)
            for turn in range(2):
                got = engine.generate(
                    text,
                    {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    image_data=[encoded(image) for image in images],
                    return_logprob=True,
                )
                meta = got["meta_info"]
                assert meta["prompt_tokens"] == num_prompt
                found = [token for _, token, *_ in meta["output_token_logprobs"]]
                got_first = meta["output_token_logprobs"][0][0]
                assert (turn, found) == (turn, want), (got_first, first)
                assert got_first == pytest.approx(first, abs=1e-4)
                if turn and name not in WHOLE:  # its image was in the prefix cache
                    assert meta["cached_tokens"] >= (num_prompt - 1) // 16 * 16
    finally:
        engine.shutdown()
