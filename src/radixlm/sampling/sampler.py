"""Logits -> tokens, for a batch of rows with different parameters.

The steps of a row, each only if the request needs it:
  1. the operator's logit processor      4. grammar mask
  2. penalties                           5. EOS and stops suppressed (min_new_tokens), as long as
  3. logit bias                             the grammar allows anything else
                                         6. greedy: the argmax, lowest id first
  7. temperature                         8. top_k, top_p, min_p (below)   9. the draw: noise.py

Filters look at the probabilities p after the temperature, over the WHOLE vocabulary (joint, not
renormalised one after another, as the reference does): a token stays if
  top_k: p is at least the k-th largest;
  top_p: the tokens before it, most likely first, have at most mass top_p together;
  min_p: p >= min_p * the largest.
Each is a threshold on p, so equally likely tokens are kept or dropped together. The draw is over
the kept tokens (Gumbel noise needs no renormalization).

A sequence may have several rows, which verify drafted tokens (drafts.py): steps 1, 2 and 5 of a row
see its drafts as output, and the first draw that is not the next draft ends the sequence's tokens.
Of several paths of drafts, one gives the tokens.

All arithmetic is by row: a row gives the same token in any batch. On a CPU steps 2 to 9 are one
call into C++ (csrc/cpu/sampler.cpp), or ``cpu.py`` does steps 6 to 9 if that is not built; on a GPU
they are the kernels of ``cuda.py``. All give the same tokens.

Legend: R rows, V vocabulary, W mask words (32 tokens each), F rows of one kind, K kept.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base import env
from radixlm.base.record import Record, field, replace
from radixlm.kernels.cpu import extension
from radixlm.kernels.cpu import sample as native
from radixlm.sampling import cpu, cuda
from radixlm.sampling.drafts import Accepted, DraftRows
from radixlm.sampling.logprobs import (
    LogprobRequest,
    Logprobs,
    Pairs,
    entropies,
    gather_logprobs,
)
from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.processors import RowInfo
from radixlm.sampling.table import (
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingTable,
)

_NEG_INF = float("-inf")
SMALL_VOCAB = 4096


class SampleResult(Record):
    """``tokens_R`` int64 on the device. ``logprobs`` only if asked for. ``is_bad_R`` (bool, on the
    device, only if asked for) marks rows whose logits hold a NaN, or allow no token at all.
    ``errors``: why the logit processor of a row failed. With drafts, ``accepted`` tells how many
    tokens each sequence produced: those of the first rows of its chosen path."""

    tokens_R: Tensor
    logprobs: Logprobs | cuda.DeviceLogprobs | None = None
    is_bad_R: Tensor | None = None
    errors: dict[int, str] = field(default_factory=dict)
    accepted: Accepted | None = None


class Sampler:
    """Samples tokens with the parameters of a SamplingTable.

    Log-probabilities are of the logits after steps 1 to 5 and the temperature, as SGLang's; without
    the temperature if RADIXLM_RETURN_ORIGINAL_LOGPROB is set.
    """

    def __init__(
        self, table: SamplingTable, detect_bad: bool = False, defers: bool = False
    ) -> None:
        """``detect_bad``: mark rows that cannot be drawn from. ``defers``: log-probabilities may
        be returned as ``DeviceLogprobs`` whose copies are not finished."""
        self._table, self._defers = table, defers
        self._scales_logprobs = not env.RETURN_ORIGINAL_LOGPROB.get()
        self._detect_bad = detect_bad
        self._is_cpu = table.device.type == "cpu"
        self._is_native = self._is_cpu and extension.available
        kernels = cuda.load_kernels(table.device)
        self._gpu = None if kernels is None else cuda.GpuSampler(table, kernels)
        self._token_ids_1V = torch.arange(table.vocab_size, dtype=torch.int32, device=table.device)[
            None
        ]

    def sample(
        self,
        logits_RV: Tensor,
        slots: Sequence[int],
        positions_R: Tensor | Sequence[int],
        mask_RW: Tensor | None = None,
        wanted: Sequence[LogprobRequest | None] | None = None,
        drafts: DraftRows | None = None,
    ) -> SampleResult:
        """Draw one token a row, and count it for the penalties if it stands. ``logits_RV`` (fp32)
        may be overwritten.

        positions_R: int64, the position in the sequence that each new token will have (its prompt
        tokens, outputs and drafts before it); with the seed, it keys the draw. mask_RW: int32
        bitmask, bit i of word w allows token 32 w + i. wanted[r]: log-probabilities for the row,
        None for none. drafts: which rows verify the drafts of one sequence; else each row is one's.
        """
        positions_R = torch.as_tensor(positions_R, dtype=torch.int64).to(logits_RV.device)
        is_plain = mask_RW is None and not self._changes(slots)
        errors: dict[int, str] = {}
        if not is_plain:
            errors = self._run_processors(logits_RV, slots, drafts)
        gpu = self._gpu
        if gpu is not None and gpu.takes(logits_RV):
            tokens_R, bad_R, rows_RA = gpu.draw(logits_RV, slots, positions_R, mask_RW, drafts)
            is_bad_R = bad_R if self._detect_bad else None
        else:
            gpu = rows_RA = None
            if self._is_native and native.takes(logits_RV):
                tokens_R = self._sample_native(logits_RV, slots, positions_R, mask_RW, drafts)
                is_bad_R = find_bad(logits_RV) if self._detect_bad else None
            else:
                if not is_plain:
                    self._process(logits_RV, slots, positions_R, mask_RW, drafts)
                is_bad_R = find_bad(logits_RV) if self._detect_bad else None
                tokens_R = self._choose(logits_RV, slots, positions_R)
        accepted = None if drafts is None else drafts.accept(tokens_R)
        kept_R = None if accepted is None else accepted.kept_R
        if gpu is not None:
            gpu.record(rows_RA, tokens_R, kept_R)
        self._record(slots, tokens_R, kept_R, has_counts=gpu is None)
        logprobs: Logprobs | cuda.DeviceLogprobs | None = None
        if wanted is not None:
            if kept_R is not None and self._is_cpu:  # only those that stand
                wanted = [
                    one if k else None for one, k in zip(wanted, kept_R.tolist(), strict=True)
                ]
            kept = self._kept(logits_RV, slots, tokens_R, wanted)
            scaled_RV = self._scaled(logits_RV, slots)
            entropy = entropies(scaled_RV, wanted)
            gpu = None if kept or entropy else gpu
            logprobs = self._logprobs(scaled_RV, tokens_R, wanted, gpu)
            if kept or entropy:
                logprobs = replace(logprobs, kept=kept, entropy=entropy)
        return SampleResult(tokens_R, logprobs, is_bad_R, errors, accepted)

    def _scaled(self, logits_RV: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits after the temperature, which is 1 of greedy rows."""
        if not self._scales_logprobs or self._table.all_unscaled(slots):
            return logits_RV
        return logits_RV / self._table.parameters(slots)[0][:, TEMPERATURE, None]

    def _kept(
        self,
        logits_RV: Tensor,
        slots: Sequence[int],
        tokens_R: Tensor,
        wanted: Sequence[LogprobRequest | None],
    ) -> dict[int, tuple[float, list[int]]]:
        """``Logprobs.kept`` of the rows that want it."""
        found = {}
        for row in (n for n, one in enumerate(wanted) if one is not None and one.kept):
            token = int(tokens_R[row])
            if self._table.state(slots[row]).is_greedy:
                found[row] = 0.0, [token]
                continue
            floats_13, ints_12 = self._table.parameters(slots[row : row + 1])
            scaled_1V = logits_RV[row : row + 1].float() / floats_13[:, TEMPERATURE, None]
            probs_1V = torch.softmax(scaled_1V, dim=-1)
            lowest_1 = threshold(probs_1V, floats_13, ints_12[:, TOP_K])
            is_kept_V = probs_1V[0] >= lowest_1
            is_kept_V[token] = True  # kernels round otherwise at the threshold
            ids_K = is_kept_V.nonzero()[:, 0]
            probs_K, order_K = probs_1V[0, ids_K].sort(descending=True, stable=True)
            logprob = float((probs_1V[0, token] / probs_K.sum()).log())
            found[row] = logprob, ids_K[order_K].tolist()
        return found

    def _logprobs(
        self,
        scaled_RV: Tensor,
        tokens_R: Tensor,
        wanted: Sequence[LogprobRequest | None],
        gpu: cuda.GpuSampler | None,
    ) -> Logprobs | cuda.DeviceLogprobs:
        """Log-probabilities from ``gpu``, or computed with torch."""
        if gpu is None:
            return _logprobs(scaled_RV, tokens_R, wanted)
        found = gpu.logprobs(scaled_RV, tokens_R, wanted)
        return found.begin_read() if self._defers else found.read()

    def _record(
        self, slots: Sequence[int], tokens_R: Tensor, kept_R: Tensor | None, has_counts: bool
    ) -> None:
        """Count the kept tokens (None: all) for penalties, if ``has_counts``, and keep those of
        rows with a logit processor."""
        index_R = np.asarray(slots, np.intp)
        table, marked_S = self._table, self._table.has_processor_S
        if has_counts:
            marked_S = marked_S | table.has_penalties_S
        if not marked_S[index_R].any():
            return
        if kept_R is not None:
            kept = kept_R.nonzero()[:, 0]
            tokens_R, index_R = tokens_R[kept], index_R[kept.cpu().numpy()]
        if has_counts:
            table.penalties.record(index_R.tolist(), tokens_R)
        for row in np.flatnonzero(table.has_processor_S[index_R]).tolist():
            table.state(int(index_R[row])).output_ids.append(int(tokens_R[row]))

    def _changes(self, slots: Sequence[int]) -> bool:
        return not self._table.is_plain_S[np.asarray(slots, np.intp)].all()

    def _rows_of(self, is_marked_S: NDArray[np.bool_], slots: Sequence[int]) -> list[int]:
        found: list[int] = np.flatnonzero(is_marked_S[np.asarray(slots, np.intp)]).tolist()
        return found

    def _process(
        self,
        logits_RV: Tensor,
        slots: Sequence[int],
        positions_R: Tensor,
        mask_RW: Tensor | None,
        drafts: DraftRows | None,
    ) -> None:
        """Steps 2 to 5, in place."""
        self._table.penalties.apply_(logits_RV, slots, drafts)
        for row, slot in enumerate(slots):
            state = self._table.state(slot)
            if state.bias_ids is not None and state.bias_values is not None:
                logits_RV[row].index_add_(0, state.bias_ids, state.bias_values)
        if mask_RW is not None:
            apply_mask_(logits_RV, mask_RW)
        for row, slot in enumerate(slots):
            state = self._table.state(slot)
            if state.suppressed_ids is not None:
                is_early = positions_R[row] < state.suppressed_until
                _suppress_(logits_RV[row], state.suppressed_ids, is_early)

    def _run_processors(
        self, logits_RV: Tensor, slots: Sequence[int], drafts: DraftRows | None
    ) -> dict[int, str]:
        """Step 1, in place, one call for all rows of a processor; why rows failed. The second
        processors of rows come after all the first ones."""
        groups: dict[tuple[int, int], list[int]] = {}
        failed: dict[int, str] = {}
        for row in self._rows_of(self._table.has_processor_S, slots):
            for place, (processor, _) in enumerate(self._table.state(slots[row]).processors):
                groups.setdefault((place, id(processor)), []).append(row)
        for (place, _), rows in sorted(groups.items()):
            states = [self._table.state(slots[row]) for row in rows]
            processor = states[0].processors[place][0]
            before = [() if drafts is None else drafts.before(row) for row in rows]
            infos = [
                RowInfo(s.rid, s.prompt_ids, [*s.output_ids, *tokens])
                for tokens, s in zip(before, states, strict=True)
            ]
            params = [s.processors[place][1] for s in states]
            logits_RV[rows], errors = processor.run(logits_RV[rows], params, infos)
            failed = {rows[i]: message for i, message in errors.items()} | failed
        return failed

    def _choose(self, logits_RV: Tensor, slots: Sequence[int], positions_R: Tensor) -> Tensor:
        """Steps 6 to 9: the tokens."""
        kinds: dict[str, list[int]] = {}
        for row, slot in enumerate(slots):
            state = self._table.state(slot)
            kind = "greedy" if state.is_greedy else "filtered" if state.is_filtered else "free"
            kinds.setdefault(kind, []).append(row)
        greedy = kinds.pop("greedy", [])
        if not kinds:
            return logits_RV.argmax(dim=-1)
        if self._is_cpu:
            return self._choose_cpu(logits_RV, slots, positions_R)
        tokens_R = torch.empty_like(positions_R)
        if greedy:
            tokens_R[greedy] = logits_RV[greedy].argmax(dim=-1)
        floats_R3, ints_R2 = self._table.parameters(slots)
        keys_R = draw_keys(ints_R2[:, SEED], positions_R)
        for kind, rows in kinds.items():
            draw = self._draw_free if kind == "free" else self._draw_filtered
            scaled_FV = logits_RV[rows].div_(floats_R3[rows, TEMPERATURE, None])
            tokens_R[rows] = draw(scaled_FV, keys_R[rows], floats_R3[rows], ints_R2[rows])
        return tokens_R

    def _choose_cpu(self, logits_RV: Tensor, slots: Sequence[int], positions_R: Tensor) -> Tensor:
        states = [self._table.state(slot) for slot in slots]
        keys = cpu.draw_keys([state.seed for state in states], positions_R.tolist()).tolist()
        tokens = []
        for logits_V, state, key in zip(logits_RV.numpy(), states, keys, strict=True):
            if state.is_greedy:
                tokens.append(int(logits_V.argmax()))
            else:
                limits = (state.temperature, state.top_k, state.top_p, state.min_p)
                tokens.append(cpu.draw(logits_V, key, *limits))
        return torch.tensor(tokens, dtype=torch.int64)

    def _sample_native(
        self,
        logits_RV: Tensor,
        slots: Sequence[int],
        positions_R: Tensor,
        mask_RW: Tensor | None,
        drafts: DraftRows | None,
    ) -> Tensor:
        """Steps 2 to 9 in C++, in place."""
        table, index_R = self._table, np.asarray(slots, np.intp)
        is_small = logits_RV.shape[1] <= SMALL_VOCAB  # torch is quicker there
        if is_small and mask_RW is None and self._is_all_greedy(index_R):
            return logits_RV.argmax(dim=-1)
        rows, positions = table.rows_S[index_R], positions_R.numpy()
        rows["key"] = cpu.draw_keys(table.seeds_S[index_R], positions)
        rows["num_suppressed"][positions >= table.suppressed_until_S[index_R]] = 0
        with_penalties = np.flatnonzero(table.has_penalties_S[index_R]).tolist()
        if drafts is not None and with_penalties:  # C++ knows only what was counted
            table.penalties.apply_(logits_RV, slots, drafts)
            with_penalties = []
        for row in with_penalties:
            penalties = table.penalties.addresses(slots[row])
            if penalties is not None:
                rows["seen"][row], rows["counts"][row], rows["penalties"][row] = penalties
        if mask_RW is not None:
            mask_RW = mask_RW.to(torch.int32).contiguous()
            rows["mask"] = mask_RW.data_ptr() + np.arange(len(rows)) * (4 * mask_RW.shape[1])
        return native.sample(logits_RV, rows)

    def plain_rows(
        self, slots_R: NDArray[np.int64], positions_PR: NDArray[np.int64]
    ) -> NDArray[Any]:
        """How C++ samples rows that no step before the draw changes, at these positions:
        ``kernels.cpu.sample.ROW`` [P, R]."""
        table = self._table
        rows_PR = np.tile(table.rows_S[slots_R], (len(positions_PR), 1))
        rows_PR["key"] = cpu.draw_keys(table.seeds_S[slots_R], positions_PR)
        return rows_PR

    def _is_all_greedy(self, index_R: NDArray[np.intp]) -> bool:
        return bool((self._table.is_plain_S & self._table.is_greedy_S)[index_R].all())

    def _draw_free(
        self, scaled_FV: Tensor, keys_F: Tensor, floats_F3: Tensor, ints_F2: Tensor
    ) -> Tensor:
        """Rows without top_k and top_p."""
        lowest_F = scaled_FV.amax(dim=-1) + floats_F3[:, MIN_P].log()
        return self._draw(scaled_FV, keys_F, scaled_FV < lowest_F[:, None])

    def _draw_filtered(
        self, scaled_FV: Tensor, keys_F: Tensor, floats_F3: Tensor, ints_F2: Tensor
    ) -> Tensor:
        """Rows with top_k or top_p."""
        probs_FV = torch.softmax(scaled_FV, dim=-1)
        lowest_F = threshold(probs_FV, floats_F3, ints_F2[:, TOP_K])
        return self._draw(scaled_FV, keys_F, probs_FV < lowest_F[:, None])

    def _draw(self, scaled_FV: Tensor, keys_F: Tensor, is_out_FV: Tensor) -> Tensor:
        """The token with the highest logit plus noise of those that are not filtered out."""
        scores_FV = gumbel_noise(keys_F, self._token_ids_1V).add_(scaled_FV)
        return scores_FV.masked_fill_(is_out_FV, _NEG_INF).argmax(dim=-1)


