"""Prompts without a prefix: which steps bypass the pages, and that their result is the same.
torch's reference implementation stands in for cuDNN's, which runs on GPUs only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.paged_step import make_batch, new_rows, open_backend, run_step
from tests.fakes.attention_case import Case
from torch.nn.attention import SDPBackend

from radixlm.attention import cudnn
from radixlm.base.record import replace
from radixlm.step.batch import AttentionSite

SITE = AttentionSite(layer=0, group=0, heads=4, kv_heads=2, head_dim=16, v_dim=16, scale=0.3)
ONES = torch.ones(4)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "MIN_TOKENS", 8)
    monkeypatch.setattr(cudnn, "STEP", 1)


def takes(shapes: list[tuple[int, int]], bidirectional_spans: Any = (), **changes: Any) -> bool:
    case = Case.random(SITE, shapes, 4, 1)
    backend, table = open_backend("torch_native", case, SITE)
    return cudnn.takes(
        make_batch(case, table, backend, bidirectional_spans), replace(SITE, **changes)
    )


def test_takes_new_sequences_of_one_length() -> None:
    assert takes([(9, 0)]) and takes([(9, 0), (9, 0)])
    assert not takes([(9, 1)])  # a prefix
    assert not takes([(9, 0), (9, 2)]) and not takes([(9, 0), (8, 1)])
    assert not takes([(9, 0), (8, 0)])  # two lengths
    assert not takes([(7, 0)])  # too short to pay off
    assert not takes([(1, 0), (1, 8)])
    assert not takes([(9, 0)], bidirectional_spans=((2, 3),))


def test_takes_repeated_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "STEP", 4)
    assert takes([(12, 0)]) and not takes([(13, 0)])


def test_after_a_cudnn_error_other_kernels_run_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    case = Case.random(SITE, [(9, 0)], 4, 2)
    want = run_step("triton", case, SITE)
    asked = []

    def fail(*args: Any) -> Any:
        asked.append(args)
        raise RuntimeError("No available kernel. Aborting execution.\nand more")

    monkeypatch.setattr(cudnn, "is_available", lambda *args: True)
    monkeypatch.setattr(cudnn, "attend", fail)
    assert torch.equal(run_step("triton", case, SITE), want)
    assert (
        asked
        and "cuDNN attention failed, the Triton kernels run instead: No available kernel."
        in caplog.text
    )


def test_takes_plain_attention_only() -> None:
    assert takes([(9, 0)], window=9) and takes([(9, 0)], chunk=20)  # the window covers all tokens
    for changes in (
        {"window": 8}, {"chunk": 8}, {"softcap": 1.0}, {"sinks": ONES}, {"slopes": ONES},
        {"latent": True}, {"stores": False}, {"v_dim": 8}, {"head_dim": 256, "v_dim": 256},
        {"head_dim": 20, "v_dim": 20},
    ):  # fmt: skip
        assert not takes([(9, 0)], **changes), changes


def test_equals_attention_over_the_pages() -> None:
    case = Case.random(SITE, [(19, 0), (19, 0)], 4, 2)
    q, k, v = new_rows(case, SITE, torch.float32)
    assert q is not None and k is not None and v is not None
    # rows with the stride of a fused projection
    packed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    q, k, v = (x.view(len(packed), -1, 16) for x in packed.split([4 * 16, 2 * 16, 2 * 16], 1))
    out = cudnn.attend(q, k, v, SITE, 2, SDPBackend.MATH)
    torch.testing.assert_close(out, run_step("torch_native", case, SITE), rtol=1e-4, atol=1e-6)


def test_a_cpu_has_no_cudnn() -> None:
    x = torch.zeros(9, 2, 16, dtype=torch.bfloat16)
    assert not cudnn.is_available(x, x, x)
