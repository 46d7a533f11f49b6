"""Experts that lie on several ranks: each rank computes those it holds, of all tokens.

A slot holds a copy of an expert; each rank has a run of slots. Outcomes are exchanged one by one
and added on every rank in the order of the choice, which keeps the bits of one rank.

Legend: T tokens, K chosen experts, D channels, E experts, P slots, N pairs of a token and a choice,
V variants of the choice among copies.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from radixlm.base.record import Record, replace
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.groups import Group
from radixlm.distributed.moves import exchange_slots
from radixlm.distributed.topology import bounds
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.moe import Experts
from radixlm.kernels.ops.moe import ExpertAdapters, PackedExperts, combine
from radixlm.layers.program import Unsupported
from radixlm.quant.param import Cut

ALL_TO_ALL_TOKENS = 64  # from which on each rank adds up its share of the tokens


class InsideCut(Record, eq=False):
    """Rank r of ``group`` has the inner channels inner[r]:inner[r + 1] of gate and up, and the
    outputs dim[r]:dim[r + 1] of down."""

    group: Group
    inner: tuple[int, ...]
    dim: tuple[int, ...]

    def cuts(self, num_parts: int) -> tuple[tuple[Cut], tuple[Cut]]:
        """This rank's rows of up, which joins ``num_parts`` matrices, and of down."""
        rank, whole = self.group.rank, self.inner[-1]
        begin, end = self.inner[rank : rank + 2]
        rows = tuple((part * whole + begin, part * whole + end) for part in range(num_parts))
        down = (self.dim[rank], self.dim[rank + 1])
        return (Cut(1, num_parts * whole, rows),), (Cut(1, self.dim[-1], (down,)),)


class ExpertSplit(Record, eq=False):
    """Where the experts of one layer lie. ``logical_P``: the expert in each slot; rank r of
    ``group`` holds the slots starts[r]:starts[r + 1]. ``slots_VE`` (int32): the slot that tokens
    use for each expert, and numbers behind the slots for zero experts; token t has row t % V.
    ``is_fake``: noise takes the place of the router's logits, to measure balanced loads.
    ``inside``: the ranks that have the same slots, cut at these inner channels and outputs."""

    group: Group
    starts: tuple[int, ...]
    logical_P: tuple[int, ...]
    slots_VE: Tensor
    is_fake: bool = False
    inside: InsideCut | None = None

    @property
    def first(self) -> int:
        """This rank's first slot."""
        return self.starts[self.group.rank]

    @property
    def held(self) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        return self.logical_P[self.first : self.starts[self.group.rank + 1]]

    def slots(self, ids_TK: Tensor) -> Tensor:
        """The slots that compute these experts."""
        rows_T = torch.arange(len(ids_TK), device=ids_TK.device) % len(self.slots_VE)
        return self.slots_VE[rows_T[:, None], ids_TK].long()


