"""Sampling of rows in C++: penalties, bias, mask and suppressed tokens in place, then the draw.

Legend: R rows, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.kernels.cpu.extension import native

# The parameters of one row: struct SampleRow of csrc/common/api.h. Those of the first line and mask
# are addresses of arrays that outlive the call, 0 for none: float32 logits, bool seen [V], int32
# counts [V], int64 and float32 of biases, int32 mask words, int64 suppressed. key: noise.draw_keys.
# top_k: the vocabulary's size means no limit. penalties: repetition, frequency, presence.
ROW = np.dtype(
    [
        *((name, "u8") for name in ("logits", "seen", "counts", "bias_ids", "bias_values")),
        *((name, "u8") for name in ("mask", "suppressed", "key")),
        ("top_k", "i8"),
        *((name, "i4") for name in ("num_bias", "num_suppressed")),
        *((name, "f4") for name in ("temperature", "top_p", "min_p")),
        ("penalties", "f4", 3),
        *((name, "i4") for name in ("is_greedy", "unused")),
    ]
)
Rows = NDArray[Any]  # of ROW


def takes(logits_RV: Tensor) -> bool:
    """Whether ``sample`` can work on these logits."""
    return logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1


def sample(logits_RV: Tensor, rows: Rows, num_threads: int = 0) -> Tensor:
    """int64 [R] tokens. ``logits_RV`` float32 with contiguous rows, changed in place; so are the
    addresses of logits in ``rows``."""
    if not takes(logits_RV):
        raise ValueError("logits: expected float32 with contiguous rows")
    extension, num_rows = native(), len(rows)
    assert extension.SAMPLE_ROW_BYTES == ROW.itemsize and logits_RV.shape[0] == num_rows
    rows["logits"] = logits_RV.data_ptr() + np.arange(num_rows) * (4 * logits_RV.stride(0))
    tokens_R = torch.empty(num_rows, dtype=torch.int64)
    extension.sample(
        rows.ctypes.data, num_rows, logits_RV.shape[1], tokens_R.data_ptr(), num_threads
    )
    return tokens_R
