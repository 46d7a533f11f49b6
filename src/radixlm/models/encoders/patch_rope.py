"""Rotary positions of patches by row and column, square by square of those that are merged."""

import torch
from torch import Tensor

_BASE = 10_000.0


def square_places(rows: int, columns: int, merge: int) -> Tensor:
    """int64 [rows * columns, 2]: row and column of each patch, square by square of ``merge``."""
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    squares = grid.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return squares.reshape(-1, 2)


def turns(places: Tensor, half: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 2 * half] of int64 [N, 2] rows and columns: the first quarter of a head's
    channels follows the row, the second the column, and again. Device and dtype of ``like``."""
    speeds = _BASE ** -(torch.arange(0, half, 2, device=like.device) / half)
    angles = (places.to(like.device)[..., None] * speeds).flatten(1).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., N, channels of a head] with its halves rotated."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