def find_bad(logits_RV: Tensor) -> Tensor:
    """bool [R]: rows that hold a NaN, or allow no token at all."""
    highest_R = logits_RV.amax(dim=-1)  # a NaN wins
    return highest_R.isnan() | (highest_R == _NEG_INF)


def threshold(probs_FV: Tensor, floats_F3: Tensor, top_k_F: Tensor) -> Tensor:
    """The lowest probability that top_k, top_p and min_p leave, [F]."""
    sorted_FV = probs_FV.sort(dim=-1, descending=True).values
    wide_FV = sorted_FV.double()  # sums of many small numbers
    before_FV = wide_FV.cumsum(dim=-1).sub_(wide_FV)
    top_p_F1 = floats_F3[:, TOP_P, None].double()
    is_kept_FV = (before_FV <= top_p_F1) | (top_p_F1 >= 1.0)
    num_kept_F = torch.minimum(is_kept_FV.sum(dim=-1), top_k_F).clamp_(min=1)
    lowest_F = sorted_FV.gather(1, num_kept_F[:, None] - 1).squeeze(1)
    return torch.maximum(lowest_F, sorted_FV[:, 0] * floats_F3[:, MIN_P])


def _suppress_(logits_V: Tensor, ids_K: Tensor, is_early: Tensor) -> None:
    """Forbid ``ids_K`` if ``is_early``, unless nothing else is allowed."""
    before_K = logits_V[ids_K]
    logits_V[ids_K] = _NEG_INF
    is_wanted = is_early & (logits_V.amax() > _NEG_INF)
    logits_V[ids_K] = torch.where(is_wanted, _NEG_INF, before_K)


