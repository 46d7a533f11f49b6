"""Table look-ups. Legend: T tokens, V rows of the table, D channels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(ids_T: Tensor, table_VD: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` of the table in ``dtype``, times ``scale`` (taken in ``dtype``)."""
    x_TD = F.embedding(ids_T, table_VD).to(dtype)
    return x_TD if scale == 1.0 else x_TD * scale
