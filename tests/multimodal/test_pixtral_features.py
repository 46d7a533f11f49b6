"""Pixtral and Mistral 3 take what the client's processor has made, as they take the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixlm.entrypoints.offline import Engine

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from tests.multimodal.test_families import IMAGES, encoded
from tests.multimodal.tiny import save
from tests.multimodal.tiny_more import mistral3, pixtral

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("make", [pixtral, mistral3])
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_finished_arrays_equal_the_image(make: object, tmp_path: Path) -> None:
    tiny = pixtral() if make is pixtral else mistral3()
    save(tiny, tmp_path)
    text = f"look {tiny.placeholder} now tell"
    made = tiny.processor(text=[text], images=[IMAGES[1]], return_tensors="pt")
    sent = {"format": "processor_output", "pixel_values": made["pixel_values"].tolist()}
    sent["image_sizes"] = made["image_sizes"].tolist()
    with Engine(
        model_path=str(tmp_path), dtype="float32", max_total_tokens=4096, cpu_threads=1
    ) as engine:
        want = engine.generate(text, GREEDY, image_data=[encoded(IMAGES[1])])
        got = engine.generate(
            input_ids=made["input_ids"][0].tolist(), sampling_params=GREEDY, image_data=[sent]
        )
    assert got["output_ids"] == want["output_ids"]
    assert got["meta_info"]["prompt_tokens"] == want["meta_info"]["prompt_tokens"]
