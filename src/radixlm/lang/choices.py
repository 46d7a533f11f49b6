"""How ``select`` chooses: by the log-probabilities of the choices' tokens.

Each entry of ``input_token_logprobs`` is [log-probability, token id, text] for each token of a
choice. Methods and the keys of ``meta_info`` are those of SGLang (``sglang.lang.choices``).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TokenLogprobs = list[Any]


@dataclass
class ChoicesDecision:
    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """Called with what a model says of the choices; a ChoicesDecision."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return False

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[TokenLogprobs],
        output_token_logprobs: list[TokenLogprobs],
        unconditional_token_logprobs: list[TokenLogprobs] | None = None,
    ) -> ChoicesDecision:
        meta_info: dict[str, Any] = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
        }
        best = self._best(meta_info, unconditional_token_logprobs)
        return ChoicesDecision(choices[best], meta_info)

    @abstractmethod
    def _best(self, meta: dict[str, Any], unconditional: list[TokenLogprobs] | None) -> int:
        """The index of the chosen one; may add to ``meta``."""


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The largest mean log-probability of a token."""

    def _best(self, meta: dict[str, Any], unconditional: list[TokenLogprobs] | None) -> int:
        return _largest(meta["normalized_prompt_logprobs"])


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token the likeliest of those left; a shorter choice goes on with its mean."""

    def _best(self, meta: dict[str, Any], unconditional: list[TokenLogprobs] | None) -> int:
        rows = [_logprobs(tokens) for tokens in meta["input_token_logprobs"]]
        width = max(map(len, rows))
        table = [row + [sum(row) / len(row)] * (width - len(row)) for row in rows]
        left = list(range(len(rows)))
        for place in range(width):
            best = max(table[row][place] for row in left)
            left = [row for row in left if table[row][place] == best]
        meta["greedy_logprob_matrix"] = table
        return left[0]


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The largest mean gain over the choice without its prompt. The first token of a text without a
    prompt has no log-probability: it counts as 0."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def _best(self, meta: dict[str, Any], unconditional: list[TokenLogprobs] | None) -> int:
        if unconditional is None:
            raise ValueError("unconditional_token_logprobs are needed by this method")
        pairs = zip(meta["input_token_logprobs"], unconditional, strict=True)
        gains = ([a - b for a, b in zip(*map(_logprobs, pair), strict=True)] for pair in pairs)
        scores = [sum(gain) / len(gain) for gain in gains]
        meta["unconditional_token_logprobs"] = unconditional
        meta["normalized_unconditional_prompt_logprobs"] = scores
        return _largest(scores)


def _logprobs(tokens: TokenLogprobs) -> list[float]:
    return [token[0] or 0.0 for token in tokens]


def _largest(scores: Sequence[float]) -> int:
    """The index of the first of the largest."""
    return max(range(len(scores)), key=scores.__getitem__)


def mean_logprob(tokens: TokenLogprobs) -> float:
    """The mean over tokens that have one; 0 for none."""
    known = [token[0] for token in tokens if token[0] is not None]
    return sum(known) / len(known) if known else 0.0


def drawn(decision: ChoicesDecision, choices: Sequence[str], temperature: float) -> ChoicesDecision:
    """A choice drawn with probability exp(score / temperature), up to a factor, by ``random``; the
    given decision at a temperature of about 0."""
    meta = decision.meta_info or {}
    if temperature <= 1e-5:
        return decision
    scores = meta.get("normalized_unconditional_prompt_logprobs")
    scores = scores or meta["normalized_prompt_logprobs"]
    keys = [s / temperature - math.log(-math.log(random.random() or 1e-300)) for s in scores]
    return ChoicesDecision(choices[_largest(keys)], meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
