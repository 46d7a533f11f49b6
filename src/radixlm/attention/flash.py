"""fa3 and fa4: the kernels of FlashAttention, if its packages are installed.

Not run on hardware: tests check the calls against the packages' published signatures.

Legend: T packed tokens, H query heads, K KV heads, C channels.
"""

import torch
from torch import Tensor

from radixlm.attention.paged import PluginBackend
from radixlm.step.batch import AttentionSite

HALVES = (torch.bfloat16, torch.float16)


class Fa3Backend(PluginBackend):
    """FlashAttention 3: ``flash_attn_interface``, built from its ``hopper`` folder."""

    name = "fa3"
    module = "flash_attn_interface"
    install = "flash_attn_interface (flash-attention/hopper, for sm_90)"
    dtypes = HALVES
    lacks = ("sinks", "slopes")

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend: [T, H * V]."""
        batch, _, k_PBKC, v_PBKV = self.open_layer(q_THD, k_TKD, v_TKV, site)
        out_THV: Tensor = self.package.flash_attn_with_kvcache(
            q_THD,
            k_PBKC,
            v_PBKV,
            cache_seqlens=batch.kv_len_S,
            page_table=batch.page_table_GSP[site.group],
            cu_seqlens_q=batch.query_start_S1,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=site.scale,
            causal=True,
            window_size=(site.window - 1, 0) if site.window else (-1, -1),
            attention_chunk=site.chunk,
            softcap=site.softcap,
        )
        return out_THV.flatten(1)


class Fa4Backend(PluginBackend):
    """FlashAttention 4: ``flash_attn.cute`` of the package flash-attn-4. A page is one of its
    tiles."""

    name = "fa4"
    module = "flash_attn.cute"
    install = "flash-attn-4"
    required_page_size = 128
    dtypes = HALVES
    lacks = ("slopes", "chunk")

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend: [T, H * V]."""
        batch, _, k_PBKC, v_PBKV = self.open_layer(q_THD, k_TKD, v_TKV, site)
        result = self.package.flash_attn_varlen_func(
            q_THD,
            k_PBKC,
            v_PBKV,
            cu_seqlens_q=batch.query_start_S1,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.kv_len_S,
            page_table=batch.page_table_GSP[site.group],
            softmax_scale=site.scale,
            causal=True,
            window_size=(site.window - 1, 0) if site.window else (None, None),
            learnable_sink=None if site.sinks is None else site.sinks.to(torch.bfloat16),
            softcap=site.softcap,
        )
        out_THV: Tensor = result[0] if isinstance(result, tuple) else result
        return out_THV.flatten(1)
