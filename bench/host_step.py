"""A decode step without a model: the real scheduler loop, features and runner over a device and a
model that compute nothing. One step is in flight, as on a GPU. So the measured time is what the
host does between two steps, without calls into a GPU driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from step_clock import Clock
from torch import Tensor

from radixlm.base.errors import InvariantError
from radixlm.config.grammar import GrammarConfig
from radixlm.cuda_graphs.graphs import StepGraphs
from radixlm.cuda_graphs.recorded import RecordedSteps
from radixlm.devices.device import CpuDevice, Graph, Work
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.hidden_outputs.buffer import OutputBuffer
from radixlm.hidden_outputs.logprob_budget import LogprobBudget
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.sampling.table import SamplingTable
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Scheduler
from radixlm.step.batch import ForwardBatch
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.codec import scheduler_codec
from radixlm.wire.replies import StepReply
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

PROMPT = 128
# small, so that the fake model costs little; the host's work does not depend on it
VOCAB = 32


class _EmptyGraph:
    """A recorded graph whose launch is one call, as on a GPU."""

    def replay(self) -> None:
        """The model costs nothing."""


class AsyncDevice(CpuDevice):
    """A device that is not synchronous: the loop plans a step ahead of it."""

    is_synchronous = False

    def capture(self, work: Work) -> Graph:
        work()
        return _EmptyGraph()


class NoModel:
    """Model and attention backend in one, without layers."""

    def __init__(self) -> None:
        self.pools: Sequence[Any] = []

    def begin(self, batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def run(self, q_THD: Tensor, k_TKD: Any, v_TKV: Any, site: object) -> Tensor:
        raise InvariantError("a model without layers attends to nothing")

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """Zero logits, so the greedy token is 0."""
        return None, torch.zeros(len(batch.logits_rows_R), VOCAB)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        raise InvariantError("no hidden states, no logits")


class Sender:
    """The engine's end of a channel; encodes replies, as between processes."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel, self._codec = channel, scheduler_codec()
        self.receive, self.close = channel.receive, channel.close

    def send(self, message: Any) -> None:
        self._codec.encode(message)
        self._channel.send(message)


class Steps:
    """A scheduler with `num_running` decoding streams; `step` runs one whole step."""

    def __init__(self, num_running: int, num_steps: int, page_size: int, depth: int = 1) -> None:
        self.limits = Limits(
            max_running=num_running,
            max_queued=None,
            step_tokens=max(2048, 8 * num_running),
            max_prefill_tokens=1 << 20,
            context_len=PROMPT + num_steps + 64,
            page_size=page_size,
            depth=depth,
            vocab=VOCAB,
        )
        self.runner = _runner(self.limits)
        max_pages = self.limits.context_len // page_size + 2
        pages = PageAllocator(num_running * max_pages + 2, page_size)
        kv_manager = KVCacheManager(
            pages, SlotAllocator(num_running), RadixCache(pages, page_size), page_size
        )
        self._mine, theirs = MemoryChannel.pair()
        self._sender = Sender(theirs)
        self.scheduler = Scheduler(self.limits, self.runner, self._sender, kv_manager, _features())
        self._fill(num_running, num_steps + 32)
        self._clocks: dict[str, Clock] = {}

    def _fill(self, num_running: int, num_tokens: int) -> None:
        """Admit all requests and compute their prompts."""
        draw = np.random.default_rng(0)
        sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for index in range(num_running):
            # different lengths, so that some requests need a new page in each step
            length = PROMPT - index % min(self.limits.page_size, PROMPT)
            ids = draw.integers(0, VOCAB, length, np.int32)
            wire = TokenizedRequest(
                rid=f"{index:032x}", input_ids=pack_ids(ids), sampling=sampling, stream=True
            )
            self._mine.send(wire)
        for _ in range(PROMPT * num_running // self.limits.step_tokens + 16):
            self.scheduler.tick(wait=False)
            self._mine.receive(0)
        running = self.scheduler.planner.running
        if len(running) != num_running or any(r.is_prefilling for r in running):
            raise InvariantError(f"{len(running)} of {num_running} requests run")

    def watch(self, names: Sequence[str]) -> dict[str, Clock]:
        """Clocks of these parts of the following steps:

        plan    choose requests, pages and positions
        pack    write the step's integers into one buffer
        launch  the rest of the model's launch
        draw    launch the sampler and the copy of its tokens to the host
        read    tokens of the step before
        commit  append tokens, check stops, build the reply
        send    send the reply
        whole   a tick of the loop
        """
        owners: dict[str, tuple[Any, str]] = {
            "pack": (self.runner.recorded, "pack"),
            "plan": (self.scheduler.planner, "plan"),
            "launch": (self.runner, "forward"),
            "draw": (self.runner, "sample"),
            "read": (self.runner, "read"),
            "commit": (self.scheduler.committer, "commit"),
            "send": (self._sender, "send"),
            "whole": (self.scheduler, "tick"),
        }
        for owner, method in owners.values():
            vars(owner).pop(method, None)  # remove earlier clocks
        self._clocks = {name: Clock() for name in names}
        for name, clock in self._clocks.items():
            owner, method = owners[name]
            outer = self._clocks.get("launch") if name == "pack" else None
            setattr(owner, method, clock.timed(getattr(owner, method), outer))
        return self._clocks

    def step(self) -> int:
        """One tick of the loop; the number of tokens in its replies."""
        self.scheduler.tick(False)
        for clock in self._clocks.values():
            clock.lap()
        replies = [reply for reply in self._mine.receive(0) if isinstance(reply, StepReply)]
        return sum(
            len(reply.tokens) + sum(len(delta.tokens) for delta in reply.deltas)
            for reply in replies
        )


def _runner(limits: Limits) -> Runner:
    device, model = AsyncDevice(), NoModel()
    slots, page_size = limits.max_running, limits.page_size
    max_pages = -(-limits.context_len // page_size) + 1
    tables = DeviceTables(slots, max_pages, 1, device.where, is_shared=False)
    sampling = SamplingTable(slots, VOCAB)
    options = RunnerOptions(
        page_size, eos_ids=(0,), max_tokens=limits.step_tokens, detect_bad=False
    )
    runner = Runner(RunnerParts(model, model, tables, sampling, device=device), options)
    runner.recorded = recorded = RecordedSteps(runner)
    recorded.capture(StepGraphs(device, (slots,)))
    return runner


def _features() -> Hooks:
    """The features that every server has."""
    grammar = GrammarFeature(GrammarConfig(), _no_tokenizer, VOCAB, (0,), overlaps=False)
    return Hooks((grammar, InflightLog(), LogprobBudget(), OutputBuffer()))


def _no_tokenizer() -> Tokenizer:
    raise InvariantError("no request has a grammar")
