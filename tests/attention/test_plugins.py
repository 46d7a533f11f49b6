"""Calls to flashinfer, fa3 and fa4, checked against the packages' published signatures by stand-ins
that compute in torch. The packages themselves do not run here."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from tests.attention.paged_step import make_batch, new_rows, open_backend, run_step
from tests.fakes.attention_case import CPU, Case
from torch import Tensor

from radixlm.attention import flashinfer as flashinfer_backend
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.kernels.dispatch import bind
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite

SITE = AttentionSite(layer=1, group=0, heads=4, kv_heads=2, head_dim=16, v_dim=16, scale=0.3)
HALF = torch.float16
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def answer(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], pages: Sequence[Tensor],
    lengths: Sequence[int], scale: float, left: int, softcap: float, sinks: Tensor | None = None,
    chunk: int = 0,
) -> Tensor:  # fmt: skip
    """[T, H, V] of packed queries over pages [P, B, K, C]."""
    outs = []
    for row, length in enumerate(lengths):
        own = q[starts[row] : starts[row + 1]].float()
        keys, values = (
            x[pages[row][: -(-length // x.shape[1])].long()].flatten(0, 1)[:length].float()
            for x in (k, v)
        )
        group = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhc,nhc->hqn", own, keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(length - len(own), length)[:, None]
        key = torch.arange(length)
        hidden = (key > at) | ((key < at - left) if left >= 0 else torch.zeros(1, dtype=bool))
        if chunk:
            hidden |= key // chunk != at // chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            extra = sinks.float()[:, None, None].expand(-1, len(own), 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1)[..., :length]
        outs.append(torch.einsum("hqn,nhv->qhv", weights, values))
    return torch.cat(outs).to(q.dtype)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """The signature of flash-attention's hopper/flash_attn_interface.py."""
    assert causal and k is None and page_table.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return answer(
        q, k_cache, v_cache, cu_seqlens_q.tolist(), list(page_table), cache_seqlens.tolist(),
        softmax_scale, window_size[0], softcap, chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False,
):  # fmt: skip
    """The signature of flash_attn/cute/interface.py; returns (out, lse)."""
    assert causal and cu_seqlens_k is None and k.shape[1] == 128
    left = -1 if window_size[0] is None else window_size[0]
    out = answer(
        q, k, v, cu_seqlens_q.tolist(), list(page_table), seqused_k.tolist(), softmax_scale, left,
        softcap, learnable_sink,
    )  # fmt: skip
    return out, None


