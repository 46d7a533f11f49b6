"""Error of attention over quantized KV caches: one head of 128 channels, 4,096 random tokens,
scores with a deviation of 3, against exact numbers.

    PYTHONPATH=src python bench/kv_cache.py
"""

import torch
from torch import Tensor

from radixlm.kernels.ops import kv

TOKENS, CHANNELS, QUERIES, DEVIATION = 4096, 128, 64, 3.0
LARGE = (3, 50, 97)  # channels


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache holds them."""
    if dtype in kv.SCALED:
        return kv.dequantize(*kv.quantize(x, dtype), x.shape[-1])
    return kv.to_kv(x, dtype).float()


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Outputs in float64."""
    return (q.double() @ k.double().T * scale).softmax(-1) @ v.double()


def rounded_query(q: Tensor) -> Tensor:
    """What the CPU's kernels multiply with keys of int4: 8 bits for each 32 rotated channels."""
    groups = kv.split(kv.rotate(q), -1, (-1, kv.GROUP_4))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return kv.rotate_back(((groups / step).round() * step).flatten(-2))


def errors(large: float) -> dict[str, float]:
    """Relative error by format; a few channels of K are ``large`` times the others."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(TOKENS, CHANNELS, generator=g), torch.randn(TOKENS, CHANNELS, generator=g)
    q = torch.randn(QUERIES, CHANNELS, generator=g)
    k[:, LARGE] *= large
    scale = DEVIATION / float((q @ k.T).std())
    exact = attention(q, k, v, scale)
    held = {
        name: (stored(k, kv.BY_FLAG[name]), stored(v, kv.BY_FLAG[name]))
        for name in ("bf16", "int8", "fp8_e4m3", "fp8_e5m2")
    }
    v4, rotated = stored(v, kv.INT4), kv.rotate_back(stored(kv.rotate(k), kv.INT4))
    held |= {"int4": (rotated, v4), "int4, K not rotated": (stored(k, kv.INT4), v4)}
    held["int4, V rotated too"] = (rotated, kv.rotate_back(stored(kv.rotate(v), kv.INT4)))
    outputs = {name: attention(q, *rows, scale) for name, rows in held.items()}
    outputs["int4, on a CPU"] = attention(rounded_query(q), *held["int4"], scale)
    return {name: float((out - exact).norm() / exact.norm()) for name, out in outputs.items()}


if __name__ == "__main__":
    normal, uneven = errors(1.0), errors(10.0)
    print(f"{'':22}  normal  three channels of K 10x")
    for name, error in normal.items():
        print(f"{name:22}  {error:.3f}   {uneven[name]:.3f}")
