"""Products and averages of activations in which the bits of a row do not depend on the other rows,
nor on what its sum leaves out: for layers that no kernel computes whole.

Legend: M rows, N outputs, K inputs; of attention Q queries, N keys, C channels, V of a value;
S tokens of each of P pools.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.cpu.extension import available
from radixlm.kernels.cpu.linear import pack_rows

LANES = 64  # rows of so many numbers leave no rest that torch would compute in another way


def row_products(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """``x @ w.T``. On a CPU in float32, each number one chain of fused multiply-adds over ascending
    k: zeros before, in or behind it change nothing."""
    if not x_MK.is_cpu or not available or not len(x_MK) or not len(w_NK):
        return x_MK @ w_NK.T.to(x_MK.dtype)
    if len(w_NK) > 2 * len(x_MK):  # the same chains, and less is packed
        return _chains(w_NK, x_MK).T.contiguous()
    return _chains(x_MK, w_NK)


def _chains(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    # single columns may have any stride, which the kernel does not take
    x, w = (
        t.float() if t.stride(-1) == 1 else t.float().clone(memory_format=torch.contiguous_format)
        for t in (x_MK, w_NK)
    )
    return pack_rows([w], None, "fp32").run(x)


def place_shares(x_PSC: Tensor) -> Tensor:
    """The softmax over the second axis. torch's own rounds by where its threads begin."""
    return x_PSC.transpose(1, 2).contiguous().softmax(-1).transpose(1, 2)


def head_products(q_HQC: Tensor, k_NKC: Tensor) -> Tensor:
    """Scores float32 [H, Q, N]; so many heads of q in turn have the same keys."""
    heads, kv_heads = q_HQC.shape[0], k_NKC.shape[1]
    rows = q_HQC.reshape(kv_heads, -1, q_HQC.shape[-1])
    scores = _each_product(rows, k_NKC.transpose(0, 1))
    return scores.view(heads, q_HQC.shape[1], k_NKC.shape[0]).float()


def head_averages(scores_HQN: Tensor, v_NKV: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Values weighted by the softmax of scores, which may be -inf, and of a sink: [Q, H, V].
    ``sinks_H`` may be [H, Q]."""
    heads, num_queries, count = scores_HQN.shape
    scores = F.pad(scores_HQN, (0, -count % LANES), value=-torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(heads, -1, 1).expand(heads, num_queries, 1)
        scores = torch.cat((scores, F.pad(sinks, (0, LANES - 1), value=-torch.inf)), -1)
    weights = scores.softmax(-1)[..., :count].to(v_NKV.dtype)
    out = _each_product(weights.reshape(v_NKV.shape[1], -1, count), v_NKV.permute(1, 2, 0))
    return out.view(heads, num_queries, -1).transpose(0, 1)


def _each_product(x_BMK: Tensor, w_BNK: Tensor) -> Tensor:
    if not x_BMK.is_cpu or not available:
        return x_BMK @ w_BNK.mT.to(x_BMK.dtype)
    return torch.stack([row_products(x, w) for x, w in zip(x_BMK, w_BNK, strict=True)])
