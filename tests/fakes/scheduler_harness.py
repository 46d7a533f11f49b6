"""A whole scheduler over a FakeExecutor, driven tick by tick."""

from __future__ import annotations

import random
from typing import Any

from radixlm.admission_order.ordered_queue import OrderedQueue
from radixlm.admission_order.preemption import PriorityPreemption
from radixlm.base.record import replace
from radixlm.hidden_outputs.buffer import OutputBuffer
from radixlm.hidden_outputs.logprob_budget import LogprobBudget
from radixlm.live_feed.step_recorder import StepRecorder
from radixlm.live_feed.tree_view import TreeView
from radixlm.media.encoder_budget import EncoderBudget
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup, WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.observe.ring import StepRing
from radixlm.operations.commands import OperatorCommands
from radixlm.operations.deadlines import RequestDeadlines
from radixlm.operations.step_log import LoadLog
from radixlm.parallel.grouped_kv_cache import GroupedKVCacheManager
from radixlm.parallel.stage_batches import StageBatches
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager, WindowPages
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Scheduler
from radixlm.self_check.kv_cache import SelfCheck, find_violations
from radixlm.step_sizes.continuous_decoding import ContinuousDecoding
from radixlm.step_sizes.pacing import ChunkPacer
from radixlm.tails.page_tails import PageTails
from radixlm.weight_updates.commands import WeightCommands
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.replies import Finish, StepReply
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import (
    EOS,
    VOCAB,
    FakeExecutor,
    GroupedExecutor,
    StagedExecutor,
    StagedStateExecutor,
    StateExecutor,
    reference,
)

LIMITS = Limits(
    max_running=8,
    max_queued=None,
    step_tokens=16,
    max_prefill_tokens=64,
    context_len=512,
    page_size=4,
    eos_ids=(EOS,),
    vocab=VOCAB,
)


