"""Only installed processors can be named, and an error in one fails only its own request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.config.grammar import GrammarConfig
from radixlm.engine.logit_processors import BUILTIN_PROCESSORS, processor_targets
from radixlm.sampling.drafts import DraftRows
from radixlm.sampling.processors import LogitProcessors, NamedProcessor, RowInfo, ServerFacts
from radixlm.sampling.sampler import Sampler
from radixlm.sampling.table import SamplingTable
from radixlm.wire.sampling_params import SamplingParams

VOCAB = 12
ROW = RowInfo("r", [1, 2], [3])


class Toy:
    """Forbids all tokens but the one that its request names."""

    def bind(self, facts: ServerFacts) -> None:
        self.facts = facts

    def check(self, params: dict[str, Any] | None) -> None:
        if not params or "only" not in params:
            raise KeyError("only")

    def __call__(self, logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        for row, given in zip(logits, params, strict=True):
            row.fill_(float("-inf"))
            row[given["only"]] = 0.0  # in place, before a later row raises
        return logits


def processors(monkeypatch: pytest.MonkeyPatch, **targets: str) -> LogitProcessors:
    module = ModuleType("toy_processors")
    module.Toy, module.value = Toy, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_processors", module)
    return LogitProcessors(targets, ServerFacts(VOCAB))


def test_processors_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = processors(monkeypatch, toy="toy_processors:Toy")
    assert found.get("toy").name == "toy" and found and not LogitProcessors()
    with pytest.raises(InvalidRequest, match=r"'other' is not known.*toy") as caught:
        found.get("other")
    assert caught.value.param == "custom_logit_processor"
    for bad in ("", "b", "no_such:X", "toy_processors:No", "toy_processors:value"):
        with pytest.raises(ConfigError, match="--logit-processor"):
            processors(monkeypatch, toy=bad)


def test_a_processor_of_the_operator_overrides_a_builtin_one() -> None:
    config = GrammarConfig(logit_processor=("mine=a.b:C", "thinking_budget=a.b:D"))
    targets = processor_targets(config)
    assert targets["mine"] == "a.b:C" and targets["thinking_budget"] == "a.b:D"
    assert set(BUILTIN_PROCESSORS) < set(targets)
    LogitProcessors(BUILTIN_PROCESSORS, ServerFacts(VOCAB))


def test_params_are_checked_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = processors(monkeypatch, toy="toy_processors:Toy").get("toy")
    toy.check({"only": 1})
    with pytest.raises(InvalidRequest, match=r"'toy'.*only") as caught:
        toy.check(None)
    assert caught.value.param == "custom_params"


@pytest.mark.parametrize(
    "bad",
    [
        lambda logits, params, rows: 1 / 0,
        lambda logits, params, rows: logits[:, :-1],
        lambda logits, params, rows: None,
        lambda logits, params, rows: logits.fill_(float("nan")),
    ],
)
def test_a_failing_row_fails_alone(bad: Callable[..., Any]) -> None:
    def call(logits: torch.Tensor, params: Any, rows: Any) -> Any:
        logits += 1
        return bad(logits, params, rows) if "bad" in params else logits

    logits = torch.zeros(3, VOCAB)
    made, errors = NamedProcessor("x", call).run(logits, ["ok", "bad", "ok"], [ROW] * 3)  # type: ignore[arg-type,list-item]
    assert list(errors) == [1] and "'x'" in errors[1]
    assert made[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_sampler_calls_a_processor_once_for_all_its_rows() -> None:
    calls: list[list[RowInfo]] = []

    def call(logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        calls.append(list(rows))
        for row, given in zip(logits, params, strict=True):
            row[given["token"]] += 100
        return logits

    table = SamplingTable(4, VOCAB)
    named = NamedProcessor("x", call)
    for slot in range(3):
        params = SamplingParams(temperature=0.0, custom_params={"token": slot + 3})
        chosen = named if slot != 1 else None
        table.set(slot, params, [slot], [9], processor=chosen, rid=f"r{slot}")
    sampler = Sampler(table)
    first = sampler.sample(torch.zeros(3, VOCAB), [0, 1, 2], [2, 2, 2])
    assert first.tokens_R.tolist() == [3, 0, 5] and not first.errors
    assert [(r.rid, list(r.prompt_ids), r.output_ids) for r in calls[0]] == [
        ("r0", [0], [9]),
        ("r2", [2], [9]),
    ]
    # three rows of one slot: each has its own history, and the draws after a wrong draft are lost
    drafts = DraftRows.of([[3, 7]])
    rows = sampler.sample(torch.zeros(3, VOCAB), [0] * 3, [3, 4, 5], drafts=drafts)
    assert rows.tokens_R.tolist() == [3, 3, 3]
    assert rows.accepted is not None and rows.accepted.counts_N.tolist() == [2]
    assert [r.output_ids for r in calls[1]] == [[9, 3], [9, 3, 3], [9, 3, 3, 7]]
    assert table.state(0).output_ids == [9, 3, 3, 3]


def test_a_bound_comes_after_the_processor_of_its_row() -> None:
    def lead(logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        for row, given in zip(logits, params, strict=True):
            row[given["token"]] += 100
        return logits

    def forced(logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        for row, given, info in zip(logits, params, rows, strict=True):
            if len(info.output_ids) == given["after"]:
                row[row.argmax() + 1] += 500
        return logits

    table = SamplingTable(3, VOCAB)
    first, bound = NamedProcessor("first", lead), NamedProcessor("bound", forced)
    for slot, after in ((0, 1), (2, 0)):
        params = SamplingParams(temperature=0.0, custom_params={"token": slot + 3})
        table.set(slot, params, [1], processor=first, bound=(bound, {"after": after}))
    params = SamplingParams(temperature=0.0, custom_params={"after": 0})
    table.set(1, params, [1], processor=bound)
    sampler = Sampler(table)
    drawn = [sampler.sample(torch.eye(3, VOCAB), [0, 1, 2], [at] * 3) for at in (1, 2)]
    assert [one.tokens_R.tolist() for one in drawn] == [[3, 2, 6], [4, 1, 5]]


def test_sampler_tells_which_row_failed() -> None:
    def call(logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        raise ValueError("no")

    table = SamplingTable(2, VOCAB)
    table.set(0, SamplingParams(temperature=0.0), [1])
    table.set(1, SamplingParams(temperature=0.0), [1], processor=NamedProcessor("x", call))
    drawn = Sampler(table).sample(torch.eye(2, VOCAB), [0, 1], [1, 1])
    assert drawn.tokens_R.tolist() == [0, 1]
    assert drawn.errors == {1: "logit processor 'x': ValueError: no"}
