"""Engines with random weights made on the device, and steps that need no prefill."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gpu.roofline import Shape
from gpu.session import Session
from radixlm.config.parser import parse
from radixlm.engine.assemble import EngineCore, assemble
from radixlm.engine.model_info import resolved
from radixlm.executor.runner import Runner
from radixlm.quant.param import Param
from radixlm.step.plan import Admission, Item, PageUpdate, StepPlan
from radixlm.weights import load
from radixlm.weights.param_reader import DummyReader
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.sampling_params import SamplingParams

MOST_LEFT_BYTES = 1 << 30
_NO_IDS = np.zeros(0, np.int32)


class DeviceReader(DummyReader):
    """Random weights with the sizes of `--load-format dummy`, drawn on the device."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        super().__init__(folder)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def read(self, path: str, param: Param) -> Tensor:
        value = torch.empty(param.shape, dtype=self._dtype, device=self._device)
        if len(param.shape) == 1:
            mean = 1.0 if "norm" in path else 0.0
            return value.normal_(mean, 0.02, generator=self._generator)
        return value.normal_(0.0, 1 / math.sqrt(param.shape[-1]), generator=self._generator)


@contextlib.contextmanager
def opened(s: Session, shape: Shape, *flags: str, folder: Path | None = None) -> Iterator[Engine]:
    """An engine of the shape with random weights, or of `folder`; closed and freed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        path = folder or Path(scratch)
        if folder is None:
            dtype = "float32" if s.is_smoke else "bfloat16"
            (path / "config.json").write_text(json.dumps(shape.config(dtype, _context(s))))
        engine = Engine(s, path, (() if folder else ("--load-format", "dummy")) + flags)
        try:
            yield engine
        finally:
            engine.close()
            s.free()
            _check_freed(s)


def _check_freed(s: Session) -> None:
    """Report tensors that an engine left behind, because the next engine needs their memory."""
    if s.device.type == "cuda" and (held := torch.cuda.memory_allocated()) > MOST_LEFT_BYTES:
        s.add(what="left behind by an engine", bytes=held)


def _context(s: Session) -> int:
    return 256 if s.is_smoke else 40960


class Engine:
    """An engine core without a process, driven through its scheduler or its runner alone."""

    def __init__(self, s: Session, path: Path, flags: Sequence[str]) -> None:
        common = [
            "--model-path", str(path), "--device", s.device.type, "--skip-tokenizer-init",
            "--random-seed", "1",
        ]  # fmt: skip
        if s.is_smoke:
            common += ["--max-total-tokens", "8192", "--cpu-threads", "1", "--dtype", "float32"]
        config, info = resolved(*parse([*common, *flags], prog="bench/gpu"))
        self.mine, theirs = MemoryChannel.pair()

        def reader(folder: Path, *given: object) -> DeviceReader:
            return DeviceReader(s.device, folder)

        with mock.patch.object(load, "DummyReader", reader):
            self.replica: EngineCore = assemble(config, info, theirs)
        self.vocab = info.decoder.vocab
        self.scheduler = self.replica.scheduler
        executor = self.scheduler.executor
        assert isinstance(executor, Runner)
        self.runner: Runner = executor
        self.page_size = self.scheduler.limits.page_size
        self.num_tokens = int(self.replica.facts["max_total_num_tokens"])

    def close(self) -> None:
        """Drop every reference to tensors."""
        self.runner.drop_graphs()
        del self.replica, self.scheduler, self.runner

    @torch.inference_mode()
    def fill_cache(self) -> None:
        """Fill the KV cache with random keys and values."""
        for pool in self.runner.attn.pools:
            for tensor in (pool.k_LPBKC, pool.v_LPBKV) if hasattr(pool, "k_LPBKC") else ():
                if tensor is not None and tensor.dtype.itemsize > 1:
                    tensor.normal_()

    def takes(self, batch: int, tokens: int) -> bool:
        """Whether so many sequences of so many tokens fit the cache and the slots."""
        pages = batch * -(-tokens // self.page_size)
        fits = pages <= self.num_tokens // self.page_size
        limits = self.scheduler.limits
        return fits and batch <= limits.max_running and tokens <= limits.context_len

    def enter(self, batch: int, tokens: int, adapters: Sequence[int] = ()) -> StepPlan:
        """A plan without items that gives slots 0, 1, ... pages for `tokens` each, in random
        order, and one of the adapters in turn."""
        draw, per = np.random.default_rng(1), -(-tokens // self.page_size)
        pages = 1 + draw.permutation(self.num_tokens // self.page_size)[: batch * per]
        rows = pages.astype(np.int32).reshape(batch, per)
        prompt = draw.integers(0, self.vocab, 8, np.int32)
        sampling = SamplingParams(max_new_tokens=1 << 20, temperature=0.0, ignore_eos=True)
        of = [adapters[b % len(adapters)] if adapters else -1 for b in range(batch)]
        admissions = [
            Admission(f"{b}", b, sampling, prompt, _NO_IDS, adapter=of[b]) for b in range(batch)
        ]
        updates = [PageUpdate(0, b, 0, rows[b]) for b in range(batch)]
        return StepPlan(0, (), tuple(admissions), pages=tuple(updates))

    def decodes(self, batch: int, length: int) -> tuple[Item, ...]:
        """Items that each decode one token after `length` tokens."""
        return tuple(Item(f"{b}", b, length - 1, 1, None, True) for b in range(batch))

    def prompts(self, batch: int, count: int, prefix: int) -> tuple[Item, ...]:
        """Items that each compute `count` random tokens after `prefix` cached ones."""
        draw = np.random.default_rng(2)
        return tuple(
            Item(f"{b}", b, prefix, count, draw.integers(0, self.vocab, count, np.int32), True)
            for b in range(batch)
        )
