"""Logit processors through a whole engine: batched, with grammars, after retractions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import radixlm
from radixlm.base.errors import ConfigError, EngineError, InvalidRequest
from tests.fakes.tiny_checkpoint import cached_tiny


class Evens:
    """Odd tokens only with {"odd": true}, else even ones. {"raise": k}: fails at k tokens."""

    def check(self, params: dict[str, Any] | None) -> None:
        if params is not None and "refuse" in params:
            raise ValueError("not today")

    def __call__(self, logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        for row, given, info in zip(logits, params, rows, strict=True):
            given = given or {}
            if given.get("raise") == len(info.output_ids):
                raise RuntimeError("broken")
            row[0 if given.get("odd") else 1 :: 2] = float("-inf")
        return logits


@pytest.fixture(scope="module")
def folder() -> str:
    return str(cached_tiny("Qwen3ForCausalLM"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[radixlm.Engine]:
    module = ModuleType("operators_processors")
    module.Evens = Evens  # type: ignore[attr-defined]
    sys.modules["operators_processors"] = module
    with radixlm.Engine(
        model_path=folder,
        cpu_threads=1,
        log_level="error",
        max_total_tokens=128,
        logit_processor=("evens=operators_processors:Evens",),
    ) as made:
        yield made


def ask(
    engine: radixlm.Engine, params: list[dict[str, Any] | None], max_new_tokens: int = 10
) -> list[Any]:
    """One request for each of ``params``, together."""
    sampling = [
        {
            "max_new_tokens": max_new_tokens,
            "temperature": 1.2,
            "ignore_eos": True,
            "sampling_seed": i,
        }
        | ({"custom_params": given} if given is not None else {})
        for i, given in enumerate(params)
    ]
    answers: list[Any] = engine.generate(
        ["one"] * len(params), sampling, custom_logit_processor=["evens"] * len(params)
    )
    return answers


def test_rows_of_a_batch_have_their_own_options(engine: radixlm.Engine) -> None:
    answers = ask(engine, [None, {"odd": True}, {"odd": False}, {"odd": True}])
    for answer, rest in zip(answers, (0, 1, 0, 1), strict=True):
        assert {i % 2 for i in answer["output_ids"]} == {rest}
        assert len(answer["output_ids"]) == 10


def test_retraction_changes_nothing(engine: radixlm.Engine) -> None:
    """The cache holds 128 tokens: twelve requests of 60 tokens cannot all stay."""
    params: list[dict[str, Any] | None] = [{"odd": i % 2 == 1} for i in range(12)]
    together = ask(engine, params, 60)
    info = engine.get_server_info()["internal_states"][0]
    assert info["num_retracted_reqs"] > 0
    again = ask(engine, params, 60)
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in again]
    for i, answer in enumerate(together):
        assert {t % 2 for t in answer["output_ids"]} == {i % 2}


def test_processor_and_grammar_and_samples(engine: radixlm.Engine) -> None:
    params = {"max_new_tokens": 30, "regex": "[0-9a-z]{6}", "n": 3, "temperature": 1.0}
    answers = engine.generate("x", params, custom_logit_processor="evens", return_logprob=True)
    assert len(answers) == 3
    for answer in answers:
        ids = answer["output_ids"]
        assert len(ids) == len(answer["meta_info"]["output_token_logprobs"])
        assert all(i % 2 == 0 for i in ids)


def test_an_exception_fails_its_request_alone(engine: radixlm.Engine) -> None:
    with pytest.raises(EngineError, match=r"'evens': RuntimeError: broken"):
        ask(engine, [{}, {"raise": 3}, {"odd": True}])
    (whole,) = ask(engine, [{}])
    assert len(whole["output_ids"]) == 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_logit_processor": "nobody"}, r"nobody.*known: disallowed_tokens, evens"),
        ({"custom_logit_processor": '{"callable": "80049526"}'}, "--logit-processor"),
        ({"custom_logit_processor": {"callable": "80"}}, "--logit-processor"),
        ({"custom_logit_processor": "evens", "logit_processor": "x"}, "differ"),
    ],
)
def test_refused_by_intake(engine: radixlm.Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.generate("x", {"max_new_tokens": 2}, **fields)


def test_refused_by_the_processor(engine: radixlm.Engine) -> None:
    params = {"max_new_tokens": 2, "custom_params": {"refuse": 1}}
    with pytest.raises(InvalidRequest, match="not today"):
        engine.generate("x", params, custom_logit_processor="evens")
    assert engine.generate("x", {"max_new_tokens": 2}, custom_logit_processor="evens")


def test_a_missing_processor_stops_the_start(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--logit-processor a=no_such_module:X"):
        radixlm.Engine(
            model_path=folder, log_level="error", logit_processor=("a=no_such_module:X",)
        )