class SchedulerHarness:
    """Submits requests, runs ticks and collects the output."""

    def __init__(
        self,
        num_pages: int = 64,
        features: tuple[Feature, ...] = (),
        radix: bool = True,
        window: int = 0,
        num_window: int = 0,
        min_tail: int | None = 1,
        drafts: ForcedDrafts | None = None,
        states: bool = False,
        groups: int = 1,
        ring: StepRing | None = None,
        **limits: Any,
    ) -> None:
        """``groups``: of data-parallel attention, with as many pages each."""
        if states:  # of a recurrent model, in `num_window` pages
            window, min_tail = 1, None
        if drafts is not None:
            limits["max_drafts"] = drafts.most
            limits.setdefault("max_paths", drafts.paths * LIMITS.max_running)
        self.limits = replace(LIMITS, **limits)
        size, slots = self.limits.page_size, self.limits.max_running

        def make_manager(slot_allocator: SlotAllocator) -> KVCacheManager:
            allocator = PageAllocator(num_pages, size)
            window_pages = None
            group = None
            if window:
                second = PageAllocator(num_window, size)
                window_pages = WindowPages(second, WindowTable(window, size), states)
                group = WindowGroup(second, window)
            is_hybrid = bool(window)
            cache = (
                RadixCache(allocator, size, window=group) if radix else PrefixCache(size, is_hybrid)
            )
            manager = KVCacheManager(allocator, slot_allocator, cache, size, window_pages)
            if min_tail is not None:
                PageTails(manager, min_tail)
            return manager

        def make_executor() -> FakeExecutor:
            sizes = num_pages + 1, size, slots + 1, num_window
            kinds: tuple[type[FakeExecutor], type[FakeExecutor]] = (FakeExecutor, StateExecutor)
            if self.limits.stages > 1:
                kinds = (StagedExecutor, StagedStateExecutor)
            return kinds[states](*sizes, 0 if states else window)

        self.executor: Any = make_executor()
        self.kv_manager = make_manager(SlotAllocator(slots))
        if groups > 1:
            each = slots // groups
            ranges = [SlotAllocator(each, group * each) for group in range(groups)]
            self.kv_manager = GroupedKVCacheManager([make_manager(one) for one in ranges])
            self.executor = GroupedExecutor([make_executor() for _ in ranges], each)
        self.encoder_budget = EncoderBudget(self.limits.step_tokens)
        self.outputs, self.drafts = OutputBuffer(), drafts
        budgets = LogprobBudget(self.limits.chunked), self.encoder_budget
        hooks = Hooks((*features, *budgets, self.outputs))
        drafting = drafts.drafting(self.limits, self.kv_manager, hooks) if drafts else None
        self.mine, theirs = MemoryChannel.pair()
        self.now_s = 100.0
        self.scheduler = Scheduler(
            self.limits,
            self.executor,
            theirs,
            self.kv_manager,
            hooks,
            clock=lambda: self.now_s,
            drafting=drafting,
            recorder=None if ring is None else StepRecorder(ring),
            commands=(OperatorCommands, WeightCommands, TreeView, SelfCheck),
            pacer=ChunkPacer(target_s) if (target_s := self.limits.target_itl_s) != 0 else None,
            continuous=ContinuousDecoding(self.limits, self.kv_manager),
            queue=(queue := OrderedQueue(self.limits, self.kv_manager.prefix_cache)),
        )
        self.scheduler.step_log = LoadLog(self.scheduler)
        self.scheduler.deadlines = self.deadlines = RequestDeadlines(self.scheduler)
        planner = self.scheduler.planner
        planner.preemption = PriorityPreemption(planner, queue)
        planner.stages = StageBatches(planner) if self.limits.stages > 1 else None
        self.out: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.cached: dict[str, int] = {}
        self.replies: list[Any] = []

    def submit(self, rid: str, prompt: list[int], max_new: int = 8, **fields: Any) -> None:
        ignore = fields.pop("ignore_eos", False)
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=ignore)
        fields.setdefault("arrival_s", self.now_s)
        self.out[rid] = []
        self.mine.send(
            TokenizedRequest(rid=rid, input_ids=pack_ids(prompt), sampling=sampling, **fields)
        )

    def tick(self) -> None:
        self.scheduler.tick(wait=False)
        self.now_s += 0.001
        for reply in self.mine.receive(0):
            self.replies.append(reply)
            if not isinstance(reply, StepReply):
                continue
            for rid, token in zip(reply.rids, reply.tokens, strict=True):
                assert self.out[rid] and rid not in self.finish, "a whole delta comes first"
                self.out[rid].append(token)
            for delta in reply.deltas:
                assert delta.rid not in self.finish, "a delta after the end"
                self.out[delta.rid].extend(delta.tokens)
                self.cached[delta.rid] = delta.cached_tokens
                if delta.finish:
                    self.finish[delta.rid] = delta.finish

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            self.tick()
            if len(self.finish) == len(self.out) and not self.scheduler.inflight:
                break
        else:
            missing = set(self.out) - set(self.finish)
            raise AssertionError(f"not finished: {missing}")
        self.tick()
        assert not self.scheduler.planner.running
        assert not self.scheduler.committer.requests
        assert find_violations(self.kv_manager) == []
        assert self.scheduler.controls.num_breaches == 0


def draw_prompts(rng: random.Random, count: int, shared: int) -> list[list[int]]:
    """Prompts that begin with ``shared`` common tokens."""
    common = [rng.randrange(1, 31) for _ in range(shared)]
    return [
        common + [rng.randrange(1, 31) for _ in range(rng.randint(1, 40))] for _ in range(count)
    ]


def serve_drawn(bench: SchedulerHarness, rng: random.Random) -> None:
    """Each of 16 drawn requests that arrive in turn gets the tokens that it would get alone."""
    prompts = draw_prompts(rng, 16, shared=12)
    lengths = [rng.randint(1, 25) for _ in prompts]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        bench.submit(f"r{i}", prompt, length, ignore_eos=i % 3 == 0)
        if i % 4 == 0:
            bench.tick()
    bench.run()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert bench.out[f"r{i}"] == reference(prompt, length, i % 3 == 0), i
