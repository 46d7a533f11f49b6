"""Beam search over a small language model, against all sequences there are."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.fakes import toy_tokenizer

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints import beam_search
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest, Output
from radixlm.text.token_bytes import Decoder
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish, Logprobs
from radixlm.wire.requests import GrammarSpec, LogprobParams
from radixlm.wire.sampling_params import SamplingParams
from radixlm.wire.transfer import Hint

VOCAB, EOS = 5, 0
PROMPT = [1, 2]


@cache
def logprobs(ids: tuple[int, ...]) -> tuple[float, ...]:
    """Of each token behind ``ids``."""
    rng = random.Random(repr(ids))
    weights = [rng.random() + 0.05 for _ in range(VOCAB)]
    return tuple(math.log(weight / sum(weights)) for weight in weights)


class Model:
    """Intake around ``logprobs``: a request of one token gets the likeliest ones."""

    def __init__(self, tokenizer: Tokenizer | None = None, end: Finish | None = None) -> None:
        self.facts = IntakeFacts(vocab=VOCAB, context_len=20, eos_ids=(EOS,))
        self.tokenizer, self.asked, self._end = tokenizer, list[GenerateRequest](), end

    async def collect(self, request: GenerateRequest) -> list[Output]:
        self.asked.append(request)
        assert request.sampling.max_new_tokens == 1 and request.logprobs is not None
        assert request.input_ids is not None
        row = sorted(((lp, t) for t, lp in enumerate(logprobs(tuple(request.input_ids)))))[::-1]
        found = Logprobs(top=[row[: request.logprobs.top]])
        finish = self._end if self._end and len(self.asked) > 3 else Finish("length")
        return [Output(logprobs=found, finish=finish, prompt_tokens=len(request.input_ids))]

    async def search(self, **fields: Any) -> list[Output]:
        options = {name: fields.pop(name) for name in list(fields) if name in OF_REQUEST}
        request = GenerateRequest(SamplingParams(**fields), input_ids=PROMPT, **options)
        return await beam_search.collect(self, request)  # type: ignore[arg-type]


OF_REQUEST = GenerateRequest.__dataclass_fields__


def every(length: int, penalty: float, least: int = 0) -> list[tuple[float, tuple[int, ...]]]:
    """All sequences that end with EOS or have ``length`` tokens, best first."""
    found = []
    for count in range(1, length + 1):
        for ids in itertools.product(range(VOCAB), repeat=count):
            if EOS in ids[:-1] or (ids[-1] != EOS and count < length):
                continue
            if ids[-1] == EOS and count <= least:
                continue
            steps = (logprobs((*PROMPT, *ids[:i]))[t] for i, t in enumerate(ids))
            found.append((sum(steps) / count**penalty, ids))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 0.4, -1.0])
@pytest.mark.parametrize("least", [0, 2])
async def test_a_search_that_keeps_all_finds_the_best_of_all(penalty: float, least: int) -> None:
    got = await Model().search(
        beam_width=VOCAB**4, n=7, max_new_tokens=4, length_penalty=penalty, min_new_tokens=least
    )
    for output, (score, ids) in zip(got, every(4, penalty, least), strict=False):
        assert (output.score, tuple(output.token_ids)) == (pytest.approx(score), ids)
        is_stop = ids[-1] == EOS
        assert output.finish == Finish("stop", matched=EOS) if is_stop else Finish("length")
        assert output.completion_tokens == len(ids) and output.prompt_tokens == 2
    assert [output.index for output in got] == list(range(7))


def narrow(width: int, length: int, penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """The search in its plainest form, which never ends before ``length``."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done = []
    for _ in range(length):
        rows = [(lp, ids, logprobs((*PROMPT, *ids))) for lp, ids in live]
        found = [(lp + row[t], (*ids, t)) for lp, ids, row in rows for t in range(VOCAB)]
        live = []
        for logprob, ids in sorted(found, reverse=True)[: 2 * width]:
            is_done = ids[-1] == EOS or len(ids) == length
            (done if is_done else live).append((logprob, ids))
            if len(live) == width:
                break
    return sorted(((lp / len(ids) ** penalty, ids) for lp, ids in done), reverse=True)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
