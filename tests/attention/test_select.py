"""Different backends for prefill and decode: which one runs a step, over which pool, and which
pairs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.paged_step import make_batch, new_rows, open_backend, run_step
from tests.fakes.attention_case import CPU, Case

from radixlm.attention import select
from radixlm.attention.reference import TorchNativeBackend
from radixlm.attention.select import HybridBackend
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite

SITE = AttentionSite(layer=0, group=0, heads=4, kv_heads=2, head_dim=16, v_dim=16, scale=0.3)
GROUPS = (KvGroup(0, "full", (0,), 2, 16, 16),)


class Named(TorchNativeBackend):
    """A torch_native backend that records its steps."""

    steps: list[tuple[str, int]]

    def begin(self, batch: Any) -> None:
        self.steps.append((self.name, batch.num_tokens))
        super().begin(batch)


def pair() -> tuple[HybridBackend, list[tuple[str, int]]]:
    parts = [Named(GROUPS, bind("cpu", {"all": "reference"}), CPU) for _ in range(2)]
    steps: list[tuple[str, int]] = []
    for part, name in zip(parts, ("of prompts", "of decodes"), strict=True):
        part.name, part.steps = name, steps
    return HybridBackend(*parts), steps


def test_the_longest_query_picks_the_backend_of_a_step() -> None:
    mixed, steps = pair()
    whole = Case.random(SITE, [(12, 0), (5, 0)], 4, 1)
    plain, table = open_backend("torch_native", whole, SITE)
    num_pages = plain.pools[0].num_pages
    pool = mixed.make_pool(GROUPS[0], num_pages, 4, torch.float32)
    assert mixed.prefill.pools[0] is mixed.decode.pools[0] is mixed.pools[0] is pool
    # all but the last tokens as prompts, then one token for each
    first = Case(
        [q[:-1] for q in whole.q], [k[:-1] for k in whole.k], [v[:-1] for v in whole.v], 4, 1
    )
    last = replace(whole, q=[q[-1:] for q in whole.q])
    outs = []
    for case in (first, last):
        mixed.begin(make_batch(case, table, mixed))
        outs.append(mixed.run(*new_rows(case, SITE, torch.float32), SITE))
    assert steps == [("of prompts", 15), ("of decodes", 2)]
    expected = run_step("torch_native", whole, SITE).split([12, 5])
    torch.testing.assert_close(outs[1], torch.stack([x[-1] for x in expected]))
    torch.testing.assert_close(outs[0], torch.cat([x[:-1] for x in expected]))


def test_its_name_is_the_decode_backends() -> None:
    assert pair()[0].name == "of decodes"


def test_equal_names_make_one_backend() -> None:
    kernels = bind("cpu", {"all": "reference"})
    for names in ({}, {"prefill": "torch_native"}, {"decode": "torch_native"}):
        backend = select.make_backend("torch_native", GROUPS, kernels, CPU, **names)
        assert isinstance(backend, TorchNativeBackend)


def test_phases_override_the_common_name() -> None:
    pytest.importorskip("triton")
    kernels = bind("cpu", {"all": "reference"})
    backend = select.make_backend("torch_native", GROUPS, kernels, CPU, decode="triton")
    assert isinstance(backend, HybridBackend)
    assert (backend.prefill.name, backend.decode.name) == ("torch_native", "triton")
    backend = select.make_backend("triton", GROUPS, kernels, CPU, prefill="torch_native")
    assert isinstance(backend, HybridBackend) and backend.name == "triton"


@pytest.mark.skipif(not cpu.available, reason=cpu.reason)
def test_different_cache_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--decode-attention-backend cpu .*cpu for both works"):
        select.make_backend("torch_native", GROUPS, bind("cpu"), CPU, decode="cpu")


def test_page_sizes_and_dtypes_are_what_both_support() -> None:
    mixed, _ = pair()
    mixed.decode.supports = lambda size: size == 128  # type: ignore[method-assign]
    mixed.prefill.supports_dtype = lambda dtype: dtype != torch.int8  # type: ignore[method-assign]
    assert mixed.supports(128) and not mixed.supports(16)
    assert mixed.supports_dtype(torch.float32) and not mixed.supports_dtype(torch.int8)
    assert mixed.page_nbytes(GROUPS[0], 4, torch.float32) == 4 * 2 * 32 * 4


def test_a_gpu_prefers_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    assert select.default_backend(cuda) == "triton"
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert select.default_backend(cuda) == "torch_native"
    with pytest.raises(ConfigError, match=r"needs the package triton; torch_native works"):
        select.make_backend("triton", GROUPS, bind("cpu", {"all": "reference"}), CPU)
