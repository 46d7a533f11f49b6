"""The logit processor of Whisper transcripts: which tokens are allowed where, timestamps included.

Options (``custom_params``): ``suppress``: ids that are never chosen. ``first_suppress``: ids that
are not chosen first. ``times_from``: ids from here on are timestamps, which come in pairs around
each segment and never decrease; ``end``: the id that ends a text, lower ids are text;
``latest_first``: the first timestamp is at max_first so many steps after the earliest.

Legend: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.sampling.builtin import Params, read_int, token_ids
from radixlm.sampling.processors import RowInfo, ServerFacts

_NEG_INF = float("-inf")


class WhisperTimestamps:
    """The rules under which Whisper was trained to write."""

    def bind(self, facts: ServerFacts) -> None:
        """See LogitProcessor."""
        self._vocab_size = facts.vocab_size

    def check(self, params: Params) -> None:
        """See LogitProcessor."""
        for name in ("suppress", "first_suppress"):
            token_ids(params, name, self._vocab_size)
        if (params or {}).get("times_from") is not None:
            read_int(params, "times_from", 1)
            read_int(params, "end", 0)
        if (params or {}).get("latest_first") is not None:
            read_int(params, "latest_first", 0)

    def __call__(
        self, logits_RV: Tensor, params: Sequence[Params], rows: Sequence[RowInfo]
    ) -> Tensor:
        for logits_V, options, row in zip(logits_RV, params, rows, strict=True):
            options = options or {}
            logits_V[list(options.get("suppress", ()))] = _NEG_INF
            if not row.output_ids:
                logits_V[list(options.get("first_suppress", ()))] = _NEG_INF
            if options.get("times_from") is not None:
                max_first = options.get("latest_first")
                _apply_timestamp_rules(
                    logits_V, row.output_ids, options["times_from"], options["end"], max_first
                )
        return logits_RV


def _apply_timestamp_rules(
    logits_V: Tensor, ids: Sequence[int], times: int, end: int, max_first: int | None
) -> None:
    """Forbid tokens that may not come next. ``times`` is the first timestamp; the token before it
    (no timestamps) is never chosen."""
    logits_V[times - 1] = _NEG_INF
    is_mark = [token >= times for token in ids[-2:]]
    was_mark = bool(is_mark) and is_mark[-1]
    closes = len(is_mark) < 2 or is_mark[-2]
    if was_mark and closes:
        logits_V[times:] = _NEG_INF
    elif was_mark:
        logits_V[:end] = _NEG_INF
    last = next((token for token in reversed(ids) if token >= times), None)
    if last is not None:
        logits_V[times : last + (not (was_mark and not closes))] = _NEG_INF
    if not ids:
        logits_V[:times] = _NEG_INF
        if max_first is not None:
            logits_V[times + max_first + 1 :] = _NEG_INF
    scores = torch.log_softmax(logits_V, -1)
    if torch.logsumexp(scores[times:], -1) > scores[:times].max():
        logits_V[:times] = _NEG_INF
