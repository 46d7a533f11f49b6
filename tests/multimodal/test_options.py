"""The pixels of an image: what a request may ask for, and the server's limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PIL import Image

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.options import checked_options, limit_pixels
from tests.multimodal.tiny import image_processor


def num_patches(processor: SimpleNamespace) -> int:
    image = Image.new("RGB", (280, 280))
    grid = processor.image_processor(images=[image])["image_grid_thw"]
    return int(grid[0].prod())


@pytest.mark.parametrize("name", ["SGLANG_IMAGE_MAX_PIXELS", "RADIXLM_IMAGE_MAX_PIXELS"])
def test_the_servers_limit_is_that_of_all_requests(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = SimpleNamespace(image_processor=image_processor("Qwen2VL"))
    limit_pixels(processor)
    assert num_patches(processor) == 400
    monkeypatch.setenv(name, str(140 * 140))
    limit_pixels(processor)
    assert num_patches(processor) == 100
    for asked, given in ((280 * 280, 140 * 140), (56 * 56, 56 * 56)):
        assert checked_options(processor, {"max_pixels": asked}) == {"max_pixels": given}


def test_models_without_such_a_bound_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_IMAGE_MAX_PIXELS", "10")
    processor = SimpleNamespace(image_processor=image_processor("CLIP"))
    before = dict(processor.image_processor.size)
    limit_pixels(processor)
    limit_pixels(SimpleNamespace())
    assert dict(processor.image_processor.size) == before
    with pytest.raises(InvalidRequest, match="may set none"):
        checked_options(processor, {"max_pixels": 5})
