"""ModelDrafter: a draft model, or a head that reads the target's hidden states, as the device's
drafter.

The entry of token i in its KV depends on tokens up to i (and on hidden states before i) only, so it
lies in the target's page of token i, and pages that requests share hold the same for all of them.
Entries are written when drafts are asked for (draft_entries.py). Heads have no entry for token 0,
whose place holds zeros.

Legend: S sequences, T tokens, R rows that emit, K drafted tokens, N channels of the target's hidden
states, D of the draft's, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor.device_tables import DeviceTables
from radixlm.pools.pool import KvPool
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.draft_entries import DraftEntries, Int64Array, PageGroups, ranges
from radixlm.speculative.device.draft_trees import DraftTrees
from radixlm.speculative.device.drafter import DeviceProposals, DraftColumns, FitWatch, StepTail
from radixlm.speculative.trees import TreeShape
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Int32Array, Items, PageCopy

if TYPE_CHECKING:
    from radixlm.models.drafts import DraftModel, DraftOutput, StandaloneDraft

# tokens that wait for their entries at most; fewer where their hidden states are wide
MIN_WAITING, MAX_WAITING, MAX_WAITING_FLOATS = 256, 4096, 1 << 24

ONE_GROUP = PageGroups()


class Places(Record, eq=False):
    """Where the tokens of a draft step stand: positions, places in the cache, each sequence's end,
    its first token (and T), and the rows of T whose logits are wanted."""

    at_T: Int64Array
    store_T: Int64Array
    ends_S: Int64Array
    firsts_S1: Int64Array
    rows_R: Int64Array


class Known(Record, eq=False):
    """Tokens [starts, starts + counts) of these slots, one sequence after another."""

    slots_S: Int64Array
    starts_S: Int64Array
    counts_S: Int64Array
    tokens_E: Tensor


class Drafted(Record, eq=False):
    """The drafts of slots so far, and how many are wanted, the longest first."""

    slots_R: Int64Array
    lens_R: Int32Array
    tokens_RK: Tensor


class ModelDrafter:
    """``attn`` has the draft's own pools, whose pages are those of the target's page space 0.
    ``num_ids``: target tokens from this id on are never proposed. ``later``: further modules with
    their attention. Module m reads the hidden states that module m - 1 leaves, and its entry of
    token i those of token i - 1; it drafts one token further (arXiv:2412.19437, section 2.2).
    ``tree``: it drafts trees of this shape; only without further modules."""

    lag = 0  # as of ``DraftEntries``

    def __init__(
        self,
        net: DraftModel | StandaloneDraft,
        attn: Any,
        tables: DeviceTables,
        page_size: int,
        num_ids: int,
        later: Sequence[tuple[DraftModel | StandaloneDraft, Any]] = (),
        groups: PageGroups = ONE_GROUP,
        tree: TreeShape | None = None,
    ) -> None:
        self.net, self._tables, self._groups = net, tables, groups
        self._modules = ((net, attn), *later)
        # by module and slot: the hidden state that it has left for its last known token
        self._left: list[dict[int, Tensor]] = [{} for _ in later]
        self._page_size, self._num_ids = page_size, num_ids
        self.hidden = net.needs
        self.pools: Sequence[KvPool] = [pool for _, one in self._modules for pool in one.pools]
        self._entries = DraftEntries(tables, page_size, self.hidden is not None, groups, self.lag)
        self._fit = FitWatch()
        self._trees: DraftTrees | None = None
        if tree is not None:
            assert not later, "a tree needs one module"
            self._trees = DraftTrees(tree, page_size, self._entries, self.pools, self._step)

    @property
    def filled_pages(self) -> set[int]:
        """Pages all of whose entries were written; the set changes with later steps."""
        return self._entries.filled

    def lack_pages(self, group: int, pages: Int32Array) -> None:
        """Pages that came to an attention group without entries."""
        self._entries.lack(group, pages)

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
        self._entries.release(slot)
        for left in self._left:
            left.pop(slot, None)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy the pages of the target's page space 0."""
        slots = np.array([copy.slot for copy in copies if copy.group == 0], np.int64)
        if not len(slots):
            return
        pairs = np.array([(copy.source, copy.target) for copy in copies if copy.group == 0])
        first_S = self._groups.first_pages(self._tables.num_slots + 1)[slots]
        sources, targets = (pairs + first_S[:, None]).T.tolist()
        for pool in self.pools:
            pool.copy_pages(sources, targets)

    # ---- what is known -------------------------------------------------------------------------

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        """Note the tokens that the step made known."""
        hidden_TN, entries = None, self._entries
        if self.hidden is not None:
            hidden_TN = tail.hidden_TD
            assert hidden_TN is not None, "the target leaves no hidden states"
            if not self._tables.is_shared:  # a graph writes them anew
                hidden_TN = hidden_TN.clone()
        self._fit.count(tail)
        width = 1 if hidden_TN is None else hidden_TN.shape[1]
        if entries.num_tokens > max(MIN_WAITING, min(MAX_WAITING, MAX_WAITING_FLOATS // width)):
            self._write(None)
        entries.add_step(batch, tail, hidden_TN)

    def skip(self, items: Items) -> None:
        """The tokens of this step get no entries."""
        self._entries.skip(items)

    # ---- entries and proposals -----------------------------------------------------------------

    def _write(self, slots_R: Int64Array | None) -> DraftOutput | None:
        """Write the entries of the tokens of ``slots_R`` (None: of all) that wait; what follows the
        last one of each."""
        taken = self._take(slots_R)
        if taken is None:
            return None
        known, hidden_ED = taken
        if hidden_ED is not None:
            hidden_ED = self.net.combine(hidden_ED)
        rows_R = known.counts_S[:0]
        if slots_R is not None:
            ends_S = np.cumsum(known.counts_S)
            rows_R = ends_S[np.searchsorted(known.slots_S, slots_R)] - 1
        self._known = known
        output = self._forward(0, known, hidden_ED, rows_R)
        if slots_R is None:
            self._finish(0, output, None)
        return output

    def _take(self, slots_R: Int64Array | None) -> tuple[Known, Tensor | None] | None:
        """The tokens of ``slots_R`` (None: of all) that wait, with hidden states of the target,
        [E, N]; None of none. They count as written."""
        entries = self._entries.take(slots_R)
        if (blank_B := self._entries.blanks()) is not None:
            self._blank(blank_B)
        if entries is None:
            return None
        first_S = np.flatnonzero(np.diff(entries.slots_E, prepend=-1))
        counts_S = np.diff(np.append(first_S, len(entries.slots_E)))
        slots_S, starts_S = entries.slots_E[first_S], entries.at_E[first_S]
        tokens_E = self._fed(entries.tokens_E)
        return Known(slots_S, starts_S, counts_S, tokens_E), entries.hidden_EN

    def _forward(
        self, number: int, known: Known, hidden_ED: Tensor | None, rows_R: Int64Array
    ) -> DraftOutput:
        """Entries of the tokens ``known`` in a module; what follows those of ``rows_R``."""
        at_E, sequence_E = ranges(known.starts_S, known.counts_S)
        slots_S, ends_S = known.slots_S, known.starts_S + known.counts_S
        places = Places(
            at_T=at_E,
            store_T=self._entries.places(slots_S[sequence_E], at_E),
            ends_S=ends_S,
            firsts_S1=np.append(0, np.cumsum(known.counts_S)),
            rows_R=rows_R,
        )
        batch = self._batch(number, places, self._tables_of(slots_S, ends_S), slots_S)
        batch.token_ids_T = known.tokens_E
        passes_all = number + 1 < len(self._modules)
        return self._modules[number][0].draft_step(batch, hidden_ED, passes_all)

    def _further(
        self, number: int, before: DraftOutput, drafted: Drafted | None, num_rows: int
    ) -> DraftOutput:
        """The entries of the same tokens in a later module, and of the drafts between (``drafted``;
        None: there are none); what follows the last one of the first ``num_rows`` rows."""
        known, left, hidden_TD = self._known, self._left[number - 1], before.hidden_RD
        assert hidden_TD is not None
        more_S = np.zeros_like(known.counts_S)  # drafts of each sequence that are fed
        earlier_S, row_S = more_S, more_S
        if drafted is not None:
            row_S = np.argsort(drafted.slots_R)  # sequences stand in the order of slots
            more_S = np.minimum(number, drafted.lens_R - 1)[row_S]
            earlier_S = np.minimum(number - 1, drafted.lens_R - 1)[row_S]
        tokens, hidden = list[Tensor](), list[Tensor]()
        at = own = 0
        rows = zip(known.slots_S, known.counts_S, more_S, earlier_S, row_S, strict=True)
        for slot, count, more, earlier, row in rows:
            tokens.append(known.tokens_E[own : own + count])
            if drafted is not None:
                tokens.append(self._fed(drafted.tokens_RK[row, :more]))
            none_1D = hidden_TD.new_zeros(1, hidden_TD.shape[1])
            hidden += [left.get(int(slot), none_1D), hidden_TD[at : at + count + more - 1]]
            left[int(slot)] = hidden_TD[at + count - 1 : at + count].clone()
            at, own = at + count + earlier, own + count
        counts_S = known.counts_S + more_S
        rows_R = known.counts_S[:0]
        if drafted is not None:
            rows_R = (np.cumsum(counts_S) - 1)[np.argsort(row_S)][:num_rows]
        fed = Known(known.slots_S, known.starts_S, counts_S, torch.cat(tokens))
        return self._forward(number, fed, torch.cat(hidden), rows_R)

    def _finish(self, number: int, output: DraftOutput, drafted: Drafted | None) -> None:
        """Write the entries of the modules behind ``number``, which draft nothing."""
        for later in range(number + 1, len(self._modules)):
            output = self._further(later, output, drafted, 0)

    def _blank(self, places_B: Tensor) -> None:
        """Zeros in these places."""
        groups = [group for net, _ in self._modules for group in net.kv_groups]
        for group, pool in zip(groups, self.pools, strict=True):
            k = torch.zeros(len(places_B), group.kv_heads, group.head_dim, device=places_B.device)
            v = None if group.latent else k.new_zeros(*k.shape[:2], group.v_dim)
            for layer in range(len(group.layers)):
                pool.store(layer, places_B, k, v)

    def _fed(self, tokens_T: Tensor) -> Tensor:
        return tokens_T.long().clamp(0, self._num_ids - 1)

    def _tables_of(self, slots_S: Int64Array, ends_S: Int64Array) -> Tensor:
        """The pages from each slot's ``base`` on, for sequences that end at ``ends_S`` at most."""
        first_S, size = self._entries.base[slots_S] // self._page_size, self._page_size
        width = -(-int(ends_S.max()) // size)
        columns = np.minimum(first_S[:, None] + np.arange(width), self._tables.max_pages - 1)
        return self._put(self._entries.pages(slots_S[:, None], columns), torch.int32)

    def _put(self, numbers: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(numbers).to(self._tables.device, dtype)

    def _batch(
        self, number: int, places: Places, table_SP: Tensor, slots_S: Int64Array
    ) -> ForwardBatch:
        """A step of a module, without its tokens."""
        net, attn = self._modules[number]
        kv_len_S = places.ends_S - self._entries.base[slots_S]
        counts_S = np.diff(places.firsts_S1)
        num_groups, positions_T = len(net.kv_groups), self._put(places.at_T)
        return ForwardBatch(
            token_ids_T=positions_T,
            positions_T=positions_T,
            rope_len_T=positions_T + 1,
            query_start_S1=self._put(places.firsts_S1, torch.int32),
            kv_len_S=self._put(kv_len_S, torch.int32),
            page_table_GSP=(table_SP,) * num_groups,
            store_GT=(self._put(places.store_T),) * num_groups,
            logits_rows_R=self._put(places.rows_R),
            attn=attn,
            max_query_len=int(counts_S.max()),
            max_kv_len=int(places.ends_S.max()),
            is_decode=len(places.at_T) == len(slots_S) == len(places.rows_R),
        )

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        columns, most = DraftColumns(lens_R, self._tables.device), int(lens_R.max())
        lens, slots = columns.lens, tail.slots_R.cpu().numpy()[columns.order_R]
        output, entries = self._write(slots), self._entries
        assert output is not None, "each row has a new token"
        ends = entries.done[slots]
        states = [tail.sampling.states[slot] for slot in slots.tolist()]
        draw = Draw(states, self.net.target_ids_V, self._num_ids)
        if self._trees is not None:
            parts = self._trees.grow(slots, lens, self._tables_of(slots, ends + most), output, draw)
            return self._proposed(parts, columns.order_R, len(lens_R))
        at_KR = ends + np.arange(most)[:, None]
        store_KR = entries.places(slots, np.minimum(at_KR, ends + lens - 1))
        table_SP = self._tables_of(slots, ends + most)
        drafted, module = Drafted(slots, lens, columns.tokens_RK[columns.index_R]), 0
        for depth in range(most):
            num = columns.num_rows(depth + 1)
            tokens_R, chance_R = draw(output.logits_RV, self._put(at_KR[depth]))
            columns.add(depth, tokens_R, chance_R)
            drafted.tokens_RK[: len(tokens_R), depth] = tokens_R
            if not num:
                break
            if depth + 1 < len(self._modules):
                module = depth + 1
                output = self._further(module, output, drafted, num)
                continue
            hidden_RD = output.hidden_RD
            if hidden_RD is not None:
                hidden_RD = hidden_RD[:num]
            at, store = at_KR[depth, :num], store_KR[depth, :num]
            rows = table_SP[:num], slots[:num], tokens_R[:num]
            output = self._step(at, store, *rows, hidden_RD, module)
        self._finish(module, output, drafted)
        if self.hidden is None:  # the entries of all but the last draft depend on tokens only
            entries.drafted(slots, ends + lens - 1)
        return columns.proposals()

    def _step(
        self,
        at_R: Int64Array,
        store_R: Int64Array,
        table_RP: Tensor,
        slots_R: Int64Array,
        tokens_R: Tensor,
        hidden_RD: Tensor | None,
        module: int = 0,
    ) -> DraftOutput:
        """What follows one token of each row, whose entry is stored."""
        row = np.arange(len(at_R) + 1)
        places = Places(at_R, store_R, at_R + 1, row, row[:-1])
        batch = self._batch(module, places, table_RP, slots_R)
        batch.token_ids_T = self._fed(tokens_R)
        return self._modules[module][0].draft_step(batch, hidden_RD)

    def _proposed(
        self, parts: Sequence[tuple[NDArray[Any], ...]], order_R: Int64Array, num_rows: int
    ) -> DeviceProposals:
        """Trees of the rows ``order_R``."""
        assert self._trees is not None
        size = self._trees.shape.size
        tokens_RK, parents_RK = (np.full((num_rows, size), -1) for _ in range(2))
        survival_RK, begin = np.zeros((num_rows, size)), 0
        for tokens, survival, parents in parts:
            index = order_R[begin : begin + len(tokens), None], np.arange(tokens.shape[1])
            tokens_RK[index], survival_RK[index], parents_RK[index] = tokens, survival, parents
            begin += len(tokens)
        survival_put = self._put(survival_RK, torch.float32)
        return DeviceProposals(self._put(tokens_RK), survival_put, self._put(parents_RK))