async def test_a_narrow_search_ends_early_with_the_same_sequences(
    width: int, penalty: float
) -> None:
    model = Model()
    got = await model.search(beam_width=width, n=width, max_new_tokens=12, length_penalty=penalty)
    wanted = narrow(width, 12, penalty)[:width]
    assert [tuple(one.token_ids) for one in got] == [ids for _, ids in wanted]
    if not penalty and width < 3:  # what is done cannot be beaten by what gets longer
        assert len(model.asked) < 1 + 11 * width
    assert len({one.rid for one in model.asked}) == len(model.asked)


async def test_the_context_and_eos_bound_a_sequence() -> None:
    got = await Model().search(beam_width=2, max_new_tokens=None, ignore_eos=True)
    assert len(got[0].token_ids) == 18 and got[0].finish == Finish("length")
    stopped = await Model().search(beam_width=2, ignore_eos=True, stop_token_ids=(1, 2, 3, 4))
    assert stopped[0].finish == Finish("stop", matched=stopped[0].token_ids[-1])


async def test_texts_end_before_stops() -> None:
    model = Model(Tokenizer(toy_tokenizer.byte_level(), Decoder.from_json(None), {}, {}))
    shown = {"ignore_eos": True, "skip_special_tokens": False, "max_new_tokens": 3}
    plain = (await model.search(beam_width=2, **shown))[0]
    assert model.tokenizer is not None
    assert plain.text == model.tokenizer.decode(plain.token_ids, False)
    stop = plain.text[1:3]
    for keeps in (False, True):
        got = await model.search(beam_width=2, n=2, stop=(stop,), no_stop_trim=keeps, **shown)
        ended = [one for one in got if one.finish == Finish("stop", matched=stop)]
        assert ended and all(one.text.endswith(stop) is keeps for one in ended)


async def test_the_pages_of_a_pair_come_with_the_prompt() -> None:
    model, plain = Model(), Model()
    got = await model.search(beam_width=2, n=2, max_new_tokens=3, hint=Hint("h", 8998, 5))
    wanted = await plain.search(beam_width=2, n=2, max_new_tokens=3)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    assert [one.hint is not None for one in model.asked] == [True] + [False] * 4


async def test_an_end_from_outside_ends_the_search() -> None:
    end = Finish("abort", message="gone", status=499)
    (got,) = await Model(end=end).search(beam_width=3, n=3, rid="mine", max_new_tokens=9)
    assert got.finish == end and got.rid == "mine" and not got.text
    (late,) = await Model().search(beam_width=3, n=3, timeout_s=1e-9)
    assert late.finish is not None and late.finish.status == 408 and not late.token_ids


async def test_a_stream_has_whole_sequences() -> None:
    model = Model()
    asked = SamplingParams(beam_width=2, n=2, max_new_tokens=4)
    request = GenerateRequest(asked, input_ids=PROMPT, rid="r", stream=True)
    streamed = [one async for one in beam_search.stream(model, request)]  # type: ignore[arg-type]
    assert streamed == await beam_search.collect(model, replace(request))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"stop_regex": ("a",)}, "stop_regex"),
        ({"stop": ("a",)}, "stop"),  # without a tokenizer
        ({"n": 3}, "n"),
        ({"beam_width": 10**9}, "beam_width"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop_token_ids": tuple(range(VOCAB)), "min_new_tokens": 3}, "min_new_tokens"),
        ({"logprobs": LogprobParams()}, "return_logprob"),
        ({"grammar": GrammarSpec("ebnf", "")}, "ebnf"),
        ({"grammar": GrammarSpec("lark", "")}, "tool_choice"),
        ({"session": {"id": "a"}}, "session_params"),
    ],
)
async def test_what_it_does_not_go_with_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        await Model().search(**{"beam_width": 2, **fields})
    assert caught.value.param == name
