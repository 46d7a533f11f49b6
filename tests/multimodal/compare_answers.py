"""Compares answers about images and videos with those of the checkpoint's class in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from radixlm.entrypoints.offline import Engine
from tests.multimodal.test_families import IMAGES, encoded, expected
from tests.multimodal.tiny import Tiny

NUM_NEW = 16


def assert_same_videos(tiny: Tiny, model: Any, folder: Path) -> None:
    """One video as frames, and a longer one: greedy tokens, the second time from the cache."""
    engine = Engine(
        model_path=str(folder), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    text = f"look {tiny.processor.video_token} now tell"
    try:
        for count in (3, 5):
            frames = rng.integers(0, 255, (count, 40, 28, 3), np.uint8)
            given = tiny.processor(text=[text], videos=[frames], return_tensors="pt")
            with torch.no_grad():
                made = model.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)
            num_prompt = given["input_ids"].shape[1]
            for turn in range(2):
                meta = engine.generate(
                    text, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    video_data=[[encoded(Image.fromarray(frame)) for frame in frames]],
                    return_logprob=True,
                )["meta_info"]  # fmt: skip
                assert meta["prompt_tokens"] == num_prompt
                found = [one[1] for one in meta["output_token_logprobs"]]
                assert found == made[0, num_prompt:].tolist()
                assert not turn or meta["cached_tokens"] >= (num_prompt - 1) // 16 * 16
    finally:
        engine.shutdown()


def assert_same_answers(
    tiny: Tiny, model: Any, folder: Path, cases: Sequence[list[int]] = ([0], [2, 1])
) -> None:
    """One image and two, each prompt twice: greedy tokens, the first log-probability, and the
    second time from the cache."""
    engine = Engine(
        model_path=str(folder), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    try:
        for chosen in cases:
            text = "look " + " and ".join(tiny.placeholder for _ in chosen) + " now tell"
            images = [IMAGES[i] for i in chosen]
            num_prompt, want, first = expected(tiny, model, text, images)
            for turn in range(2):
                meta = engine.generate(
                    text, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    image_data=[encoded(image) for image in images], return_logprob=True,
                )["meta_info"]  # fmt: skip
                assert meta["prompt_tokens"] == num_prompt
                assert [one[1] for one in meta["output_token_logprobs"]] == want
                assert meta["output_token_logprobs"][0][0] == pytest.approx(first, abs=1e-4)
                assert not turn or meta["cached_tokens"] >= (num_prompt - 1) // 16 * 16
    finally:
        engine.shutdown()
