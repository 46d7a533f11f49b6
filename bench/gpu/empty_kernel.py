"""A kernel that does nothing, to measure the cost of a launch."""

from __future__ import annotations

import triton


@triton.jit
def empty_kernel(x_ptr):  # type: ignore[no-untyped-def]
    """Does nothing."""
    return
