"""The pixels of an image: what a request may ask for, and the server's limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PIL import Image

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.config.conflicts import media_problems
from radixlm.config.server_config import ServerConfig
from radixlm.multimodal.options import bound_pixels, checked_options, limit_pixels
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


def test_the_servers_bounds_hold_for_requests_without_their_own() -> None:
    processor = SimpleNamespace(image_processor=image_processor("Qwen2VL"))
    bound_pixels(processor, {"image": {"max_pixels": 140 * 140}, "video": {"fps": 1}})
    assert num_patches(processor) == 100
    with pytest.raises(ConfigError, match="image: the model's bounds are 200000 to 19600 pixels"):
        bound_pixels(processor, {"image": {"min_pixels": 200_000}})
    for without in (SimpleNamespace(image_processor=image_processor("CLIP")), SimpleNamespace()):
        with pytest.raises(ConfigError, match="the images of this model have no bounds"):
            bound_pixels(without, {"image": {"max_pixels": 5}})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"image": {"max_pixels": 9}, "video": {"fps": 0.5, "max_frames": 8}}', ""),
        ('{"picture": {}}', '{"image": {"max_pixels": 1048576}} works'),
        ('{"image": 3}', "works"),
        ('{"image": {"fps": 2}}', "options of image are min_pixels, max_pixels"),
        ('{"audio": {"fps": 2}}', "options of audio are none"),
        ('{"video": {"max_frames": 0}}', "video.max_frames: 0 is no number above 0"),
        ('{"video": {"max_frames": 1.5}}', "video.max_frames: 1.5"),
        ('{"video": {"fps": true}}', "video.fps: True"),
        ('{"image": {"min_pixels": 9, "max_pixels": 4}}', "9 are more than max_pixels 4"),
    ],
)
def test_options_of_processing_are_checked_at_start(given: str, problem: str) -> None:
    found = list(media_problems(ServerConfig.from_kwargs(mm_process_config=given)))
    assert len(found) == bool(problem)
    assert problem in "".join(found)
