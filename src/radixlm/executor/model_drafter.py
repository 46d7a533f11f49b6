"""ModelDrafter: a draft model, or a head that reads the target's hidden states, as the device's
drafter.

The entry of token i in its KV depends on tokens up to i (and on hidden states before i) only, so it
lies in the target's page of token i, and pages that requests share hold the same for all of them. A
token's entry is written when drafts are asked for, or once ``LAZY_TOKENS`` of them wait: a request
that does not draft costs one short step now and then. Heads have no entry for token 0, whose place
holds zeros.

Legend: S sequences, T tokens, R rows that emit, K drafted tokens, N channels of the target's hidden
states, D of the draft's, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.drafter import DeviceProposals, StepTail
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import KvPool
from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.table import SlotState
from radixlm.step.batch import ForwardBatch, HiddenNeeds
from radixlm.step.plan import Int32Array

log = logging.getLogger(__name__)

LAZY_TOKENS = 64
MIN_ROUNDS = 256  # verifications after which a draft model is judged


class DraftOutput(Protocol):
    """``models/drafts.py``: logits of the draft's own vocabulary, and what its next step reads."""

    @property
    def logits_RV(self) -> Tensor: ...
    @property
    def hidden_RD(self) -> Tensor | None: ...


class DraftNet(Protocol):
    """``models/drafts.py``: a head, or a whole model (``needs`` None)."""

    needs: HiddenNeeds | None
    kv_groups: tuple[KvGroup, ...]

    @property
    def target_ids_V(self) -> Tensor | None: ...
    def combine(self, hidden_TN: Tensor) -> Tensor: ...
    def draft_step(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> DraftOutput: ...


@dataclass(slots=True)
class _Feed:
    """Of one slot: ``tokens`` from position ``at`` on have no entries yet; ``hidden`` are the
    states before them. ``last``: the state before the token behind them, where that is not known
    yet. ``drafts``: proposed tokens whose entries follow ``at``."""

    at: int
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None
    drafts: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.at + len(self.tokens)

    def take(self, kept: int) -> tuple[list[int], Tensor | None]:
        """The tokens but for the last ``kept``, and the states before them; no more waiting."""
        count = len(self.tokens) - kept
        tokens, self.tokens = self.tokens[:count], self.tokens[count:]
        self.at += count
        if not self.hidden:
            return tokens, None
        hidden_TN = torch.cat(self.hidden) if len(self.hidden) > 1 else self.hidden[0]
        self.hidden = [hidden_TN[count:]] if kept else []
        return tokens, hidden_TN[:count]


class ModelDrafter:
    """``attn`` has the draft's own pools, whose pages are those of the target's page space 0.
    ``num_ids``: target tokens from this id on are never proposed."""

    def __init__(
        self, net: DraftNet, attn: Any, tables: DeviceTables, page_size: int, num_ids: int
    ) -> None:
        self.net, self._attn, self._tables = net, attn, tables
        self._page_size, self._num_ids = page_size, num_ids
        self.hidden = net.needs
        self.pools: Sequence[KvPool] = attn.pools
        self._feeds: dict[int, _Feed] = {}
        self._num_rounds = self._num_accepted = 0

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
        self._feeds.pop(slot, None)

    # ---- what is known -------------------------------------------------------------------------

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        """Note the tokens that the step made known; write entries where many wait."""
        hidden_TN = None if self.hidden is None else tail.hidden_TD
        assert hidden_TN is not None or self.hidden is None, "the target leaves no hidden states"
        rows = {sequence: row for row, sequence in enumerate(tail.sequences_R.tolist())}
        ids, firsts = batch.token_ids_T.tolist(), batch.query_start_S1.tolist()
        accepted, next_tokens = tail.num_accepted_R.tolist(), tail.next_tokens_R.tolist()
        items, decodes, chunks = tail.items, len(tail.items.starts), dict[int, int]()
        for sequence in range(len(items)):
            first, end, row = firsts[sequence], firsts[sequence + 1], rows.get(sequence)
            then = [] if row is None else [next_tokens[row]]
            if sequence < decodes:
                assert row is not None
                slot, start = int(items.decodes.slots[sequence]), int(items.starts[sequence])
                end = first + accepted[row] + 1
                known = ids[first + 1 : end] + then
                hidden = None if hidden_TN is None else hidden_TN[first:end]
                self._append(slot, start + 1, known, hidden)
            else:
                item = items.prefills[sequence - decodes]
                if item.pooling is None:
                    hidden = None if hidden_TN is None else hidden_TN[first:end]
                    self._append_chunk(item.slot, item.start, ids[first:end], hidden, then)
                    chunks[item.slot] = len(then)
        self._count(tail, accepted)
        # others may share the pages of a prompt from now on; drafts follow the last token
        waiting = chunks | {
            slot: 1 for slot, feed in self._feeds.items() if len(feed.tokens) > LAZY_TOKENS
        }
        waiting = {n: kept for n, kept in waiting.items() if len(self._feeds[n].tokens) > kept}
        if waiting:
            self._write(list(waiting), list(waiting.values()))

    def _count(self, tail: StepTail, accepted: list[int]) -> None:
        """Warn once of a draft model that does not fit its target."""
        drafts = tail.items.drafts
        if drafts is None or self._num_rounds > MIN_ROUNDS:
            return
        self._num_rounds += int(np.count_nonzero(drafts.lens))
        self._num_accepted += sum(accepted)
        if self._num_rounds > MIN_ROUNDS > 10 * self._num_accepted:
            log.warning(
                "the draft model does not fit: %d drafted tokens were accepted in %d steps; one "
                "that was made for this model is right more often",
                self._num_accepted,
                self._num_rounds,
            )

    def _append_chunk(
        self, slot: int, start: int, ids: list[int], hidden_TN: Tensor | None, then: list[int]
    ) -> None:
        """A part of a prompt, and the token behind it where that was sampled."""
        feed = self._feeds.get(slot)
        if feed is None or feed.end != start:
            feed = self._feeds[slot] = _Feed(start)
        if hidden_TN is not None:
            before = hidden_TN.new_zeros(1, hidden_TN.shape[1]) if feed.last is None else feed.last
            feed.last = hidden_TN[-1:]
            hidden_TN = torch.cat((before, hidden_TN[: len(ids) - 1 + len(then)]))
            if start == 0:
                self._write_hole(slot)
                feed.at, ids, hidden_TN = 1, ids[1:], hidden_TN[1:]
        self._append(slot, feed.end, ids + then, hidden_TN)

    def _append(self, slot: int, start: int, ids: list[int], hidden_TN: Tensor | None) -> None:
        feed = self._feeds.get(slot)
        if feed is None or feed.end != start:
            feed = self._feeds[slot] = _Feed(start)
        if not feed.tokens:  # entries of accepted drafts are right already
            same = 0
            while same < min(len(ids) - 1, len(feed.drafts)) and ids[same] == feed.drafts[same]:
                same += 1
            feed.at, ids, feed.drafts = feed.at + same, ids[same:], []
        feed.tokens += ids
        if hidden_TN is not None and len(ids):
            feed.hidden.append(hidden_TN)

    def _write_hole(self, slot: int) -> None:
        """Zeros in the place of token 0, of which heads have no entry."""
        place = self._tables.device_pages[0, slot, :1].long() * self._page_size
        for group, pool in zip(self.net.kv_groups, self.pools, strict=True):
            k = torch.zeros(1, group.kv_heads, group.head_dim, device=place.device)
            v = None if group.latent else k.new_zeros(1, group.kv_heads, group.v_dim)
            for layer in range(len(group.layers)):
                pool.store(layer, place, k, v)

    # ---- entries and proposals -----------------------------------------------------------------

    def _write(self, slots: list[int], kept: list[int] | None = None) -> DraftOutput:
        """Write the entries of the tokens that wait, but for the last ``kept`` of each slot; what
        follows the last of them."""
        feeds = [self._feeds[slot] for slot in slots]
        starts = np.array([feed.at for feed in feeds])
        taken = [feed.take(n) for feed, n in zip(feeds, kept or [0] * len(feeds), strict=True)]
        counts = np.array([len(tokens) for tokens, _ in taken])
        tokens_T = torch.tensor([token for tokens, _ in taken for token in tokens])
        batch = self._batch(np.array(slots), starts, counts, tokens_T)
        if kept is not None:
            batch.logits_rows_R = batch.logits_rows_R[:0]
        hidden = [part_TN for _, part_TN in taken if part_TN is not None]
        hidden_TD = self.net.combine(torch.cat(hidden)) if hidden else None
        return self.net.draft_step(batch, hidden_TD)

    def _batch(self, slots_S: Any, starts_S: Any, counts_S: Any, tokens_T: Tensor) -> ForwardBatch:
        """Tokens [starts, starts + counts) of these slots (numpy int64); a row of logits each."""
        size, device, table_SP = self._page_size, self._tables.device, self._tables.device_pages[0]
        firsts_S1 = np.concatenate(([0], np.cumsum(counts_S)))
        positions = np.arange(firsts_S1[-1]) + np.repeat(starts_S - firsts_S1[:-1], counts_S)
        max_kv_len = int((starts_S + counts_S).max())

        def put(numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.asarray(numbers)).to(device, dtype)

        positions_T, slots_T = put(positions), put(np.repeat(slots_S, counts_S))
        page_T = table_SP[slots_T, positions_T // size].long()
        width = min(-(-max_kv_len // size), self._tables.max_pages)
        num_groups = len(self.net.kv_groups)
        return ForwardBatch(
            token_ids_T=tokens_T.to(device).clamp(0, self._num_ids - 1),
            positions_T=positions_T,
            rope_len_T=positions_T + 1,
            query_start_S1=put(firsts_S1, torch.int32),
            kv_len_S=put(starts_S + counts_S, torch.int32),
            page_table_GSP=(table_SP[:, :width].index_select(0, put(slots_S)),) * num_groups,
            store_GT=(page_T * size + positions_T % size,) * num_groups,
            logits_rows_R=put(firsts_S1[1:] - 1),
            attn=self._attn,
            max_query_len=int(counts_S.max()),
            max_kv_len=max_kv_len,
            is_decode=bool((counts_S == 1).all()),
        )

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        most, where = int(lens_R.max()), self._tables.device
        tokens_RK = torch.zeros(len(lens_R), most, dtype=torch.int64, device=where)
        survival_RK = torch.zeros(len(lens_R), most, device=where)
        rows = np.flatnonzero(lens_R > 0)
        slots = tail.slots_R.cpu().numpy()[rows]
        output = self._write(slots.tolist())
        starts = np.array([self._feeds[slot].at for slot in slots.tolist()])
        survival_R = torch.ones(len(rows), device=where)
        for depth in range(most):
            keys_at = torch.from_numpy(starts).to(where)
            states = [tail.sampling.states[slot] for slot in slots.tolist()]
            tokens_R, chance_R = self._draw(output.logits_RV, states, keys_at)
            survival_R = survival_R * chance_R
            index_R = torch.from_numpy(rows).to(where)
            tokens_RK[index_R, depth], survival_RK[index_R, depth] = tokens_R, survival_R
            goes_on = lens_R[rows] > depth + 1
            if not goes_on.any():
                break
            hidden_RD = output.hidden_RD
            if not goes_on.all():
                kept_R = torch.from_numpy(np.flatnonzero(goes_on)).to(where)
                rows, slots, starts = rows[goes_on], slots[goes_on], starts[goes_on]
                tokens_R, survival_R = tokens_R[kept_R], survival_R[kept_R]
                hidden_RD = None if hidden_RD is None else hidden_RD[kept_R]
            batch = self._batch(slots, starts, np.ones(len(slots), np.int64), tokens_R)
            output = self.net.draft_step(batch, hidden_RD)
            starts = starts + 1
        if self.hidden is None:  # the entries of all but the last draft depend on tokens only
            for row in np.flatnonzero(lens_R > 1).tolist():
                drafts = tokens_RK[row, : int(lens_R[row]) - 1].tolist()
                self._feeds[int(tail.slots_R[row])].drafts = drafts
        return DeviceProposals(tokens_RK, survival_RK)

    def _draw(
        self, logits_RV: Tensor, states: Sequence[SlotState | None], positions_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The target's ids of the tokens drafted for ``positions_R``, and the chance of each."""
        ids_V = self.net.target_ids_V
        if ids_V is None:
            logits_RV = logits_RV[:, : self._num_ids]
        heats = [1.0 if s is None or s.is_greedy else max(s.temperature, 1e-3) for s in states]
        scaled_RV = logits_RV
        if any(heat != 1.0 for heat in heats):
            scaled_RV = logits_RV / torch.tensor(heats, device=logits_RV.device)[:, None]
        tokens_R = scaled_RV.argmax(-1)
        noisy = [(n, s.seed) for n, s in enumerate(states) if s is not None and heats[n] > 1.0]
        if noisy:
            rows_N, seeds_N = torch.tensor(noisy, device=logits_RV.device).unbind(1)
            sharp_N = scaled_RV.new_tensor([sharpness(heats[row]) for row, _ in noisy])
            count = logits_RV.shape[1]
            ids_1V = (torch.arange(count, device=rows_N.device) if ids_V is None else ids_V)[None]
            noise_NV = gumbel_noise(draw_keys(seeds_N, positions_R[rows_N]), ids_1V.int())
            tokens_R[rows_N] = (scaled_RV[rows_N] * sharp_N[:, None] + noise_NV).argmax(-1)
        chosen_R1 = scaled_RV.gather(1, tokens_R[:, None])
        chance_R = torch.exp(chosen_R1[:, 0] - torch.logsumexp(scaled_RV, -1))
        return (tokens_R if ids_V is None else ids_V[tokens_R]), chance_R


def sharpness(temperature: float) -> float:
    """What a drafter's logits over the temperature are multiplied with before the target's noise
    joins them: the less the noise decides, the surer the drafter should be. Up to temperature 1 it
    drafts the most probable token."""
    return 2.0 if temperature <= 2.0 else 1.0
