"""A whole scheduler over the real runner on a device that may be late. The model's next token is a
hash of all tokens in the pages of a sequence, so a page, slot or token that is read or freed too
early changes the output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixlm.base.record import replace
from radixlm.cuda_graphs.graphs import StepGraphs
from radixlm.cuda_graphs.recorded import RecordedSteps
from radixlm.devices.device import CpuDevice, Device
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.hidden_outputs.buffer import OutputBuffer
from radixlm.hidden_outputs.logprob_budget import LogprobBudget
from radixlm.hidden_outputs.reader import HiddenReader
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.models.pooler import Pooler
from radixlm.sampling.table import SamplingTable
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.loop import Scheduler
from radixlm.scheduler.request import Request
from radixlm.self_check.kv_cache import find_violations
from radixlm.speculative.device.drafter import DeviceProposals, StepTail
from radixlm.speculative.device.tail import DraftTail
from radixlm.step.batch import ForwardBatch
from radixlm.step.masks import Masks
from radixlm.step.plan import Int32Array, Item, Items, PageCopy
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.replies import Finish, StepReply
from radixlm.wire.requests import (
    AbortRequest,
    GrammarSpec,
    LogprobParams,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import with_drafts
from tests.fakes.scheduler_harness import LIMITS

VOCAB = 32
EOS = 0
PAGE = 4


class PagedHash:
    """Model and attention backend in one: pages hold token ids, logits are a hash of them."""

    def __init__(self, num_pages: int) -> None:
        self.kv = torch.full((num_pages * PAGE,), -1, dtype=torch.int64)
        self.pools: list[object] = [self]
        self.num_graph_rows = 0

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        pages = self.kv.view(-1, PAGE)
        pages[target] = pages[source].clone()

    def begin(self, batch: ForwardBatch) -> None:
        self.is_decode = batch.is_decode

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor | None, site: object) -> Tensor:
        raise AssertionError("the fake model attends by itself")

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        self.kv[batch.store_GT[0]] = batch.token_ids_T
        if not len(batch.logits_rows_R):
            return None, None
        seq_T = torch.repeat_interleave(batch.query_start_S1.diff())
        rows = [
            self._logits(batch.page_table_GSP[0][seq_T[t]], int(batch.positions_T[t]) + 1)
            for t in batch.logits_rows_R.tolist()
        ]
        return None, torch.stack(rows)

    def _logits(self, pages_P: Tensor, length: int) -> Tensor:
        places = torch.arange(length)
        tokens = self.kv[pages_P.long()[places // PAGE] * PAGE + places % PAGE]
        seed = int(((tokens + 3) * (places + 7) ** 2 * 2654435761).sum()) & 0x7FFFFFFF
        draws = np.random.default_rng(seed).standard_normal(VOCAB)
        return torch.from_numpy(draws).float() * 3

    def logits(self, hidden_RD: Tensor, lora: object = None) -> Tensor:
        raise AssertionError("no prompt log-probabilities here")


class HashDrafter:
    """A drafter that is the model itself, greedy, with pages of its own: it is right where the
    request is greedy, if each token and position that it is told is."""

    hidden = None

    def __init__(self, model: PagedHash, tables: DeviceTables, tree_size: int = 0) -> None:
        """``tree_size``: it drafts trees of so many drafts: behind each right one, a wrong one that
        comes first."""
        self.model, self.tables = PagedHash(len(model.kv) // PAGE), tables
        self.tree_size = tree_size

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        pages = self.model.kv.view(-1, PAGE)
        pages[[copy.target for copy in copies]] = pages[[copy.source for copy in copies]].clone()

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        self.model.kv[batch.store_GT[0]] = batch.token_ids_T
        rows = tail.sequences_R
        first_R, last_R = batch.query_start_S1[rows], tail.last_R.long()
        assert (last_R >= first_R).all() and (last_R < batch.query_start_S1[rows + 1]).all()
        assert (batch.positions_T[last_R] + 1 == tail.positions_R).all()
        of_batch, of_tables = batch.page_table_GSP[0][rows].int(), self._pages(tail)
        for pages, known, position in zip(of_batch, of_tables, tail.positions_R, strict=True):
            count = -(-int(position) // PAGE)
            assert torch.equal(pages[:count], known[:count])

    def skip(self, items: Items) -> None:
        raise AssertionError("these tests never let the drafter rest")

    def _pages(self, tail: StepTail) -> Tensor:
        return self.tables.device_pages[0][tail.slots_R]

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        tokens_RK = torch.full((len(lens_R), int(lens_R.max())), -1)
        rows = zip(self._pages(tail), tail.positions_R, tail.next_tokens_R, lens_R, strict=True)
        for row, (pages_P, position, token, count) in enumerate(rows):
            for j in range(int(count)):
                place = int(position) + j
                page = int(pages_P[place // PAGE])
                assert page, "a place of a draft has no page"
                self.model.kv[page * PAGE + place % PAGE] = token
                token = tokens_RK[row, j] = self.model._logits(pages_P, place + 1).argmax()
        if not self.tree_size:
            return DeviceProposals(tokens_RK, torch.full(tokens_RK.shape, 0.5))
        shape = len(lens_R), self.tree_size
        nodes_RK, parents_RK = torch.full(shape, -1), torch.full(shape, -1)
        chances_RK = torch.zeros(shape)
        for row, count in enumerate(lens_R.tolist()):
            for j in range(count):
                right = int(tokens_RK[row, j])
                nodes_RK[row, 2 * j : 2 * j + 2] = torch.tensor([(right + 1) % VOCAB, right])
                parents_RK[row, 2 * j : 2 * j + 2] = 2 * j - 1
                chances_RK[row, 2 * j : 2 * j + 2] = torch.tensor([0.9, 0.4]) * 0.5**j
        return DeviceProposals(nodes_RK, chances_RK, parents_RK)

    def release(self, slot: int) -> None:
        pass


class Countdown(Feature):
    """A grammar: the next token exceeds the last one, modulo the vocabulary, by at most 5. It needs
    the last token before it can make the next mask."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def arrive(self, request: Request) -> bool:
        if request.wire.grammar is not None:
            self._last[request.rid] = int(request.ids[-1])
        return request.wire.grammar is not None

    def masks(self, items: Sequence[Item]) -> Masks:
        found = Masks()
        for index, (item, drafted) in enumerate(with_drafts(Items.of(items))):
            if item.emit and item.rid in self._last:
                before = [self._last[item.rid], *drafted]
                rows = [sum(1 << (last + step) % VOCAB for step in range(1, 6)) for last in before]
                mask = np.array(rows, np.uint32).view(np.int32)
                found[index] = mask[:, None] if drafted else mask
        return found

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        if request.rid in self._last:
            self._last[request.rid] = tokens[-1]

    def release(self, request: Request) -> None:
        self._last.pop(request.rid, None)


