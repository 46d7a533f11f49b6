"""cuDNN attention for prompts without a prefix, whose K and V need not be read from pages.

scaled_dot_product_attention prefers other kernels, but on Hopper cuDNN's is the fastest one in
torch, so it is selected by name.

Legend: T packed tokens, S sequences, L tokens of each, H query heads, K KV heads, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from radixlm.step.batch import AttentionSite, ForwardBatch

MIN_TOKENS = 512  # of a sequence; for shorter ones another kernel does not pay
# cuDNN plans each new shape, which takes longer than most prompts: only lengths that recur, above
# all whole chunks, are worth it
STEP = 512
MAX_DIM = 128


def takes(batch: ForwardBatch, site: AttentionSite) -> bool:
    """Whether the step is plain causal attention over new sequences of one length. Reads nothing
    from the device."""
    length = batch.max_query_len
    is_even = batch.num_tokens == batch.num_sequences * length
    is_new = batch.max_kv_len == length  # the longest has no prefix, so none has
    return (
        length >= MIN_TOKENS
        and length % STEP == 0
        and is_even
        and is_new
        and not batch.bidirectional_spans
        and site.stores
        and not site.latent
        and site.head_dim == site.v_dim <= MAX_DIM
        and site.head_dim % 8 == 0
        and not (site.window and site.window < length)
        and not (site.chunk and site.chunk < length)
        and not site.softcap
        and site.sinks is None
        and site.slopes is None
    )


def is_available(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> bool:
    """Whether cuDNN supports such tensors here."""
    if not q_THC.is_cuda or q_THC.dtype == torch.float32:
        return False
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THC, k_TKC, v_TKC))
    grouped = q_THC.shape[1] != k_TKC.shape[1]
    return bool(can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, grouped)))


def attend(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    site: AttentionSite,
    num_sequences: int,
    backend: SDPBackend = SDPBackend.CUDNN_ATTENTION,
) -> Tensor:
    """[T, H * C] of sequences of one length."""
    q, k, v = (
        x.view(num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
    )  # [S, heads, L, C]
    grouped = site.heads != site.kv_heads
    with sdpa_kernel([backend]):
        out_SHLC = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=site.scale, enable_gqa=grouped
        )
    return out_SHLC.transpose(1, 2).flatten(0, 1).flatten(1)
