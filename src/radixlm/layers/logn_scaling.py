"""LogN scaling: factors of queries by position (``spec.LogNScaling``). Legend: T tokens."""

import torch
from torch import Tensor

from radixlm.arch.spec import LogNScaling


def logn_scales(spec: LogNScaling, positions_T: Tensor) -> Tensor:
    """Factor of each token's query: float32 [T]."""
    periods = (positions_T.float() + spec.offset) / spec.period
    if spec.is_power:
        return torch.exp(spec.beta * torch.log1p(periods))
    periods = torch.floor(periods)
    return 1.0 + spec.beta * torch.log1p(periods)
