"""How kernels run: compiled on a GPU, or interpreted on the CPU under ``TRITON_INTERPRET=1``.

Every module of kernels takes ``triton``, ``tl`` and these names from here or from triton itself,
after this module. In the interpreter ``tl.dot`` of bfloat16 is wrong and arithmetic of bfloat16
fails, so kernels load, then ``.to(tl.float32)``, and pass the operands of a dot through
``operand``.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the rule of 3.x, said before 3.10 turns

import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(IS_INTERPRETED)


def interpreting() -> bool:
    """Whether kernels of this process run on CPU tensors, statement by statement."""
    return IS_INTERPRETED


def runs_on(x: Tensor) -> bool:
    """Whether a kernel can take the tensor: on a GPU, or anywhere when interpreting."""
    return x.is_cuda or IS_INTERPRETED


@triton.jit
def operand(x):
    """An operand of ``tl.dot``: float32 in the interpreter, as it is on a GPU."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x