class _Wrapper:
    made: ClassVar[list[_Wrapper]] = []

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=None):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.plans = 0
        type(self).made.append(self)

    def _keep(self, starts, indptr, indices, last, heads, kv_heads, dim, page_size, asked):
        self.plans += 1
        self.starts, self.page_size, self.asked = starts, page_size, asked
        at = indptr.tolist()
        self.pages = [indices[a:b] for a, b in itertools.pairwise(at)]
        self.lengths = [
            (len(p) - 1) * page_size + int(n) for p, n in zip(self.pages, last, strict=True)
        ]
        self.shape = (heads, kv_heads, dim)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        k, v = paged_kv_cache
        assert (q.shape[1], k.shape[2], k.shape[3]) == self.shape and k.shape[1] == self.page_size
        scale, left, cap = self.asked
        return answer(q, k, v, self.starts, self.pages, self.lengths, scale, left, cap)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True,
    ):  # fmt: skip
        asked = (sm_scale, window_left, logits_soft_cap or 0.0)
        starts = list(range(len(last_page_len) + 1))
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._keep(starts, indptr, indices, last_page_len, *shape, asked)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        non_blocking=True,
    ):  # fmt: skip
        assert causal
        asked = (sm_scale, window_left, logits_soft_cap or 0.0)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        kept = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(qo_indptr.tolist(), *kept, *shape, asked)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three packages as modules of stand-ins."""
    flash = ModuleType("flash_attn")
    for name, attributes in {
        "flash_attn_interface": [flash_attn_with_kvcache],
        "flash_attn": [],
        "flash_attn.cute": [flash_attn_varlen_func],
        "flashinfer": [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper],
    }.items():
        module = flash if name == "flash_attn" else ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute.__name__, attribute)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(_Wrapper, "made", [])


PAGE = {"fa3": 4, "fa4": 128, "flashinfer": 4}
SUPPORTED = {
    "plain": (SITE, ("fa3", "fa4", "flashinfer")),
    "window": (replace(SITE, window=5), ("fa3", "fa4", "flashinfer")),
    "softcap": (replace(SITE, softcap=2.0), ("fa3", "fa4", "flashinfer")),
    "chunk": (replace(SITE, chunk=7), ("fa3",)),
    "sinks": (replace(SITE, sinks=SINKS), ("fa4",)),
}


@pytest.mark.parametrize("shapes", [[(1, 9), (1, 30)], [(5, 9), (1, 30), (12, 0)]])
@pytest.mark.parametrize(
    ("name", "backend"), [(name, b) for name, (_, own) in SUPPORTED.items() for b in own]
)
def test_calls_follow_the_attention_site(name: str, backend: str, shapes: Any) -> None:
    site = SUPPORTED[name][0]
    case = Case.random(site, shapes, PAGE[backend], 1, cache_dtype=HALF)
    ours = run_step(backend, case, site, HALF)
    exact = run_step("torch_native", case, site)
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize(
    ("backend", "field"),
    [("fa3", "sinks"), ("fa3", "slopes"), ("fa4", "chunk"), ("flashinfer", "sinks")],
)
def test_missing_features_are_named_with_an_alternative(backend: str, field: str) -> None:
    site = replace(SITE, **{field: 7 if field == "chunk" else SINKS})
    case = Case.random(site, [(1, 9)], PAGE[backend], 1, cache_dtype=HALF)
    pattern = rf"--attention-backend {backend} has no kernel for {field}.*triton works"
    with pytest.raises(ConfigError, match=pattern):
        run_step(backend, case, site, HALF)


@pytest.mark.parametrize("backend", ["fa3", "fa4", "flashinfer"])
def test_a_missing_package_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn.cute", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    group = KvGroup(0, "full", (0,), 2, 16, 16)
    with pytest.raises(ConfigError, match=f"--attention-backend {backend} needs the package"):
        make_backend(backend, (group,), bind("cpu", {"all": "reference"}), CPU)


@pytest.mark.parametrize("backend", ["fa3", "fa4", "flashinfer"])
def test_latents_and_other_cache_types_are_refused(backend: str) -> None:
    kernels = bind("cpu", {"all": "reference"})
    latent = KvGroup(0, "full", (0,), 1, 24, 16, latent=True)
    with pytest.raises(ConfigError, match="no kernel for latent attention"):
        make_backend(backend, (latent,), kernels, CPU)
    made = make_backend(backend, (KvGroup(0, "full", (0,), 2, 16, 16),), kernels, CPU)
    assert not made.supports_dtype(torch.int8) and made.supports_dtype(torch.bfloat16)
    assert made.supports(PAGE[backend]) and made.supports(16) == (backend != "fa4")
    case = Case.random(SITE, [(1, 9)], PAGE[backend], 1, cache_dtype=HALF)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype.*float16"):
        run_step(backend, case, SITE, torch.bfloat16)


def test_flashinfer_plans_once_a_step_and_reuses_its_wrappers() -> None:
    case = Case.random(SITE, [(1, 9), (1, 30)], 4, 1, cache_dtype=HALF)
    backend, table = open_backend("flashinfer", case, SITE)
    for _ in range(2):
        backend.begin(make_batch(case, table, backend))
        for site in (SITE, replace(SITE, layer=0), replace(SITE, window=5)):
            backend.run(*new_rows(case, SITE, HALF), site)
    assert [wrapper.plans for wrapper in _Wrapper.made] == [2, 2]
    assert inspect.signature(_Wrapper.run).parameters.keys() >= {"q", "paged_kv_cache"}


def test_bidirectional_spans_are_refused() -> None:
    case = Case.random(SITE, [(5, 0)], 4, 1, cache_dtype=HALF)
    with pytest.raises(ConfigError, match="see one another forwards"):
        run_step("fa3", case, SITE, HALF, bidirectional_spans=((0, 3),))
