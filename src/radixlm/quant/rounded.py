"""Float weights that are rounded at load to numbers that no kernel multiplies, and kept as floats:
nf4 of bitsandbytes (arXiv:2305.14314), and 8 bit floats whose products do not round activations."""

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import FORMATS, fake_quantize_weight
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.quant.param import Param
from radixlm.quant.scheme import Scheme

log = logging.getLogger(__name__)
_BLOCK = 64
# quantiles of a normal distribution, scaled to -1..1
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0]
)  # fmt: skip


def nf4(weight: Tensor) -> Tensor:
    """A weight of any shape as bitsandbytes dequantizes it, in its own dtype: blocks of 64 numbers
    in their order, each with its largest magnitude in float32."""
    flat = weight.flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    table = NF4.to(weight.device)
    shares = (blocks * (1.0 / most.clamp(min=1e-38))).clamp(-1, 1)
    codes = torch.bucketize(shares, (table[:-1] + table[1:]) / 2)
    wide = table[codes].mul_(most).flatten()[: flat.numel()]
    return wide.view(weight.shape).to(weight.dtype)


def fp8_rows(weight_OI: Tensor) -> Tensor:
    """A weight rounded to e4m3 with a scale for each row, in its own dtype."""
    return fake_quantize_weight(weight_OI, FORMATS[0])


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {"nf4": nf4, "fp8wo": fp8_rows}


class RoundedScheme(Scheme):
    """Rounds the weights of linear layers; experts, tables and the head stay as they are."""

    def __init__(self, name: str) -> None:
        """``name``: of ROUNDINGS."""
        self._round = ROUNDINGS[name]
        log.info(
            "linear layers are rounded to %s and kept in 16 bits, which saves no memory "
            "(--quantization int4wo-64 or fp8 does); experts are not rounded",
            name,
        )

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        params["weight"].value = self._round(params["weight"].borrow())
        return super().pack(kernels, params, gate_act)
