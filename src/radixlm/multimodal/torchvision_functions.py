"""The functions of torchvision that image and video processors of transformers call.

Many processors exist for torchvision only, and many CPU builds of torch have no torchvision that
fits. The arithmetic is that of torchvision 0.28 (transforms/v2/functional), which itself calls
torch: images are [..., channels, rows, columns].
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_PARENTS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_CHECKS = ("is_torchvision_available", "is_torchvision_v2_available")
_BASES = ("image_utils", "image_processing_backends", "video_processing_utils")
# choose classes by what is installed, so that they are imported before
_CHOOSERS = ("image_processing_auto", "video_processing_auto", "processing_auto")


class InterpolationMode(Enum):
    """How an image is resized, as torchvision names it."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


# by Pillow's numbers, which processors may pass
_BY_NUMBER = {
    0: InterpolationMode.NEAREST,
    1: InterpolationMode.LANCZOS,
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
    4: InterpolationMode.BOX,
    5: InterpolationMode.HAMMING,
}
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
_NEAREST = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)


def resize(
    image: Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode | int = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> Tensor:
    """To ``size`` (rows, columns). ``interpolation``: a mode, or Pillow's number of it. ValueError
    for modes that only Pillow has."""
    if isinstance(interpolation, int):
        interpolation = _BY_NUMBER[interpolation]
    if interpolation not in (*_SMOOTH, *_NEAREST):
        raise ValueError(f"images are not resized by {interpolation.value} here")
    rows, columns = size
    if image.shape[-2:] == (rows, columns):
        return image
    is_smooth = interpolation in _SMOOTH
    # torch resizes bytes in integer arithmetic where that is fast
    is_byte = image.dtype == torch.uint8 and (
        interpolation != InterpolationMode.BILINEAR
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )
    flat = image.reshape(-1, *image.shape[-3:])
    flat = flat if is_byte or image.is_floating_point() else flat.float()
    made = F.interpolate(
        flat,
        size=[rows, columns],
        mode=interpolation.value,
        align_corners=False if is_smooth else None,
        antialias=antialias and is_smooth,
    )
    if made.dtype != image.dtype:
        if interpolation == InterpolationMode.BICUBIC and image.dtype == torch.uint8:
            made = made.clamp(0, 255)
        made = made.round().to(image.dtype)
    return made.reshape(*image.shape[:-2], rows, columns)


def pad(
    image: Tensor,
    padding: int | Sequence[int],
    fill: float | Sequence[float] | None = 0,
    padding_mode: str = "constant",
) -> Tensor:
    """``padding``: left, top, right, bottom; or left and right, top and bottom; or of all sides.
    ``fill``: one number, or one for each channel."""
    sides = [padding] * 4 if isinstance(padding, int) else list(padding)
    left, top, right, bottom = sides * (4 // len(sides))
    flat, around = image.reshape(-1, *image.shape[-3:]), (left, right, top, bottom)
    if padding_mode == "constant":
        values = torch.as_tensor(0 if fill is None else fill).flatten()
        made = flat.new_empty(F.pad(flat, around).shape)
        made[:] = values.to(flat.dtype).view(-1, 1, 1)
        made[..., top : top + image.shape[-2], left : left + image.shape[-1]] = flat
    else:
        mode = {"edge": "replicate", "reflect": "reflect"}[padding_mode]
        made = F.pad(flat.float(), around, mode=mode).to(flat.dtype)
    return made.reshape(*image.shape[:-2], *made.shape[-2:])


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A part of the image; zeros where it reaches beyond."""
    rows, columns = image.shape[-2:]
    part = image[..., max(top, 0) : top + height, max(left, 0) : left + width]
    right, bottom = max(left + width - columns, 0), max(top + height - rows, 0)
    around = (min(max(-left, 0), width), min(max(-top, 0), height), right, bottom)
    return pad(part, around) if any(around) else part


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """(image - mean) / std, by channel."""
    mean, std = (
        torch.as_tensor(value, dtype=image.dtype).reshape(-1, 1, 1) for value in (mean, std)
    )
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """Three equal channels of an image of one; others are left as they are."""
    if image.shape[-3] != 1:
        return image
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:])


def to_dtype(image: Tensor, dtype: torch.dtype = torch.float32, scale: bool = False) -> Tensor:
    """``scale``: bytes 0 to 255 become floats 0 to 1, and back."""
    if not scale or image.is_floating_point() == dtype.is_floating_point:
        return image.to(dtype)
    if dtype.is_floating_point:
        return image.to(dtype).mul_(1.0 / torch.iinfo(image.dtype).max)
    return image.mul(torch.iinfo(dtype).max + 1.0 - 1e-3).to(dtype)


def to_pil_image(image: Tensor) -> Any:
    """Of bytes, or of floats 0 to 1, with 1 to 4 channels."""
    if image.is_floating_point():
        image = image.mul(255)
    pixels = image.byte().permute(1, 2, 0).cpu().numpy()
    pixels = np.ascontiguousarray(pixels[..., 0] if image.shape[0] == 1 else pixels)
    return importlib.import_module("PIL.Image").fromarray(pixels)


def pil_to_tensor(image: Any) -> Tensor:
    """The bytes of an image of Pillow."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1)


@contextmanager
def imported_as_torchvision() -> Iterator[None]:
    """While modules of transformers are imported that import torchvision: they get this module.
    Nothing else may take it for torchvision, so that it is taken away afterwards."""
    here, made = sys.modules[__name__], [ModuleType(name) for name in _PARENTS]
    whole, transforms, v2 = made
    whole.transforms, transforms.v2 = transforms, v2  # type: ignore[attr-defined]
    transforms.functional = v2.functional = here  # type: ignore[attr-defined]
    transforms.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in made}
    modules |= {f"{name}.functional": here for name in _PARENTS[1:]}
    _complete_base_classes()
    utils = vars(importlib.import_module("transformers.utils"))
    checks = {name: utils[name] for name in _CHECKS}
    sys.modules.update(modules)
    utils.update(dict.fromkeys(_CHECKS, lambda: True))
    try:
        yield
    finally:
        utils.update(checks)
        for name in modules:
            sys.modules.pop(name, None)


def _complete_base_classes() -> None:
    """Base modules of transformers leave names out where torchvision is not installed."""
    resampling = importlib.import_module("PIL.Image").Resampling
    modes = {resampling.NEAREST: InterpolationMode.NEAREST_EXACT}
    for name in ("BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"):
        modes[getattr(resampling, name)] = InterpolationMode[name]
    names = {
        "tvF": sys.modules[__name__],
        "pil_torch_interpolation_mapping": modes,
        "torch_pil_interpolation_mapping": {mode: number for number, mode in modes.items()},
    }
    for module in _BASES:
        vars(importlib.import_module(f"transformers.{module}")).update(names)
    for module in _CHOOSERS:
        importlib.import_module(f"transformers.models.auto.{module}")
