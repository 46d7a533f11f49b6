"""The runner with a model whose outputs are known: the result of each item of a step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.base.errors import InvalidRequest
from radixlm.executor.runner import Runner
from radixlm.hidden_outputs import reader as reader_module
from radixlm.step.plan import Admission, Item, PageUpdate, StepPlan
from radixlm.step.result import ItemResult
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import LogprobParams, PoolingParams
from radixlm.wire.sampling_params import SamplingParams
from tests.executor.fake_model import DIM, VOCAB, make_runner
from tests.fakes.step_results import item_results

GREEDY = SamplingParams(temperature=0.0)


def _admission(slot: int, prompt: list[int], output: tuple[int, ...] = ()) -> Admission:
    ids, out = np.array(prompt, np.int32), np.array(output, np.int32)
    return Admission(f"r{slot}", slot, GREEDY, ids, out)


def _pages(slot: int) -> PageUpdate:
    return PageUpdate(0, slot, 0, np.arange(1 + slot * 8, 9 + slot * 8, dtype=np.int32))


def _chunk(slot: int, prompt: list[int], start: int, end: int, **fields: Any) -> Item:
    """Tokens [start, end) of the prompt, with prompt log-probabilities as the planner requests
    them."""
    need = fields.get("logprobs")
    if need is not None and need.prompt_from >= 0:
        first = max(start, need.prompt_from - 1)
        targets = np.array(prompt[first + 1 : min(end + 1, len(prompt))], np.int32)
        if len(targets):
            fields |= {"targets_at": first - start, "targets": targets}
    emit = fields.pop("emit", end == len(prompt))
    tokens = np.array(prompt[start:end], np.int32)
    return Item(f"r{slot}", slot, start, end - start, tokens, emit, **fields)


def _decode(slot: int, place: int, **fields: Any) -> Item:
    return Item(f"r{slot}", slot, place, 1, None, True, **fields)


def _step(runner: Runner, *items: Item, **plan: Any) -> list[ItemResult]:
    step = runner.forward(StepPlan(0, items, **plan))
    runner.sample(step, plan.get("masks", {}))
    return item_results(runner.read(step))


def _start(runner: Runner, *prompts: list[int], **fields: Any) -> list[ItemResult]:
    return _step(
        runner,
        *(_chunk(s, p, 0, len(p), **fields) for s, p in enumerate(prompts)),
        admissions=tuple(_admission(s, p) for s, p in enumerate(prompts)),
        pages=tuple(_pages(s) for s in range(len(prompts))),
    )


def test_chunks_and_decodes_of_one_step() -> None:
    runner, model = make_runner()
    (first,) = _start(runner, [3, 5])
    assert first.tokens == (6,)
    got = _step(
        runner,
        _decode(0, 2),
        _chunk(1, [1, 2, 3, 4], 0, 3),
        admissions=(_admission(1, [1, 2, 3, 4]),),
        pages=(_pages(1),),
    )
    assert [g.tokens for g in got] == [(7,), ()]
    # the decode's token comes from the device's table, not from the plan
    assert model.batches[-1].token_ids_T.tolist() == [6, 1, 2, 3]
    got = _step(runner, _decode(0, 3), _chunk(1, [1, 2, 3, 4], 3, 4))
    assert [g.tokens for g in got] == [(8,), (5,)]


def test_rows_that_are_not_finite_fail_alone() -> None:
    runner, model = make_runner()
    model.poison = {9}
    good, bad, late = _start(runner, [3], [9], [4])
    assert good.tokens == (4,) and late.tokens == (5,)
    assert bad.tokens == () and bad.error is not None and "not finite" in bad.error
    again = _step(runner, _decode(0, 1), _decode(2, 1))
    assert [g.tokens for g in again] == [(5,), (6,)] and again[0].error is None


def test_masks_belong_to_their_items() -> None:
    runner, _ = make_runner()
    mask = np.array([1 << 12], np.int32)
    step = runner.forward(
        StepPlan(
            0,
            (_chunk(0, [1, 2], 0, 1), _chunk(1, [3], 0, 1), _chunk(2, [5], 0, 1)),
            admissions=tuple(_admission(s, p) for s, p in enumerate(([1, 2], [3], [5]))),
            pages=tuple(_pages(s) for s in range(3)),
        )
    )
    runner.sample(step, {2: mask})
    assert [g.tokens for g in item_results(runner.read(step))] == [(), (4,), (12,)]


def _expected(prev: int, token: int) -> float:
    logits = [-abs(i - (prev + 1) % VOCAB) for i in range(VOCAB)]
    return logits[token] - math.log(sum(math.exp(x) for x in logits))


def _joined(parts: list[Logprobs | None]) -> Logprobs:
    whole = Logprobs(chosen=[], top=[], asked=[])
    for part in parts:
        if part is not None:
            whole.chosen += part.chosen
            whole.top += part.top
            whole.asked += part.asked
    return whole


@pytest.mark.parametrize(("rows", "cuts"), [(256, ()), (2, (1,)), (1, (1, 2, 3)), (2, (2, 6))])
@pytest.mark.parametrize("prompt_from", [0, 1, 3])
def test_prompt_logprobs_do_not_depend_on_chunks(
    monkeypatch: pytest.MonkeyPatch, prompt_from: int, cuts: tuple[int, ...], rows: int
) -> None:
    monkeypatch.setattr(reader_module, "PROMPT_ROWS", rows)
    runner, _ = make_runner()
    prompt = [3, 9, 4, 4, 15, 0, 7]
    need = LogprobParams(prompt_from, top=2, token_ids=(1, 8))
    bounds = [0, *cuts, len(prompt)]
    parts: list[Logprobs | None] = []
    last = ItemResult()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        first = {"admissions": (_admission(0, prompt),), "pages": (_pages(0),)} if not i else {}
        (last,) = _step(runner, _chunk(0, prompt, start, end, logprobs=need), **first)
        parts.append(last.prompt_logprobs)
    whole = _joined(parts)
    assert [token for _, token in whole.chosen] == prompt[prompt_from:]
    for k, place in enumerate(range(prompt_from, len(prompt))):
        if place == 0:
            assert whole.chosen[0][0] is None and whole.top[0] is None and whole.asked[0] is None
            continue
        prev = prompt[place - 1]
        assert whole.chosen[k][0] == pytest.approx(_expected(prev, prompt[place]), abs=1e-5)
        top, asked = whole.top[k], whole.asked[k]
        assert top is not None and top[0][1] == (prev + 1) % VOCAB and len(top) == 2
        assert asked is not None and [token for _, token in asked] == [1, 8]
        assert asked[1][0] == pytest.approx(_expected(prev, 8), abs=1e-5)
    assert last.tokens == (8,) and last.logprobs is not None
    assert last.logprobs.chosen[0] == (pytest.approx(_expected(7, 8), abs=1e-5), 8)


def test_logprobs_only_where_asked() -> None:
    runner, _ = make_runner()
    need = LogprobParams()
    plain, asked = _start(runner, [3], [4])
    assert plain.logprobs is None and asked.logprobs is None
    got = _step(runner, _decode(0, 1), _decode(1, 1, logprobs=need))
    assert got[0].logprobs is None
    assert got[1].logprobs is not None and len(got[1].logprobs.chosen) == 1
    assert got[1].logprobs.top == [] and got[1].logprobs.asked == []


def test_hidden_states_are_those_of_the_item() -> None:
    runner, _ = make_runner()
    got = _start(runner, [3, 5, 2], [7, 7], hidden_states=True)
    rows = [np.frombuffer(g.hidden_states or b"", np.float32).reshape(-1, DIM) for g in got]
    assert rows[0][:, 0].tolist() == [3, 5, 2] and rows[0][:, 1].tolist() == [0, 1, 2]
    assert rows[1][:, 0].tolist() == [7, 7]
    after = _step(runner, _decode(0, 3, hidden_states=True), _decode(1, 2))
    assert np.frombuffer(after[0].hidden_states or b"", np.float32)[0] == 3
    assert after[1].hidden_states is None


def test_an_aborted_pooling_request_leaves_no_state() -> None:
    runner, _ = make_runner()
    prompt = [3, 9, 4]
    item = _chunk(0, prompt, 0, 2, pooling=PoolingParams(), emit=False)
    (got,) = _step(runner, item, admissions=(_admission(0, prompt),), pages=(_pages(0),))
    assert got.pooled is None and runner.outputs.pooler.num_kept == 1
    other = _chunk(1, [5], 0, 1)
    _step(runner, other, releases=(0,), admissions=(_admission(1, [5]),), pages=(_pages(1),))
    assert not runner.outputs.pooler.num_kept


def test_a_pooling_request_gets_a_vector_and_no_token() -> None:
    runner, _ = make_runner()
    item = _chunk(0, [3, 4], 0, 2, pooling=PoolingParams(), emit=False)
    (got,) = _step(runner, item, admissions=(_admission(0, [3, 4]),), pages=(_pages(0),))
    hidden = torch.tensor([4.0, 1.0, 2.0, 1.0])  # token, position, length, 1
    assert got.pooled == pytest.approx(torch.nn.functional.normalize(hidden, dim=0).tolist())
    assert not got.tokens


def test_a_slot_keeps_no_state_of_its_last_owner() -> None:
    runner, _ = make_runner()
    biased = SamplingParams(temperature=0.0, logit_bias={13: 100.0})
    ids, none = np.array([3], np.int32), np.zeros(0, np.int32)
    first = Admission("r0", 0, biased, ids, none)
    (got,) = _step(runner, _chunk(0, [3], 0, 1), admissions=(first,), pages=(_pages(0),))
    assert got.tokens == (13,)
    (got,) = _step(
        runner,
        _chunk(0, [3], 0, 1),
        releases=(0,),
        admissions=(_admission(0, [3]),),
        pages=(_pages(0),),
    )
    assert got.tokens == (4,)


def test_an_unknown_control_command_is_refused() -> None:
    runner, _ = make_runner()
    with pytest.raises(InvalidRequest, match="explode"):
        runner.control("explode", {})
