"""Log-probabilities of prompt and output tokens, from rows of logits.

Every number comes from ``log_softmax`` of its own row, never from a reduction over the batch.
Values are at least LOWEST, because JSON has no -inf.

Legend: R rows, V vocabulary, K most likely tokens, N rows with requested token ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.base.record import Record, field

LOWEST = torch.finfo(torch.float32).min
Pairs = tuple[list[float], list[int]]


class LogprobRequest(Record):
    """Log-probabilities besides that of a row's own token: of the ``top`` most likely tokens and of
    ``token_ids``. ``kept``: also what the row's token was drawn from; ``entropy``: also that of the
    row."""

    top: int = 0
    token_ids: tuple[int, ...] = ()
    kept: bool = False
    entropy: bool = False


class Logprobs(Record):
    """Log-probabilities of R rows, on the host.

    ``chosen[r]`` of the row's token; ``top[r]`` is (values, ids), best first;
    ``of_token_ids[r]`` is (values, ids) in the requested order; both are empty if not requested.
    ``kept`` has the rows that want it: the log-probability of the row's token among those that it
    was drawn from, and their ids, most likely first. ``entropy`` has those that want that, in nats.
    """

    chosen: list[float]
    top: list[Pairs]
    of_token_ids: list[Pairs]
    kept: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    entropy: dict[int, float] = field(default_factory=dict)


def compute_logprobs(
    logits_RV: Tensor, tokens_R: Tensor, wanted: Sequence[LogprobRequest]
) -> Logprobs:
    """Log-probabilities of ``tokens_R`` (int64) and those that each row requests, computed in
    fp32."""
    return gather_logprobs(torch.log_softmax(logits_RV.float(), dim=-1), tokens_R, wanted)


def gather_logprobs(
    logprobs_RV: Tensor, tokens_R: Tensor, wanted: Sequence[LogprobRequest]
) -> Logprobs:
    """``compute_logprobs`` of a log-softmax."""
    chosen_R = logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1).clamp_(min=LOWEST)
    return Logprobs(
        chosen=chosen_R.tolist(),
        top=_top(logprobs_RV, [request.top for request in wanted]),
        of_token_ids=[
            _of_token_ids(row, request.token_ids)
            for row, request in zip(logprobs_RV, wanted, strict=True)
        ],
    )


def entropies(logits_RV: Tensor, wanted: Sequence[LogprobRequest | None]) -> dict[int, float]:
    """``Logprobs.entropy`` of the rows that want it, computed in fp32."""
    rows = [row for row, one in enumerate(wanted) if one is not None and one.entropy]
    if not rows:
        return {}
    probs_RV = torch.softmax(logits_RV[rows].float(), dim=-1)
    return dict(zip(rows, torch.special.entr(probs_RV).sum(-1).tolist(), strict=True))


def _top(logprobs_RV: Tensor, nums: list[int]) -> list[Pairs]:
    num_max = min(max(nums, default=0), logprobs_RV.shape[1])
    if num_max == 0:
        return [([], []) for _ in nums]
    values_RK, ids_RK = torch.topk(logprobs_RV, num_max, dim=-1)
    # equal values: the lower id first (ids ascending, then a stable sort by value)
    ids_RK, by_id = ids_RK.sort(dim=-1)
    values_RK, by_value = values_RK.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    values = values_RK.clamp_(min=LOWEST).tolist()
    ids = ids_RK.gather(1, by_value).tolist()
    return [(row[:num], row_ids[:num]) for row, row_ids, num in zip(values, ids, nums, strict=True)]


def _of_token_ids(logprobs_V: Tensor, token_ids: tuple[int, ...]) -> Pairs:
    if not token_ids:
        return [], []
    index = torch.tensor(token_ids, dtype=torch.int64, device=logprobs_V.device)
    return logprobs_V[index].clamp_(min=LOWEST).tolist(), list(token_ids)
