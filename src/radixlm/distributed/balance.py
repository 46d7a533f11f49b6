"""EPLB: which rank holds which experts, and how many copies of each (DeepSeek's algorithm).

A logical expert is one of the model; a physical expert is a slot that holds a copy of one. With P
slots on R ranks, slot p lies on rank p // (P / R). No torch: this runs in a thread of rank 0.

Legend: L layers, E logical experts, P slots, X copies of an expert at most, S steps, R ranks.
"""

import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ALGORITHMS = ("auto", "deepseek", "deepseek_hierarchical", "deepseek_vec")
_SEED, _DYNAMIC_ROWS = 42, 64
_MAX_WINDOWS = 16  # sums of consecutive steps that deepseek_vec looks at


class Placement(Record):
    """``logical_LP``: the expert in each slot; ``slots_LEX``: the slots of each expert, padded
    with -1; ``counts_LE``: how many those are. All int64."""

    logical_LP: Ints
    slots_LEX: Ints
    counts_LE: Ints

    @property
    def num_slots(self) -> int:
        return len(self.logical_LP[0])


def placement_of(logical_LP: Ints, num_experts: int) -> Placement:
    """The placement with these experts in the slots. ValueError if an expert has no slot or a
    number is not an expert's."""
    logical_LP = np.ascontiguousarray(logical_LP, np.int64)
    if logical_LP.min() < 0 or logical_LP.max() >= num_experts:
        raise ValueError(f"experts are numbered 0 to {num_experts - 1}")
    counts_LE = np.stack([np.bincount(row, minlength=num_experts) for row in logical_LP])
    if (counts_LE == 0).any():
        layer, expert = np.argwhere(counts_LE == 0)[0]
        raise ValueError(f"expert {expert} of layer {layer} has no slot")
    slots_LEX = np.full((*counts_LE.shape, counts_LE.max()), -1, np.int64)
    for layer, row in enumerate(logical_LP):
        order = np.argsort(row, kind="stable")
        first = np.cumsum(counts_LE[layer]) - counts_LE[layer]
        slots_LEX[layer, row[order], np.arange(len(row)) - first[row[order]]] = order
    return Placement(logical_LP, slots_LEX, counts_LE)


def trivial(num_layers: int, num_experts: int, num_slots: int) -> Placement:
    """Experts in order; further slots hold copies from expert 0 on."""
    row = np.arange(num_slots) % num_experts
    return placement_of(np.tile(row, (num_layers, 1)), num_experts)


def _pack(weights: Floats, num_packs: int) -> tuple[Ints, Ints]:
    """Balanced packing of N weights: the pack of each and its place there. The heaviest comes
    first and goes to the lightest pack with room; lower numbers first on ties."""
    each = len(weights) // num_packs
    packs, places = np.arange(len(weights)), np.zeros(len(weights), np.int64)
    if each == 1:
        return packs, places
    heap, taken = [(0.0, pack) for pack in range(num_packs)], [0] * num_packs
    for item in np.argsort(-weights, kind="stable"):
        load, pack = heapq.heappop(heap)
        packs[item], places[item] = pack, taken[pack]
        taken[pack] += 1
        if taken[pack] < each:
            heapq.heappush(heap, (load + float(weights[item]), pack))
    return packs, places


def _replicate(weights: Floats, num_slots: int) -> tuple[Ints, Ints]:
    """(expert of each slot, copies of each expert): every further slot goes to the expert with the
    largest load a copy."""
    counts = np.ones(len(weights), np.int64)
    slots = np.arange(num_slots)
    heap = [(-float(weight), expert) for expert, weight in enumerate(weights)]
    heapq.heapify(heap)
    for slot in range(len(weights), num_slots):
        expert = heap[0][1]
        slots[slot] = expert
        counts[expert] += 1
        heapq.heapreplace(heap, (-float(weights[expert]) / int(counts[expert]), expert))
    return slots, counts


def _inverse(order: Ints) -> Ints:
    out = np.empty_like(order)
    out[order] = np.arange(len(order))
    return out


