"""``--load-format dummy``: deterministic random weights of the right shapes, no files read."""

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from radixlm.arch.json_file import object_or_empty
from radixlm.kernels.generator import seeded
from radixlm.quant.param import Param


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """The dtype that config.json states, float32 if it states none that exists."""
    config = object_or_empty(folder / "config.json")
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return torch.float32


def dummy_value(path: str, param: Param, dtype: torch.dtype) -> Tensor:
    """Random numbers that depend on ``path`` only, of a size that keeps activations near one; of
    the whole shape of the parameter."""
    shape = param.whole_shape
    if param.storage == "int64":
        return torch.zeros(shape, dtype=torch.int64)
    generator = seeded(zlib.crc32(path.encode()))
    if len(shape) == 1:
        is_norm = path.endswith("norm.weight") or "norm" in path.split(".")[-2]
        near = 1.0 if is_norm and path.endswith(".weight") else 0.0
        return torch.empty(shape).normal_(near, 0.02, generator=generator).to(dtype)
    scale = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).normal_(0.0, scale, generator=generator).to(dtype)