class OverlapHarness:
    """Submits and aborts requests, runs ticks and collects outputs."""

    def __init__(
        self,
        device: Device | None = None,
        num_pages: int = 64,
        drafts: ForcedDrafts | None = None,
        **options: Any,
    ) -> None:
        sizes, most = options.pop("graphs", ()), drafts.most if drafts else 0
        prompt_sizes = options.pop("prompt_graphs", ())
        options["max_drafts"] = most
        options["max_paths"] = drafts.paths * LIMITS.max_running if drafts else 0
        tree_size = 2 * most if drafts and drafts.kind == "device" and drafts.paths else 0
        runner_options = RunnerOptions(
            PAGE,
            eos_ids=(EOS,),
            max_drafts=most,
            max_paths=options["max_paths"],
            tree_size=tree_size,
            **{"max_tokens": 64, "max_updates": 16, **options.pop("runner", {})},
        )
        self.limits = replace(LIMITS, page_size=PAGE, vocab=VOCAB, **options)
        slots = self.limits.max_running
        self.device = device or CpuDevice()
        self.model = PagedHash(num_pages + 1)
        max_pages = -(-self.limits.context_len // PAGE) + 1
        tables = DeviceTables(
            *(slots, max_pages, 1, self.device.where, self.device.is_synchronous, most),
            options["max_paths"],
        )
        end, sampling = None, SamplingTable(slots, VOCAB)
        if drafts is not None and drafts.kind == "device":
            end = DraftTail(HashDrafter(self.model, tables, tree_size), tables, sampling, PAGE)
        self.runner = Runner(
            RunnerParts(
                self.model,
                self.model,
                tables,
                sampling,
                device=self.device,
                outputs=HiddenReader(self.model, tables, Pooler()),
                end=end,
            ),
            runner_options,
        )
        if sizes:
            graphs = StepGraphs(self.device, sizes)
            recorded = self.runner.recorded = RecordedSteps(self.runner)
            recorded.capture(graphs)
            for width in range(2, most + 2):
                recorded.capture(StepGraphs(self.device, sizes), width)
            recorded.capture_prompts(StepGraphs(self.device, prompt_sizes))
        pages = PageAllocator(num_pages, PAGE)
        self.kv_manager = KVCacheManager(pages, SlotAllocator(slots), RadixCache(pages, PAGE), PAGE)
        hooks = Hooks((Countdown(), LogprobBudget(), OutputBuffer()))
        drafting = drafts.drafting(self.limits, self.kv_manager, hooks) if drafts else None
        self.mine, theirs = MemoryChannel.pair()
        self.scheduler = Scheduler(
            self.limits,
            self.runner,
            theirs,
            self.kv_manager,
            hooks,
            clock=lambda: 1.0,
            drafting=drafting,
        )
        self.out: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.prompt_len: dict[str, int] = {}

    def submit(
        self,
        rid: str,
        prompt: list[int],
        has_grammar: bool,
        need: LogprobParams | None = None,
        **sampling: Any,
    ) -> None:
        self.out[rid], self.logprobs[rid], self.prompt_len[rid] = [], [], len(prompt)
        grammar = GrammarSpec("regex", "x") if has_grammar else None
        params = SamplingParams(**sampling)
        wire = TokenizedRequest(rid, pack_ids(prompt), params, grammar=grammar, logprobs=need)
        self.mine.send(wire)

    def abort(self, rid: str) -> None:
        self.mine.send(AbortRequest(rids=[rid]))

    def tick(self) -> None:
        self.scheduler.tick(wait=False)
        for reply in self.mine.receive(0):
            for rid, token in zip(*_ones(reply), strict=True):
                self.out[rid].append(token)
            for delta in reply.deltas if isinstance(reply, StepReply) else ():
                self.out[delta.rid].extend(delta.tokens)
                if delta.logprobs is not None:
                    self.logprobs[delta.rid].extend(delta.logprobs.chosen)
                if delta.finish:
                    self.finish[delta.rid] = delta.finish

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if len(self.finish) == len(self.out) and not self.scheduler.inflight:
                break
            self.tick()
        else:
            raise AssertionError(f"not finished: {set(self.out) - set(self.finish)}")
        self.tick()
        assert not self.scheduler.planner.running and find_violations(self.kv_manager) == []


def _ones(reply: Any) -> tuple[Sequence[str], Sequence[int]]:
    return (reply.rids, reply.tokens) if isinstance(reply, StepReply) else ((), ())


def workload(bench: OverlapHarness, seed: int) -> set[str]:
    """Submit random requests over time and abort some; returns the aborted ids."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, VOCAB) for _ in range(14)]
    aborted = set()
    for index in range(14):
        own = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))]
        prompt = shared[: rng.choice((0, 9, 14))] + own
        kind = rng.randrange(4)
        sampling: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 24),
            "ignore_eos": rng.random() < 0.5,
            "temperature": 0.0 if kind == 0 else 1.2,
            "sampling_seed": index,
        }
        if kind == 2:
            sampling |= {"top_k": 6, "top_p": 0.9}
        if kind == 3:
            sampling |= rng.choice(({"min_p": 0.05}, {"frequency_penalty": 0.7}, {"top_p": 0.8}))
        bench.submit(f"r{index}", prompt, rng.random() < 0.3, **sampling)
        for _ in range(rng.randrange(4)):
            bench.tick()
        if rng.random() < 0.15:
            victim = f"r{rng.randrange(index + 1)}"
            bench.abort(victim)
            aborted.add(victim)
    bench.run()
    return aborted