def _place_layer(weights: Floats, num_slots: int, groups: int, nodes: int, ranks: int) -> Ints:
    """One layer's experts by slot: groups into nodes, copies inside each node, slots into its
    ranks."""
    size = len(weights) // groups
    node, place = _pack(weights.reshape(groups, size).sum(1), nodes)
    by_node = ((node * (groups // nodes) + place)[:, None] * size + np.arange(size)).reshape(-1)
    expert_at = _inverse(by_node)
    rows = []
    for experts in expert_at.reshape(nodes, -1):
        slots, counts = _replicate(weights[experts], num_slots // nodes)
        packs, places = _pack((weights[experts] / counts)[slots], ranks // nodes)
        rows.append(experts[slots[_inverse(packs * (num_slots // ranks) + places)]])
    return np.concatenate(rows)


def _place_layer_by_steps(loads_SE: Floats, num_slots: int, ranks: int) -> Ints:
    """As above for loads that differ from step to step: what the sum over steps of the fullest
    rank's load shrinks most by."""
    num_experts = loads_SE.shape[1]
    counts = np.ones(num_experts, np.int64)
    slots = list(range(num_experts))
    for _ in range(num_slots - num_experts):
        each = loads_SE / counts
        is_top = each == each.max(1, keepdims=True)
        expert = int(np.argmax((is_top * each).sum(0)))
        slots.append(expert)
        counts[expert] += 1
    loads_SP = (loads_SE / counts)[:, slots]
    rank_SR, taken = np.zeros((len(loads_SE), ranks)), np.zeros(ranks, np.int64)
    where: list[list[int]] = [[] for _ in range(ranks)]
    for slot in np.argsort(-loads_SP.sum(0), kind="stable"):
        after_SR = rank_SR + loads_SP[:, slot, None]
        cost = np.maximum(after_SR, rank_SR.max(1, keepdims=True)).sum(0)
        cost = np.where(taken < num_slots // ranks, cost, np.inf)
        rank = min(np.flatnonzero(cost == cost.min()), key=lambda r: (rank_SR[:, r].sum(), r))
        rank_SR[:, rank] = after_SR[:, rank]
        taken[rank] += 1
        where[rank].append(slots[slot])
    return np.array([expert for row in where for expert in row])


def rebalance(
    counts_SLE: NDArray[Any],
    num_slots: int,
    ranks: int,
    nodes: int = 1,
    groups: int = 1,
    algorithm: str = "auto",
) -> Placement:
    """Where experts with these loads (tokens by step) should lie.

    ``groups``: expert groups of the router, which ``deepseek_hierarchical`` keeps on one node;
    ``auto`` does so if they divide among the nodes. ValueError for an unknown algorithm or sizes
    that do not divide."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")
    num_experts = counts_SLE.shape[2]
    is_hierarchical = groups % nodes == 0 and groups > 1
    if algorithm == "deepseek_hierarchical" and groups % nodes:
        raise ValueError(f"{groups} groups of experts do not divide among {nodes} nodes")
    if num_slots % ranks or num_slots < num_experts or ranks % nodes:
        raise ValueError(f"{num_slots} slots of {num_experts} experts on {ranks} ranks")
    if algorithm == "deepseek_vec":
        windows = np.array_split(counts_SLE, min(_MAX_WINDOWS, len(counts_SLE)))
        loads = np.stack([w.sum(0) for w in windows]).astype(np.float64)
        rows = [_place_layer_by_steps(one, num_slots, ranks) for one in loads.swapaxes(0, 1)]
    else:
        if algorithm == "deepseek" or not is_hierarchical:
            groups = nodes = 1
        total_LE = counts_SLE.sum(0).astype(np.float64)
        rows = [_place_layer(one, num_slots, groups, nodes, ranks) for one in total_LE]
    return placement_of(np.stack(rows), num_experts)


def balancedness(counts_LE: NDArray[Any], placement: Placement, ranks: int) -> Floats:
    """Mean over maximum of the ranks' tokens in each layer, [L]; 1 where there are none."""
    each_LE = counts_LE / placement.counts_LE
    loads_LP = np.take_along_axis(each_LE, placement.logical_LP, 1)
    loads_LR = loads_LP.reshape(len(loads_LP), ranks, -1).sum(2)
    top_L = loads_LR.max(1)
    out: Floats = np.divide(loads_LR.mean(1), top_L, out=np.ones(len(top_L)), where=top_L > 0)
    return out


def dispatch_table(placement: Placement, layer: int, how: str, ranks: int) -> Ints:
    """The slots that tokens use for the experts of a layer: [V, E]; token t uses row t % V.

    ``static``: a row a rank, with the rank's own copy where it has one and the others handed out
    evenly. ``dynamic``: 64 rows of copies drawn at random. One row where nothing is copied."""
    counts_E: Ints = placement.counts_LE[layer]
    slots_EX: Ints = placement.slots_LEX[layer]
    draw = np.random.default_rng((_SEED, layer))
    if counts_E.max() == 1:
        return np.ascontiguousarray(slots_EX[None, :, 0])
    if how == "dynamic":
        picks = draw.integers(0, 1 << 30, (_DYNAMIC_ROWS, len(counts_E))) % counts_E
        return np.ascontiguousarray(slots_EX[np.arange(len(counts_E)), picks])
    each = placement.num_slots // ranks
    out_RE = np.full((ranks, len(counts_E)), -1, np.int64)
    for expert, slots in enumerate(slots_EX):
        held = slots[: counts_E[expert]]
        out_RE[held[::-1] // each, expert] = held[::-1]
        missing = np.flatnonzero(out_RE[:, expert] < 0)
        out_RE[missing, expert] = draw.permutation(np.resize(held, len(missing)))
    return out_RE


class Move(Record):
    """One slot's new content: from ``source``, a slot of the old placement (the slot itself: it
    stays)."""

    target: int
    source: int


def moves(old_P: Ints, new_P: Ints, ranks: int) -> list[Move]:
    """Where each slot of one layer gets its expert. The slot itself comes first, then a slot of
    the same rank, then of another; the copies of an expert take turns."""
    each = len(old_P) // ranks
    num_sent = np.zeros(len(old_P), np.int64)
    out: list[Move] = []
    for target, expert in enumerate(new_P):
        holders = np.flatnonzero(old_P == expert)
        rank = target // each

        def distance(slot: int, rank: int = rank, target: int = target) -> tuple[int, ...]:
            other = slot // each
            return slot != target, other != rank, int(num_sent[slot]), slot

        source = min(map(int, holders), key=distance)
        num_sent[source] += source // each != rank
        out.append(Move(target, source))
    return out


def read_location(
    text: str, num_layers: int, num_experts: int, num_slots: int, ranks: int,
    nodes: int = 1, groups: int = 1, algorithm: str = "auto",
) -> Placement:  # fmt: skip
    """``--init-expert-location``: trivial, or JSON (or a .json file's) with
    ``physical_to_logical_map`` [L][P] or ``logical_count`` [L][E] or [S][L][E], which EPLB places.
    ConfigError names what does not fit."""
    name = "--init-expert-location"
    if text == "trivial":
        return trivial(num_layers, num_experts, num_slots)
    try:
        data = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: neither 'trivial' nor JSON nor a JSON file: {error}") from error
    keys = ("physical_to_logical_map", "logical_count")
    key = next((key for key in keys if isinstance(data, dict) and key in data), None)
    if key is None:
        raise ConfigError(f"{name}: expected a key {keys[0]!r} or {keys[1]!r}")
    try:
        table = np.array(data[key], np.int64)
        if key == "logical_count":
            table = table[None] if table.ndim == 2 else table
            _check_shape(table.shape[1:], (num_layers, num_experts))
            return rebalance(table, num_slots, ranks, nodes, groups, algorithm)
        _check_shape(table.shape, (num_layers, num_slots))
        return placement_of(table, num_experts)
    except ValueError as error:
        raise ConfigError(f"{name}: {key}: {error}") from error


def _check_shape(shape: Sequence[int], expected: tuple[int, int]) -> None:
    if tuple(shape) != expected:
        raise ValueError(f"has the shape {list(shape)}, this model and --ep-size need {expected}")
