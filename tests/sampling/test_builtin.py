"""The built-in logit processors, one row at a time by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixlm.base.errors import InvalidRequest
from radixlm.engine.logit_processors import BUILTIN_PROCESSORS
from radixlm.sampling.processors import LogitProcessors, RowInfo, ServerFacts

VOCAB = 10
WORDS = {"<think>": [8], "</think>": [9], "so": [1, 2], "<call>": [4], "<two>": [5, 6]}


def load_tokenizer() -> Any:
    return SimpleNamespace(encode=lambda text, special: list(WORDS.get(text, [])))


@pytest.fixture(scope="module")
def known() -> LogitProcessors:
    return LogitProcessors(BUILTIN_PROCESSORS, ServerFacts(VOCAB, (0,), load_tokenizer))


def allowed(
    known: LogitProcessors, name: str, params: dict[str, Any], prompt: list[int], output: list[int]
) -> list[int]:
    """The tokens that may come next."""
    logits = torch.full((1, VOCAB), -1.0)
    made, errors = known.get(name).run(logits, [params], [RowInfo("r", prompt, output)])
    assert not errors
    return torch.nonzero(made[0] > float("-inf")).flatten().tolist()


def test_disallowed_tokens(known: LogitProcessors) -> None:
    assert allowed(known, "disallowed_tokens", {"token_ids": [0, 3]}, [], []) == [
        1, 2, 4, 5, 6, 7, 8, 9,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "output", "banned"),
    [
        ({"ngram_size": 2}, [1, 2, 1], [2]),
        ({"ngram_size": 2}, [1, 2, 1, 3, 1], [2, 3]),
        ({"ngram_size": 2, "window_size": 3}, [1, 2, 1, 3, 1], [3]),
        ({"ngram_size": 2, "whitelist_token_ids": [2]}, [1, 2, 1, 3, 1], [3]),
        ({"ngram_size": 1}, [1, 2, 2], [1, 2]),
        ({"ngram_size": 3}, [1, 2], []),
        ({"ngram_size": 3}, [1, 2, 3, 1, 2], [3]),
        ({"ngram_size": 1}, list(range(VOCAB)), []),  # at least one token must stay allowed
    ],
)
def test_no_repeat_ngram(
    known: LogitProcessors, params: dict[str, Any], output: list[int], banned: list[int]
) -> None:
    left = allowed(known, "no_repeat_ngram", params, [1, 2, 3], output)
    assert sorted(set(range(VOCAB)) - set(left)) == banned


@pytest.mark.parametrize(
    ("prompt", "output", "forced"),
    [
        ([5], [], None),  # no reasoning
        ([5, 8], [6], None),
        ([5, 8], [6, 6], 1),
        ([5, 8], [6, 6, 1], 2),
        ([5, 8], [6, 6, 1, 2], 9),
        ([5, 8], [6, 6, 1, 2, 9], None),
        ([5, 8, 7, 7, 7], [6], None),  # tokens of the prompt do not count
        ([5], [3, 8, 6], None),
        ([5], [3, 8, 6, 6], 1),
        ([5, 8], [9, 6, 6, 6], None),  # the reasoning ended by itself
        ([8, 9, 5], [6, 6, 6], None),  # reasoning in an earlier turn
    ],
)
def test_thinking_budget(
    known: LogitProcessors, prompt: list[int], output: list[int], forced: int | None
) -> None:
    params = {"thinking_budget": 2, "text": "so"}
    left = allowed(known, "thinking_budget", params, prompt, output)
    assert left == ([forced] if forced is not None else list(range(VOCAB)))


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([5], [], []),  # no reasoning
        ([5, 8], [6], [0, 4]),  # EOS, and the marker that is one token
        ([5, 8], [6, 9], []),
        ([5], [8], [0, 4]),
    ],
)
@pytest.mark.parametrize("budget", [{}, {"thinking_budget": 2}])
def test_markers_are_excluded_from_the_reasoning(
    known: LogitProcessors,
    prompt: list[int],
    output: list[int],
    banned: list[int],
    budget: dict[str, int],
) -> None:
    params = {"excluded": ["<call>", "<two>"], **budget}
    known.get("thinking_budget").check(params)
    left = allowed(known, "thinking_budget", params, prompt, output)
    assert sorted(set(range(VOCAB)) - set(left)) == banned


def test_markers_of_several_tokens_exclude_nothing() -> None:
    known = LogitProcessors(BUILTIN_PROCESSORS, ServerFacts(VOCAB, (), load_tokenizer))
    params = {"excluded": ["<two>"]}
    known.get("thinking_budget").check(params)
    assert len(allowed(known, "thinking_budget", params, [5, 8], [6])) == VOCAB


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("disallowed_tokens", None),
        ("disallowed_tokens", {"token_ids": [VOCAB]}),
        ("disallowed_tokens", {"token_ids": list(range(VOCAB))}),
        ("disallowed_tokens", {"token_ids": "1"}),
        ("no_repeat_ngram", {}),
        ("no_repeat_ngram", {"ngram_size": 0}),
        ("no_repeat_ngram", {"ngram_size": 2, "window_size": -1}),
        ("thinking_budget", {}),
        ("thinking_budget", {"thinking_budget": True}),
        ("thinking_budget", {"thinking_budget": 1, "excluded": [3]}),
        ("thinking_budget", {"thinking_budget": 3, "end": 5}),
        ("thinking_budget", {"thinking_budget": 3, "end": "unheard"}),
    ],
)
def test_wrong_options_are_refused(
    known: LogitProcessors, name: str, params: dict[str, Any] | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        known.get(name).check(params)
    assert caught.value.param == "custom_params"
