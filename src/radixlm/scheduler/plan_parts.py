"""What a plan is made of: rows that decode, chunks of prompts and admissions, from requests."""

import math

import msgspec
import numpy as np

from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int32Array, Int64Array
from radixlm.step.plan import Admission, DecodeBatch, Item
from radixlm.wire.requests import NEVER
from radixlm.wire.sampling_params import parallel_seed

LEAST = 16  # tokens of a chunk: a prompt goes on, whatever else a step computes
LEAST_EVEN = 64  # of one behind a context: fewer rows would read the weights too often


def make_decode_batch(kv_manager: KVCacheManager, slots: Int64Array) -> DecodeBatch:
    """The rows of the requests in ``slots``, which decode."""
    table = kv_manager.table
    with_extras = np.flatnonzero(table.needs_extras[slots]).tolist()
    wires = {i: kv_manager.request_in(int(slots[i])).wire for i in with_extras}
    return DecodeBatch(
        tuple(table.rids[slots].tolist()),
        slots,
        {i: wire.logprobs for i, wire in wires.items() if wire.logprobs is not None},
        frozenset(i for i, wire in wires.items() if wire.return_hidden_states),
        frozenset(i for i, wire in wires.items() if wire.return_routed_experts),
    )


def make_chunk(request: Request, end: int) -> Item:
    """The item that computes the request's tokens from ``num_computed`` to ``end``."""
    start, wire = request.num_computed, request.wire
    targets_at, targets = _prompt_targets(request, start, end)
    is_last = end == request.prefill_len
    return Item(
        rid=request.rid,
        slot=request.slot,
        start=start,
        count=end - start,
        tokens=request.ids[start:end].copy(),
        emit=is_last and request.max_new_tokens > request.num_output and not wire.pooling,
        logprobs=wire.logprobs,
        targets_at=targets_at,
        targets=targets,
        hidden_states=wire.return_hidden_states,
        pooling=wire.pooling,
        routed_experts=wire.return_routed_experts,
    )


def _prompt_targets(request: Request, start: int, end: int) -> tuple[int, Int32Array | None]:
    """The prompt tokens after [start, end) whose log-probabilities are wanted, and the offset in
    the chunk of the token before the first of them."""
    params = request.wire.logprobs
    if params is None or params.prompt_from < 0 or request.num_output:
        return 0, None
    first = max(start, params.prompt_from - 1)
    targets = request.ids[first + 1 : min(end + 1, request.prompt_len)]
    is_wanted = len(targets) or params.prompt_from == start == 0  # the first token's is null
    return (first - start, targets.copy()) if is_wanted else (0, None)


def make_admission(request: Request) -> Admission:
    wire, adapter = request.wire, request.wire.adapter
    embeds = None
    if wire.embeds is not None:
        embeds = np.frombuffer(wire.embeds, dtype="<f4").reshape(request.prompt_len, -1)
    rope_ids = None
    if wire.rope_ids is not None:
        rope_ids = np.frombuffer(wire.rope_ids, "<i4").reshape(3, -1)
    sampling = wire.sampling
    if request.num_dropped:  # draws are keyed by seed and position, and positions come again
        sampling = msgspec.structs.replace(
            sampling,
            min_new_tokens=request.min_new_tokens,
            sampling_seed=parallel_seed(sampling.sampling_seed or 0, request.num_dropped),
        )
    return Admission(
        rid=request.rid,
        slot=request.slot,
        sampling=sampling,
        prompt_ids=request.ids[: request.prompt_len].copy(),
        output_ids=request.output_ids.copy(),
        embeds=embeds,
        media=wire.media,
        rope_ids=rope_ids,
        processor=wire.processor,
        adapter=adapter.number if adapter is not None and adapter.start != NEVER else -1,
        adapter_start=request.place(adapter.start) if adapter is not None else 0,
        reasoning_bound=wire.reasoning_bound,
    )


def allocate_beyond(
    kv_manager: KVCacheManager, slots: Int64Array, computed: Int64Array, lens: Int64Array
) -> None:
    """Allocate the pages of ``lens`` tokens more than those computed, which the rows need next in
    any case; cut the lengths where there are not enough."""
    is_missing = computed + lens > kv_manager.table.num_allocated[slots]
    if kv_manager.window is not None and kv_manager.window.is_state:
        is_missing[:] = True  # rows with pages ahead have few states there
    for i in np.flatnonzero(is_missing & (lens > 0)).tolist():
        request = kv_manager.request_in(int(slots[i]))
        start, count = int(computed[i]), int(lens[i])
        if not kv_manager.allocate(request, start + count):
            num_left = min(count, max(0, request.num_allocated - start))
            has_room = kv_manager.allocate(request, start + num_left)
            lens[i] = num_left if has_room else 0


def even_chunk(start: int, tokens: int, attention_length: float) -> int:
    """How many tokens from position ``start`` take as long as ``tokens`` from position 0, where
    ``attention_length`` tokens of context cost a token as much as the model's weights do."""
    if not start or not attention_length:
        return tokens
    before = attention_length + start
    count = math.sqrt(before**2 + tokens * (2 * attention_length + tokens)) - before
    return min(tokens, max(LEAST_EVEN, int(count) // LEAST * LEAST))


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix of two arrays of token ids."""
    n = min(len(a), len(b))
    is_different = np.flatnonzero(a[:n] != b[:n])
    return int(is_different[0]) if len(is_different) else n
