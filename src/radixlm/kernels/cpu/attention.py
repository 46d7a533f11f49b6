"""Paged attention over the layout of ``cache.py``, decode and prefill rows in one call.

Legend: T packed query tokens, S sequences, H query heads, D channels of K, V of V.
"""

import torch
from torch import Tensor

from radixlm.kernels.cpu.cache import CacheShape
from radixlm.kernels.cpu.checks import expect, vector
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.ops.kv import INT4


class PagedAttention:
    """One kind of attention layer: heads, window, softcap and so on, over caches of one shape."""

    def __init__(
        self,
        num_heads: int,
        cache: CacheShape,
        scale: float,
        *,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        is_causal: bool = True,
        sinks_H: Tensor | None = None,
        slopes_H: Tensor | None = None,
    ) -> None:
        """``chunk``: a token sees only its own chunk of so many positions. ``slopes_H``: slope *
        (key - query position) is added to a score."""
        if num_heads % cache.kv_heads:
            raise ValueError(f"{num_heads} query heads over {cache.kv_heads} KV heads")
        self.num_heads, self.cache = num_heads, cache
        self._sinks = vector(sinks_H, num_heads, "sinks")
        self._slopes = vector(slopes_H, num_heads, "slopes")
        self.handle = native().Attention(
            num_heads, cache.kv_heads, cache.k_dim, cache.v_dim, cache.page_size,
            cache.code, scale, window, chunk, softcap,
            is_causal, address(self._sinks), address(self._slopes),
        )  # fmt: skip

    @property
    def rounds_inputs(self) -> bool:
        """Whether queries and weights are rounded to bfloat16: the cache is exact in it and this
        processor multiplies such numbers, of latents by matrix tiles only."""
        isa = native().isa()
        has_products = isa == "amx" or (isa == "avx512bf16" and not self.cache.is_latent)
        return has_products and self.cache.dtype not in (torch.float32, torch.float16, INT4)

    def run(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table_SP: Tensor,
        query_start_S1: Tensor,
        kv_len_S: Tensor,
        out: Tensor | None = None,
        *,
        tree_mask_TN: Tensor | None = None,
        num_threads: int = 0,
    ) -> Tensor:
        """float32 [T, H, V]. Queries of sequence s are rows query_start[s] .. query_start[s + 1]
        and its last tokens; kv_len counts them. int32 tables. ``tree_mask`` (uint8 [T, N]): which
        new tokens of its sequence a query sees; older ones are all seen."""
        heads, cache, num_seqs = self.num_heads, self.cache, kv_len_S.shape[0]
        num_tokens = q_THD.shape[0]
        expect(q_THD, torch.float32, (-1, heads, cache.k_dim), "q")
        expect(page_table_SP, torch.int32, (num_seqs, -1), "page_table")
        expect(query_start_S1, torch.int32, (num_seqs + 1,), "query_start")
        expect(kv_len_S, torch.int32, (num_seqs,), "kv_len")
        cache.fields(k_cache, v_cache)
        if out is None:
            out = torch.empty(num_tokens, heads, cache.v_dim)
        expect(out, torch.float32, (num_tokens, heads, cache.v_dim), "out")
        for name, x in (("q", q_THD), ("out", out)):
            if heads > 1 and x.stride(1) != x.shape[2]:
                raise ValueError(f"{name}: heads must follow one another")
        if tree_mask_TN is not None:
            expect(tree_mask_TN, torch.uint8, (num_tokens, -1), "tree_mask")
        self.handle.run(
            q_THD.data_ptr(), q_THD.stride(0), out.data_ptr(), out.stride(0),
            k_cache.data_ptr(), v_cache.data_ptr(), page_table_SP.data_ptr(),
            page_table_SP.stride(0), query_start_S1.data_ptr(), kv_len_S.data_ptr(),
            int(kv_len_S.shape[0]), address(tree_mask_TN),
            0 if tree_mask_TN is None else tree_mask_TN.stride(0), num_threads,
        )  # fmt: skip
        return out
