"""The stand-in for torchvision: its results, and processors of transformers that use it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from PIL import Image

from radixlm.multimodal import checkpoint
from radixlm.multimodal import torchvision_functions as functions
from radixlm.multimodal.checkpoint import class_of
from radixlm.multimodal.torchvision_functions import InterpolationMode

IMAGE = (torch.arange(3 * 7 * 9).reshape(3, 7, 9) * 37 % 251).to(torch.uint8)

# by torchvision 0.28: rows 3, columns 4 of the second channel
RESIZED = {
    ("BILINEAR", torch.uint8): [139, 121, 103, 136, 125, 121, 105, 127, 116, 116, 151, 127],
    ("BILINEAR", torch.float32): [
        139.1347, 121.0592, 103.5645, 136.651, 125.0773, 121.4491, 105.4462, 127.7462, 116.1123,
        115.6655, 151.5191, 127.4592,
    ],
    ("BICUBIC", torch.uint8): [138, 125, 100, 136, 128, 118, 104, 132, 115, 117, 154, 124],
    ("BICUBIC", torch.float32): [
        137.9095, 124.8049, 99.8633, 135.849, 127.8574, 117.6278, 104.4188, 132.5748, 114.9249,
        116.7897, 154.1658, 123.7857,
    ],
    ("NEAREST_EXACT", torch.uint8): [191, 14, 88, 162, 104, 178, 1, 75, 17, 91, 165, 239],
}  # fmt: skip


@pytest.mark.parametrize(("mode", "dtype"), RESIZED)
def test_images_are_resized_as_by_torchvision(mode: str, dtype: torch.dtype) -> None:
    made = functions.resize(IMAGE.to(dtype), (3, 4), InterpolationMode[mode])
    assert made.dtype == dtype
    # a processor without AVX2 resizes bytes in floats, and may round to the next byte
    limit = 1 if dtype == torch.uint8 else 1e-4
    assert made[1].flatten().tolist() == pytest.approx(RESIZED[mode, dtype], abs=limit)


def test_other_functions_equal_torchvision() -> None:
    assert functions.pad(IMAGE, [1, 2, 3, 4], [1, 2, 3]).double().sum() == 24203
    assert functions.crop(IMAGE, -1, 2, 5, 9).double().sum() == 10334
    made = functions.normalize(IMAGE.float(), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    assert made.double().sum().item() == pytest.approx(84490.41602706909, rel=1e-7)
    assert functions.grayscale_to_rgb(IMAGE[:1]).shape == (3, 7, 9)
    assert functions.to_dtype(IMAGE, torch.float32, scale=True).max() <= 1
    with pytest.raises(ValueError, match="not resized by lanczos"):
        functions.resize(IMAGE, (3, 4), 1)


def test_images_go_to_pillow_and_back() -> None:
    drawn = functions.to_pil_image(IMAGE)
    assert (drawn.mode, drawn.size) == ("RGB", (9, 7))
    assert drawn.getpixel((4, 2)) == tuple(IMAGE[:, 2, 4].tolist())
    for channels, mode in ((1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")):
        image = IMAGE[[0, 1, 2, 0][:channels]]
        drawn = functions.to_pil_image(image)
        assert drawn.mode == mode and functions.pil_to_tensor(drawn).equal(image)
    floats = functions.to_pil_image(torch.tensor([0.0, 0.5, 1.0]).expand(3, 1, 3))
    assert functions.pil_to_tensor(floats)[0].tolist() == [[0, 127, 255]]


# families whose image processor has a class for Pillow and one for torchvision
BOTH = ("Pixtral", "LlavaNext", "Idefics3")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="its classes are used then")
@pytest.mark.parametrize("name", BOTH)
def test_a_processor_agrees_with_the_one_for_pillow(name: str) -> None:
    """Images that need no resizing agree to 1e-5: torch and Pillow round resized bytes
    differently."""
    noise = np.random.default_rng(0).integers(0, 255, (56, 56, 3), np.uint8)
    snake = {"LlavaNext": "llava_next"}.get(name, name.lower())
    with functions.imported_as_torchvision():
        module = __import__(f"transformers.models.{snake}.image_processing_{snake}", fromlist=["x"])
    options = {"Pixtral": {"patch_size": 7}}.get(name, {})
    if name == "LlavaNext":
        square = {"height": 56, "width": 56}
        options = {"size": square, "crop_size": square, "image_grid_pinpoints": [[56, 56]]}
    if name == "Idefics3":
        options = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56}}
    quick = getattr(module, f"{name}ImageProcessor")(**options)
    slow = class_of(f"{name}ImageProcessorPil")(**options)
    got, want = (
        np.asarray(kind(images=[Image.fromarray(noise)], return_tensors="pt")["pixel_values"])
        for kind in (quick, slow)
    )
    assert type(quick) is not type(slow)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="its classes are used then")
def test_disable_fast_image_processor_takes_the_class_for_pillow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with functions.imported_as_torchvision():
        quick = __import__(
            "transformers.models.pixtral.image_processing_pixtral", fromlist=["x"]
        ).PixtralImageProcessor(patch_size=7)
    made = SimpleNamespace(image_processor=quick)
    monkeypatch.setattr(checkpoint, "_load", lambda folder, transformers: made)
    assert checkpoint.load_processor(tmp_path).image_processor is quick
    slow = checkpoint.load_processor(tmp_path, on_pillow=True).image_processor
    assert type(slow).__name__ == "PixtralImageProcessorPil"
    assert slow.patch_size == quick.patch_size
    assert checkpoint.load_processor(tmp_path, on_pillow=True).image_processor is slow


def test_torchvision_does_not_seem_installed_afterwards() -> None:
    import transformers

    if transformers.is_torchvision_available():
        pytest.skip("torchvision is installed")
    assert class_of("Llama4ImageProcessor").__name__ == "Llama4ImageProcessor"
    assert "torchvision" not in sys.modules
    assert not transformers.utils.is_torchvision_available()
