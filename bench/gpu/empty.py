"""A kernel that does nothing: what a launch costs."""

from __future__ import annotations

import triton


@triton.jit
def empty_kernel(x_ptr):  # type: ignore[no-untyped-def]
    """Nothing."""
    return
