"""Assembly of an engine for a GPU, with a fake card that accounts for its bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.config import resolve as resolving
from radixlm.config.server_config import ServerConfig
from radixlm.cuda_graphs.graphs import GraphSizes
from radixlm.devices.cuda import CudaDevice, cuda_device
from radixlm.devices.device import CpuDevice
from radixlm.engine import gpu
from radixlm.engine import load_engine as assembly
from radixlm.executor.runner import Runner
from radixlm.step.plan import Items, StepPlan
from tests.fakes.tiny_checkpoint import cached_tiny

MIB = 1 << 20
WEIGHTS, STEP, GRAPHS, PROMPT = 3 * MIB, 2 * MIB, MIB, MIB // 2


class Account(CudaDevice):
    """A card of 30 MiB: the weights take 3, the largest steps 2, and graphs 1.5."""

    is_synchronous = True

    def __init__(self) -> None:
        self._cpu = CpuDevice()
        self.where = self._cpu.where
        self.is_loaded = False
        self.peaks = iter((STEP, STEP, GRAPHS, PROMPT))  # of prompts, drafts, decodes, prompts
        for name in ("launch", "record", "pinned", "upload", "download", "capture"):
            setattr(self, name, getattr(self._cpu, name))

    def free_bytes(self) -> int:
        return 30 * MIB - WEIGHTS * self.is_loaded

    def total_bytes(self) -> int:
        return 30 * MIB

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return next(self.peaks)

    def empty_cache(self) -> None:
        self.is_loaded = True


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    monkeypatch.setattr(assembly, "open_device", lambda config, rank: account)
    monkeypatch.setattr(assembly, "_graph_sizes", lambda *args: GraphSizes((1, 2), (16, 32)))
    monkeypatch.setattr(gpu, "GRAPH_BYTES", 100_000)
    monkeypatch.delitem(resolving.CPU_DEFAULTS, "mem_fraction_static")
    return account


def _engine(**options: Any) -> radixlm.Engine:
    folder = cached_tiny("LlamaForCausalLM")
    options = {"chunked_prefill_size": 32, "max_running_requests": 5, **options}
    return radixlm.Engine(model_path=str(folder), cpu_threads=1, log_level="error", **options)


def _answer(engine: radixlm.Engine) -> Any:
    params = {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True}
    return engine.generate(input_ids=[5, 6, 7], sampling_params=params)["output_ids"]


def test_the_cache_gets_the_memory_that_the_largest_steps_leave(
    card: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    forward = Runner.forward

    def noted(self: Runner, plan: StepPlan) -> Any:
        plans.append(plan)
        return forward(self, plan)

    monkeypatch.setattr(Runner, "forward", noted)
    with _engine(max_running_requests=200) as engine:
        kv_bytes = engine._engine._serving._facts["kv_bytes"]
        answer = _answer(engine)
    want = (
        30 * MIB - WEIGHTS - STEP - GRAPHS - PROMPT - 4 * 100_000 - int(30 * MIB * gpu.SPARE_SHARE)
    )
    assert 0.97 * want < kv_bytes <= want
    tried = [plan for plan in plans[:8] if Items.of(plan.items).drafts is None][:3]
    # a step full of prompts with all requests, then the decodes of the largest graph
    assert [len(plan.items) for plan in tried] == [1, 200, 2]
    assert tried[1].num_tokens == 200
    monkeypatch.undo()
    with _engine() as engine:
        assert _answer(engine) == answer


def test_a_fraction_that_was_given_is_kept(card: Account) -> None:
    with _engine(mem_fraction_static=0.5, max_total_tokens=64) as engine:
        assert len(_answer(engine)) == 9
    assert next(card.peaks) == STEP  # no trial step ran


def test_steps_that_do_not_fit_name_the_flags(
    card: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(work: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(card, "peak_bytes", full)
    with pytest.raises(
        ConfigError, match=r"--chunked-prefill-size or --max-running-requests \(5\)"
    ):
        _engine()


def test_graphs_that_cannot_be_captured_are_skipped(
    card: Account, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(card, "capture", fail)
    with caplog.at_level(logging.WARNING, "radixlm"), _engine() as engine:
        assert len(_answer(engine)) == 9
    assert "steps run without them" in caplog.text


def test_a_step_that_ran_out_of_memory_runs_again(card: Account) -> None:
    failures: list[int] = []
    with _engine() as engine:
        want = _answer(engine)
        runner = engine._engine._serving.scheduler.executor
        step = runner.model.step

        def full(batch: Any, need_hidden: bool) -> Any:
            if not failures:
                failures.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return step(batch, need_hidden)

        runner.model.step = full
        runner.device.reclaim_memory = lambda: True
        assert _answer(engine) == want and failures


def test_a_missing_gpu_is_an_error_with_an_alternative() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="--device cpu"):
        cuda_device(0)


@pytest.mark.parametrize(
    ("flags", "rank", "index"),
    [
        ({"tp_size": 2}, 1, 1),
        ({"tp_size": 2, "base_gpu_id": 4, "gpu_id_step": 2}, 1, 6),
        ({"tp_size": 2, "gpu_id_step": 0}, 1, 0),
        ({"tp_size": 2, "pp_size": 2, "nnodes": 2}, 3, 1),
    ],
)
def test_the_gpu_of_a_rank(
    flags: dict[str, Any], rank: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of a node are counted anew."""
    monkeypatch.setattr(gpu, "CudaDevice", lambda number, collects: number)
    config = ServerConfig().with_values({"device": "cuda", **flags})
    assert gpu.open_device(config, rank) == index


def test_prefill_and_decode_backends_share_one_cache() -> None:
    """The C++ cache has a layout of its own."""
    with pytest.raises(ConfigError, match="cannot share a KV cache"):
        _engine(prefill_attention_backend="torch_native", decode_attention_backend="cpu")
