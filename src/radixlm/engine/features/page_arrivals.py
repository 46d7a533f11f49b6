"""Pages that arrive: before a request is admitted, the tiers bring pages of its prompt that the
prefix cache lacks. Then it is an ordinary prefix hit; what does not come in time is computed.

    arrive   which keys does the prompt have, and which of them do the tiers? (Lookup -> Found)
    tick     reserve pages and have them filled (Get -> Arrived, Done); hand them to the cache
    ready    wait as long as the policy says
    inserted pages that the cache took over are kept in the tiers, too (Put -> Done)
    retracted, release   nobody waits any more

Here are numbers only: a worker in each rank moves the bytes (``tiers/worker.py``). Pages of a job
are reserved until its Done, and pages that are read are locked until theirs. With data-parallel
attention all groups are asked, and the pages come to the one that can have most of them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from radixlm.engine.features.arrival_groups import (
    ArrivalGroup,
    ArrivalJob,
    PagePort,
    pages_of_prompts,
)
from radixlm.engine.features.arrival_rules import ArrivalOptions, FetchRules
from radixlm.engine.features.page_puts import WritePolicy, WriteThrough
from radixlm.memory.prefix.base import Handle, InsertResult
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.parallel.grouped_kv_cache import worth
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.request import Request
from radixlm.step.plan import Int32Array
from radixlm.tiers.base import Arrived, Cancel, Done, Found, Get, Lookup, Put, Report, Used
from radixlm.tiers.keys import NO_KEY, extend_keys, namespace_seed
from radixlm.wire.transfer import Hint

log = logging.getLogger(__name__)

MAX_RESERVED_SHARE: Final = 0.5  # of the pool, for the pages of several jobs on their way
MAX_SEEDS: Final = 4096
MAX_SETTLE_S: Final = 30.0
PRELOAD_POLL_S: Final = 0.002
_AT_ONCE: Final = WriteThrough()  # of requests whose pages another engine waits for


class _State:
    """Of one request. ``phase``: idle (nothing to wait for), lookup, found (its pages wait for
    those of other jobs), full (running requests have the room), fetch, behind (another request's
    job brings its pages). ``group``: whose cache has or gets most of its prompt."""

    def __init__(self, request: Request, group: ArrivalGroup, now_s: float) -> None:
        self.request, self.group, self.start_s = request, group, now_s
        self.namespace, self.keys = request.namespace, list[bytes]()
        self.phase, self.job, self.cached, self.retractions = "idle", -1, 0, 0
        self.num_put = self.num_seen = -1  # pages kept, and inserted; -1: none yet
        self.lookups: dict[int, tuple[ArrivalGroup, int]] = {}  # with the pages cached there
        self.found: Found | None = None
        self.num_found = 0  # pages of its prompt that were cached or came
        # and the first page
        self.late: list[tuple[ArrivalGroup, Put, Handle, int]] = []


class PageArrivals(Feature):
    """Hooks arrive, tick, ready, release, flush, stats; ``bind`` first, with each scheduler."""

    def __init__(
        self,
        manifest_digest: bytes,
        options: ArrivalOptions,
        write_policy: WritePolicy | None = None,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._digest, self._secret, self.options, self._clock = (
            manifest_digest, secret, options, clock,
        )  # fmt: skip
        self.write_policy = write_policy or WriteThrough()
        self._seeds: dict[CacheNamespace, bytes] = {}
        self._last_job = 0
        self.counts: Counter[str] = Counter()  # tokens and requests, for metrics
        self.rules = FetchRules(options, clock)

    def bind(self, kv_manager: KVCacheManager, ports: Sequence[PagePort]) -> None:
        """Serve a new scheduler, with a port for each of its ``parts``; what was under way for the
        one before is forgotten."""
        self._kv, self._size = kv_manager, kv_manager.page_size
        self._states: dict[str, _State] = {}
        self._jobs: dict[int, ArrivalJob] = {}
        self._lookups: dict[int, str] = {}
        self._fetching: dict[bytes, int] = {}
        self._groups = [
            ArrivalGroup(
                number, part, port, self.options, self.write_policy, self._next_job, self._seed,
                self.counts,
            )
            for number, (part, port) in enumerate(zip(kv_manager.parts, ports, strict=True))
        ]  # fmt: skip
        for group in self._groups:
            group.kv.on_insert = partial(self._inserted, group)

    # ---- hooks -------------------------------------------------------------------------------

    def arrive(self, request: Request) -> bool:
        state = self._states[request.rid] = _State(request, self._groups[0], self._clock())
        for group in self._groups:
            if group.preload.is_loading:
                self._take_reports(group.port.poll())
                group.preload.hold()
        self._begin(state)
        return False

    def tick(self) -> None:
        """Take the workers' reports."""
        for group in self._groups:
            while reports := group.port.poll():  # some commands are answered at once
                self._take_reports(reports)
            group.puts.copy_ahead()
        for group in self._groups:
            group.preload.tick(self._clock(), is_idle=not self._states and not self._jobs)

    def preload(self, limit_s: float) -> None:
        """Before the first request: bring pages that the tiers had before the start, as many as
        come within ``limit_s``."""
        end_s = self._clock() + limit_s
        while self._clock() < end_s and not all(group.preload.is_over for group in self._groups):
            self.tick()
            time.sleep(PRELOAD_POLL_S)
        if count := self.counts["preloaded_tokens"]:
            log.info("%d tokens of the KV cache were brought back from disk", count)

    def _take_reports(self, reports: list[Report]) -> None:
        for report in reports:
            if isinstance(report, Found):
                self._take_found(report)
            elif any(group.preload.take(report) for group in self._groups):
                continue
            elif isinstance(report, Arrived):
                job = self._jobs.get(report.job)
                if job is not None:
                    job.num_arrived = report.num_pages
            elif isinstance(report, Done):
                self._take_done(report)

    def ready(self, request: Request) -> bool:
        state = self._states.get(request.rid)
        if state is None:
            return True
        if state.namespace != request.namespace:  # the weights have changed
            self._renew(state)
        if state.phase == "idle":
            if request.retractions != state.retractions:  # its pages may have been evicted
                self._begin(state)
            if state.phase == "idle":
                return True
        if state.phase == "behind" and state.job not in self._jobs:
            self._begin(state)
        elif state.phase in ("found", "full"):
            self._fetch(state)
        if state.phase == "full":  # it is not admitted either, and has not waited for its pages
            state.start_s = self._clock()
            return True
        if state.phase != "idle" and self._is_late(state):
            self._give_up(state)
        return state.phase == "idle"

    def _renew(self, state: _State) -> None:
        """Begin again under the keys of other weights."""
        if state.phase == "fetch":
            state.group.port.send(Cancel(state.job))
        state.namespace, state.keys, state.num_put = state.request.namespace, [], -1
        self._begin(state)

    def retracted(self, request: Request) -> None:
        """Others need its pages: those that wait for drafts are put when it has them again."""
        state = self._states.get(request.rid)
        if state is None or not state.late:
            return
        state.num_put = state.late[0][3]
        for group, _, handle, _ in state.late:
            group.reservations.unpin(handle)
        state.late.clear()

    def slid(self, request: Request) -> None:
        """Its pages have other keys; nobody else has them."""
        self.release(request)

    def release(self, request: Request) -> None:
        state = self._states.pop(request.rid, None)
        if state is None:
            return
        if state.phase == "fetch":
            state.group.port.send(Cancel(state.job))
        for group, put, handle, _ in state.late:
            group.puts.send(put, handle)
        if self.options.preload_bytes and state.num_found:
            state.group.port.send(Used(self._next_job(), state.keys[: state.num_found]))

    def flush(self) -> None:
        """The prefix cache is about to be emptied: wait for pages that are being moved."""
        for job in self._jobs.values():
            job.group.port.send(Cancel(job.get.job))
        for group in self._groups:
            group.preload.stop()
        for group in self._groups:
            self._take_reports(group.port.settle(MAX_SETTLE_S))
            group.drop_spare()

    def stats(self) -> dict[str, float]:
        """Counters since the start and averages, for metrics."""
        return {
            **self.counts,
            **self.rules.stats(),
            "jobs": len(self._jobs) + sum(len(group.puts) for group in self._groups),
            "reserved_tokens": self._size
            * sum(group.reservations.num_pages for group in self._groups),
        }

    # ---- which pages -------------------------------------------------------------------------

    def _begin(self, state: _State) -> None:
        """Ask the tiers for the pages of the request that the cache lacks."""
        request, hint = state.request, state.request.wire.hint
        state.phase, state.retractions, state.start_s = "idle", request.retractions, self._clock()
        state.lookups, state.found, request.group = {}, None, -1
        if request.arrived is None or request.retractions:
            request.arrived = {}
        limit = min(self._kv.match_limit(request), request.share_limit)
        limit += self._has_copied_end(request, limit)
        num_pages = limit // self._size
        groups = self._groups
        if hint is not None and self.options.is_prefill:  # where its decode server asks
            request.group = hint.replica(len(groups))
            groups = [groups[request.group]]
        if request.wire.embeds is not None or not num_pages:
            return
        self._extend(state, num_pages)
        ids, keys = request.ids[:limit], state.keys[:num_pages]
        if len(groups) > 1:
            namespace = request.namespace
            groups = sorted(groups, key=lambda one: worth(one.kv, ids, namespace), reverse=True)
        there = [group.num_there(ids, keys, request.namespace) for group in groups]
        state.cached = max(there)
        state.group = groups[there.index(state.cached)]
        state.num_found = state.cached
        self._claim(state)
        if hint is not None and self.options.is_prefill and state.num_put < 0:
            self._hand_over(state, hint)
        if (num_pages - state.cached) * self._size < max(self.options.min_tokens, self._size):
            return
        state.phase = "lookup"
        for group, cached in zip(groups, there, strict=True):
            if hint is None or group is state.group:  # pages of a peer come to one group
                state.job = self._next_job()
                state.lookups[state.job] = group, cached
                self._lookups[state.job] = request.rid
                self.counts["lookups"] += 1
                group.port.send(Lookup(state.job, keys[cached:], hint))

    def _has_copied_end(self, request: Request, limit: int) -> bool:
        """Whether a page with the last token of the prompt, which is computed in any case, is of
        use: the rows before it are copied."""
        is_all_but_one = limit + 1 == request.prefill_len <= request.share_limit
        kv, is_pulled = self._kv, request.wire.hint is not None
        return is_all_but_one and kv.tails is not None and kv.window is None and not is_pulled

    def _claim(self, state: _State) -> None:
        """Hand those pages over to the prefix cache that came before the request."""
        request, kv, end = state.request, state.group.kv, state.cached * self._size
        reservations = state.group.reservations
        if not reservations.num_spare:
            return
        base = kv.prefix_cache.match(request.ids[:end], request.namespace)
        pages = reservations.take_spare(state.keys[len(base.pages) : state.cached])
        if len(pages):
            reservations.insert_arrived(request.ids[:end], base.pages, pages, request.namespace)
            self._note_arrived(request, len(pages), [("storage", len(pages))])
            self.counts["claimed_tokens"] += len(pages) * self._size

    def _extend(self, state: _State, num_pages: int) -> None:
        request = state.request
        if num_pages > len(state.keys):
            ids, seed = request.ids[: num_pages * self._size], self._seed(request.namespace)
            extend_keys(state.keys, ids, self._size, seed)

    def _seed(self, namespace: CacheNamespace) -> bytes:
        seed = self._seeds.get(namespace)
        if seed is None:
            if len(self._seeds) >= MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[namespace] = namespace_seed(self._digest, namespace, self._secret)
        return seed

    def _take_found(self, found: Found) -> None:
        self.rules.looked_up(found)
        state = self._states.get(self._lookups.pop(found.job, ""))
        if state is None or found.job not in state.lookups or state.phase != "lookup":
            return
        if state.namespace != state.request.namespace:
            return  # found under the keys of other weights
        group, cached = state.lookups.pop(found.job)
        most = state.cached + (state.found.ends[-1] if state.found is not None else 0)
        if found.ends and cached + found.ends[-1] > most:
            state.found, state.group, state.cached = found, group, cached
        if state.lookups:
            return
        state.phase = "found" if state.found is not None else "idle"
        if state.found is not None:
            self.counts["found_tokens"] += state.found.ends[-1] * self._size
            self._fetch(state)

    def _fetch(self, state: _State) -> None:
        """Reserve pages and have them brought; or wait for a job that brings them; or neither."""
        found, request, kv = state.found, state.request, state.group.kv
        reservations = state.group.reservations
        assert found is not None
        limit = (state.cached + found.ends[-1]) * self._size
        match = kv.prefix_cache.match(request.ids[:limit], request.namespace)
        more = len(match.pages) - state.cached  # the cache has changed since the lookup
        count, state.phase = found.ends[-1] - more, "idle"
        if more < 0 or count <= 0 or not self.rules.pays(count, request.wire.hint):
            return
        keys = state.keys[state.cached : state.cached + found.ends[-1]]
        other = next((job for key in keys if (job := self._fetching.get(key)) is not None), None)
        if other is not None:
            state.phase, state.job = "behind", other
            return
        reserved_pages, most = reservations.num_pages, MAX_RESERVED_SHARE * kv.pages.num_total
        if reserved_pages and reserved_pages + count > most:
            state.phase = "found"  # asked again when it could be admitted
            return
        num_window = min(self.options.window_pages, count)
        handle = reservations.pin(match.handle)
        left = pages_of_prompts(kv)  # else their next chunks would evict what has come
        reserved = reservations.reserve(count, num_window, left)
        if reserved is None:
            reservations.unpin(handle)
            if count + left > kv.num_available:
                state.phase = "full"
            elif kv.changes.copies:
                state.phase = "found"  # asked again when the step has read them
            return
        state.cached += more
        self._send_get(state, count, num_window, match.pages, handle, reserved)

    def _send_get(
        self, state: _State, count: int, num_window: int, base: Int32Array, handle: Handle,
        reserved: tuple[Int32Array, Int32Array],
    ) -> None:  # fmt: skip
        first, request, (pages, row) = state.cached, state.request, reserved
        keys, ids = state.keys[first : first + count], request.ids[: (first + count) * self._size]
        state.job, state.phase = self._next_job(), "fetch"
        get = Get(
            state.job,
            keys,
            pages.tobytes(),
            tuple(range(count - num_window, count)),
            row.tobytes(),
            request.wire.hint,
            state.keys[first - 1] if first else NO_KEY,
            ids[first * self._size :].tobytes(),
        )
        self._jobs[state.job] = ArrivalJob(state.group, request, get, base, handle, reserved)
        self._fetching.update(dict.fromkeys(keys, state.job))
        request.group = state.group.number
        state.group.port.send(get)

    # ---- what came ---------------------------------------------------------------------------

    def _is_late(self, state: _State) -> bool:
        """Whether the request should be admitted with what is there."""
        if self.options.policy == "best_effort" and state.request.wire.hint is None:
            if state.phase == "found" or self.rules.is_over(state.start_s):
                return True
            # of the host tier, which is fast, all is awaited
            job, found = self._jobs.get(state.job), state.found
            if job is None or found is None:
                return False
            return job.num_arrived >= sum(n for name, n in found.tiers if name == "host")
        count = len(state.keys) - state.cached
        return self.rules.is_late(state.start_s, count, state.request.wire.hint)

    def _give_up(self, state: _State) -> None:
        """Admit the request with what has arrived by now."""
        job, request = self._jobs.get(state.job) if state.phase == "fetch" else None, state.request
        if job is not None:
            job.group.port.send(Cancel(job.get.job))
            count = job.num_arrived if not len(job.row) else 0
            self._take(job, count)
            tiers = state.found.tiers if state.found is not None else []
            self._note_arrived(request, count, tiers)
        self.counts["late_requests"] += 1
        state.phase = "idle"

    def _take_done(self, done: Done) -> None:
        if any(group.puts.take(done) for group in self._groups):
            return
        job = self._jobs.pop(done.job, None)
        if job is None:
            return
        for key in job.get.keys:
            if self._fetching.get(key) == job.get.job:
                del self._fetching[key]
        if not job.is_taken:
            self._take(job, done.num_pages)
        job.group.reservations.release(job.pages, job.row)
        job.group.reservations.unpin(job.handle)
        self.rules.fetched(done)
        for name, pages, _, _ in done.tiers:
            self.counts[f"{name}_tokens"] += pages * self._size
        state = self._states.get(job.rid)
        if state is not None and state.job == job.get.job and state.phase == "fetch":
            state.phase = "idle"
            tiers = [(name, pages) for name, pages, _, _ in done.tiers]
            self._note_arrived(state.request, done.num_pages, tiers)
            state.num_found = state.cached + done.num_pages

    def _take(self, job: ArrivalJob, count: int) -> None:
        """Hand the first ``count`` pages of a job to the prefix cache."""
        job.is_taken, kv = True, job.group.kv
        if not count:
            return
        first, row = len(job.base), job.row if count == len(job.pages) else job.row[:0]
        job.group.reservations.insert_arrived(
            job.ids[: (first + count) * self._size],
            job.base,
            job.pages[:count],
            job.namespace,
            row if kv.window is not None else None,
        )
        job.pages, job.row = job.pages[count:], job.row[len(row) :]
        self.counts["arrived_tokens"] += count * self._size

    def _note_arrived(self, request: Request, count: int, tiers: list[tuple[str, int]]) -> None:
        """``count`` full pages have come, from these tiers in turn."""
        tokens = request.arrived = request.arrived or {}
        for name, pages in tiers:
            part = min(count, pages)
            count -= part
            if part:
                tokens[name] = tokens.get(name, 0) + part * self._size

    # ---- what is kept ------------------------------------------------------------------------

    def _inserted(self, group: ArrivalGroup, request: Request, result: InsertResult) -> None:
        """The prefix cache of a group has taken over pages of a running request."""
        state = self._states.get(request.rid)
        if state is None:  # it came before this feature
            state = self._states[request.rid] = _State(request, group, self._clock())
        end = result.num_cached_pages
        self._extend(state, end)
        cached = min(request.num_cached // self._size, end)
        if state.num_put < 0:  # a peer may lack even what was cached here
            state.num_put = 0 if request.wire.hint else cached
        if state.num_seen < 0:
            state.num_seen = cached
        if not request.num_output:
            self.rules.computed((end - state.num_seen) * self._size, request.started_s)
        state.num_seen = end
        policy = self.write_policy if request.wire.hint is None else _AT_ONCE
        first = policy.first_page(cached, state.num_put, end)
        if first is None or first >= end:
            return
        state.num_put = end
        pages, row, hint = result.pages[:end], result.window_pages, request.wire.hint
        put = group.puts.make(state.keys, request.ids, first, pages, row, hint)
        self._keep(state, group, put, result.handle, first)

    def _hand_over(self, state: _State, hint: Hint) -> None:
        """Keep for a peer what is cached already: of a prompt that is cached whole, nothing will be
        inserted."""
        request, group, end = state.request, state.group, state.cached
        cached = group.kv.prefix_cache.match(request.ids[: end * self._size], request.namespace)
        if len(cached.pages):
            pages, row = cached.pages, cached.window_pages
            put = group.puts.make(state.keys, request.ids, 0, pages, row, hint)
            self._keep(state, group, put, cached.handle, 0)
            state.num_put = len(pages)

    def _keep(
        self, state: _State, group: ArrivalGroup, put: Put, handle: Handle, first: int
    ) -> None:
        handle = group.reservations.pin(handle)
        if self.options.puts_late:
            state.late.append((group, put, handle, first))
        else:
            group.puts.send(put, handle)

    def _next_job(self) -> int:
        self._last_job += 1
        return self._last_job