def apply_mask_(logits_RV: Tensor, mask_RW: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf. mask_RW: int32, W = ceil(V / 32) or more."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32:
        cpu.apply_mask_(logits_RV.numpy(), mask_RW.numpy())
        return
    is_allowed_RV = unpack_mask(mask_RW.to(logits_RV.device, non_blocking=True))
    logits_RV.masked_fill_(~is_allowed_RV[:, : logits_RV.shape[1]], _NEG_INF)


def unpack_mask(mask_RW: Tensor) -> Tensor:
    """int32 words -> bool [R, 32 W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask_RW.device)
    return ((mask_RW[:, :, None] >> shifts) & 1).flatten(1).bool()


def _logprobs(
    logits_RV: Tensor, tokens_R: Tensor, wanted: Sequence[LogprobRequest | None]
) -> Logprobs:
    """Compute only the rows that request some; the others get 0.0 and empty lists."""
    rows = [row for row, request in enumerate(wanted) if request is not None]
    requests = [request for request in wanted if request is not None]
    is_all = len(rows) == len(wanted)
    selected = logits_RV if is_all else logits_RV[rows]
    tokens = tokens_R if is_all else tokens_R[rows]
    found = gather_logprobs(torch.log_softmax(selected.float(), dim=-1), tokens, requests)
    if is_all:
        return found
    chosen = [0.0] * len(wanted)
    top: list[Pairs] = [([], [])] * len(wanted)
    of_token_ids: list[Pairs] = [([], [])] * len(wanted)
    for i, row in enumerate(rows):
        chosen[row], top[row] = found.chosen[i], found.top[i]
        of_token_ids[row] = found.of_token_ids[i]
    return Logprobs(chosen, top, of_token_ids)