@runtime_checkable
class SkippingExperts(Protocol):
    """Experts that can leave choices out."""

    def run_some(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """``run`` without the choices whose id is -1."""


def native_of(group: Group) -> Any:
    """What C++ kernels call for a group's collectives; None of ranks that are threads, or alone."""
    return getattr(group, "native", None)


def even_split(num_experts: int, group: Group, zero_experts: int = 0) -> ExpertSplit:
    """Each expert once, in order; the first ranks hold one more where they do not divide."""
    numbers = tuple(range(num_experts))
    table_VE = torch.arange(num_experts + zero_experts, dtype=torch.int32)[None]
    return ExpertSplit(group, bounds(num_experts, group.size), numbers, table_VE)


class SplitExperts:
    """``PackedExperts`` of which ``pack`` holds this rank's. ``groups``: of attention, each of
    which brings its own tokens. ``adds_sums``: the ranks' sums are added instead of outcomes, which
    changes last bits; the host then need not know which tokens chose which experts."""

    def __init__(
        self,
        pack: PackedExperts,
        split: ExpertSplit,
        groups: AttentionGroups | None = None,
        adds_sums: bool = False,
    ) -> None:
        self.pack, self.split, self._groups = pack, split, groups
        self._adds_sums = adds_sums
        if hasattr(pack, "takes_adapters"):
            self.takes_adapters = True
        self._name_blocks()
        self._part = self._make_part()
        self._combine = pack.combine if isinstance(pack, Experts) else combine

    def program_part(self) -> Any:
        """What a step program needs besides the pack. Unsupported of ranks that are threads."""
        if self._part is None:
            raise Unsupported("experts on ranks that are threads")
        return self._part

    def _make_part(self) -> Any:
        split, inside, table = self.split, self.split.inside, self.split.slots_VE
        group = native_of(split.group)
        if group is None and inside is None:
            return None
        cut: tuple[Any, Sequence[int], Sequence[int]] = (None, (), ())
        if inside is not None:
            cut = (native_of(inside.group), inside.inner, inside.dim)
        return native().ExpertPart(group, split.starts, table.data_ptr(), *table.shape, *cut)

    def move(self, logical_P: Sequence[int], slots_VE: Tensor) -> None:
        """Fill the slots with these experts, on all ranks between two steps. The table is written
        in place, where a step program reads it."""
        split, pack = self.split, self.pack
        assert isinstance(pack, Experts)
        exchange_slots(split.group, split.logical_P, logical_P, pack.slot_tensors)
        split.slots_VE.copy_(slots_VE)
        self.split = replace(split, logical_P=tuple(logical_P))
        self._name_blocks()

    def _name_blocks(self) -> None:
        """Tell the kernel which experts it has, as adapters number them."""
        if isinstance(self.pack, Experts):
            self.pack.handle.blocks = self.split.held

    def run(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        lora: ExpertAdapters | None = None,
    ) -> Tensor:
        if self._groups is None:
            return self._run(x_TD, weights_TK, ids_TK, lora)
        whole = [self._groups.gather(one) for one in (x_TD, weights_TK, ids_TK)]
        return self._groups.own(self._run(whole[0], whole[1], whole[2], lora))

    def _run(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, lora: ExpertAdapters | None
    ) -> Tensor:
        """The same on all ranks, for tokens that all of them have, with their adapters."""
        group, tokens, top_k = self.split.group, *ids_TK.shape
        if self.split.inside is not None:
            assert isinstance(self.pack, Experts)
            return self.pack.run(x_TD, weights_TK, ids_TK, lora, part=self._part)
        if lora is not None and self._part is not None:
            return cast(Experts, self.pack).run(x_TD, weights_TK, ids_TK, lora, part=self._part)
        if self._adds_sums and lora is None:
            return self._run_own(x_TD, weights_TK, ids_TK)
        slots_N = self.split.slots(ids_TK).flatten()
        if tokens < ALL_TO_ALL_TOKENS or group.size == 2:
            order_N, counts = self._sorted(slots_N)
            pairs_M = self._mine(order_N, counts)
            mine_MD = self._run_pairs(x_TD, slots_N, pairs_M, top_k, lora)
            out_ND = group.all_gather_rows(mine_MD, counts)
            return self._combine(out_ND, _inverse(order_N).view(-1, top_k), weights_TK)
        cuts = bounds(tokens, group.size)
        # of the pairs of each share of the tokens: their order by slot, pairs on each rank
        shares = [(begin * top_k, *self._sorted(slots_N[begin * top_k : end * top_k]))
                  for begin, end in pairwise(cuts)]  # fmt: skip
        mine = [self._mine(order_N + first, counts) for first, order_N, counts in shares]
        sent_ND = self._run_pairs(x_TD, slots_N, torch.cat(mine), top_k, lora)
        _, order_N, received = shares[group.rank]
        out_ND = group.all_to_all_rows(sent_ND, tuple(map(len, mine)), received)
        begin, end = cuts[group.rank : group.rank + 2]
        slot_TK = _inverse(order_N).view(-1, top_k)
        y_TD = self._combine(out_ND, slot_TK, weights_TK[begin:end])
        return group.all_gather_rows(y_TD, tuple(b - a for a, b in pairwise(cuts)))

    def _run_own(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The sum over ranks of what each makes of its own experts."""
        own_TK = self.split.slots(ids_TK) - self.split.first
        is_own_TK = (own_TK >= 0) & (own_TK < len(self.split.held))
        if isinstance(self.pack, SkippingExperts):
            y_TD = self.pack.run_some(x_TD, weights_TK, own_TK.where(is_own_TK, -1))
        else:
            weights_TK = weights_TK.where(is_own_TK, 0.0)
            y_TD = self.pack.run(x_TD, weights_TK, own_TK.where(is_own_TK, 0))
        return self.split.group.all_reduce(y_TD)

    def _sorted(self, slots_N: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The pairs by slot, and how many each rank computes."""
        order_N = slots_N.argsort(stable=True)
        starts = torch.tensor(self.split.starts, device=slots_N.device)
        ends = torch.searchsorted(slots_N[order_N], starts).tolist()
        return order_N, tuple(b - a for a, b in pairwise(ends))

    def _mine(self, order_N: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The pairs of the order that this rank computes."""
        rank = self.split.group.rank
        return order_N[sum(counts[:rank]) : sum(counts[: rank + 1])]

    def _run_pairs(
        self,
        x_TD: Tensor,
        slots_N: Tensor,
        pairs_M: Tensor,
        top_k: int,
        lora: ExpertAdapters | None,
    ) -> Tensor:
        """What this rank's experts make of these pairs, without their weights: [M, D]."""
        if not len(pairs_M):
            return x_TD.new_empty(0, x_TD.shape[1])
        ids_M1 = (slots_N[pairs_M] - self.split.first)[:, None]
        rows_M = pairs_M // top_k
        x_MD, ones_M1 = x_TD[rows_M], torch.ones(len(pairs_M), 1, device=x_TD.device)
        if lora is None:
            return self.pack.run(x_MD, ones_M1, ids_M1)
        own = ExpertAdapters(lora.rows.select(rows_M), lora.site, self.split.held)
        run: Callable[..., Tensor] = self.pack.run
        return run(x_MD, ones_M1, ids_M1, own)


def _inverse(order_N: Tensor) -> Tensor:
    out = torch.empty_like(order_N)
    out[order_N] = torch.arange(len(order_N), device=order_N.device)
    return out
