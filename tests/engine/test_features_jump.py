"""Jump-forward: forced tokens are appended without sampling, and nothing else changes."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import radixlm
from radixlm.config.grammar import GrammarConfig
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.text.chat import load_chat_template
from radixlm.wire.requests import GrammarSpec, LogprobParams
from tests.fakes.executor import EOS, VOCAB
from tests.fakes.scheduler_harness import SchedulerHarness


class Scripted:
    """Allows the tokens of a script, one set for each position, then EOS only."""

    masks_forced = True

    def __init__(self, script: list[list[int]]) -> None:
        self.script, self.at = script, 0

    @property
    def is_terminated(self) -> bool:
        return self.at > len(self.script)

    def allowed(self, at: int) -> list[int]:
        return self.script[at] if at < len(self.script) else [EOS]

    def fill_mask(self, out: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        out[:] = 0
        for token in self.allowed(self.at):
            out.view("u4")[token // 32] |= 1 << (token % 32)

    def accept(self, token: int) -> bool:
        is_allowed = token in self.allowed(self.at)
        self.at += is_allowed
        return is_allowed

    def forced_tokens(self) -> list[int]:
        end = self.at
        while end < len(self.script) and len(self.script[end]) == 1:
            end += 1
        return [tokens[0] for tokens in self.script[self.at : end]]


SCRIPTS = [
    [[4], [5], [6], [1, 2, 3], [7], [8], [1, 2, 3, 9], [4]],
    [[1, 2], [1, 2], [3], [3], [3], [3], [3], [3], [3], [1, 2]],
    [[9]] * 12,
]


def play(jump: bool, most: int = 30, num_pages: int = 64, **more: Any) -> SchedulerHarness:
    """Run three constrained requests and a free one to the end."""
    config = GrammarConfig(disable_jump_forward=not jump)
    overlaps = more.get("depth", 0) == 0
    feature = GrammarFeature(config, lambda: None, VOCAB, (EOS,), overlaps)  # type: ignore[arg-type,return-value]
    feature._ticket = lambda spec, client: SimpleNamespace(  # type: ignore[assignment,method-assign,return-value]
        is_ready=True, matcher=lambda: Scripted(SCRIPTS[int(spec.value)])
    )
    need = more.pop("logprobs", None)
    bench = SchedulerHarness(num_pages, features=(feature,), **more)
    for i in range(3):
        grammar = GrammarSpec("regex", str(i))
        bench.submit(f"g{i}", [1, 2, 3, 20 + i], most, grammar=grammar, logprobs=need)
    bench.submit("free", [1, 2, 3, 4], most, ignore_eos=True)
    bench.run()
    return bench


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"num_pages": 14},
        {"step_tokens": 4},
        {"mixed": False},
        {"radix": False},
        {"depth": 1},
        {"most": 6},
        {"window": 8, "num_window": 32},
    ],
    ids=str,
)
def test_same_tokens_in_fewer_steps(world: dict[str, Any]) -> None:
    with_jump, without = play(True, **world), play(False, **world)
    assert with_jump.out == without.out
    assert {r: f.kind for r, f in with_jump.finish.items()} == {
        r: f.kind for r, f in without.finish.items()
    }
    computed = [
        sum(item.rid == "g2" for plan in bench.executor.steps for item in plan.items)
        for bench in (with_jump, without)
    ]
    if world.get("depth"):
        assert computed[0] == computed[1]
    elif "num_pages" not in world:
        assert computed[0] < computed[1]


def test_a_jump_takes_no_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for the prompt, and one for each token that is chosen."""
    script = [[1, 2], [3], [4], [1, 2], [1, 2], [5], [6], [7], [1, 2, 9], [4], [5]]
    monkeypatch.setattr(f"{__name__}.SCRIPTS", [SCRIPTS[0], SCRIPTS[1], script])
    steps = [[i.rid for i in plan.items] for plan in play(True).executor.steps]
    # the first choice comes with the prompt, and EOS is sampled
    assert sum("g2" in rids for rids in steps) == 1 + sum(len(t) > 1 for t in script)


def test_tokens_with_logprobs_are_sampled() -> None:
    need = LogprobParams()
    steps = [len(play(jump, logprobs=need).executor.steps) for jump in (True, False)]
    assert steps[0] == steps[1]


class Loose(Scripted):
    """Whose masks allow other spellings of what is forced."""

    masks_forced = False

    def allowed(self, at: int) -> list[int]:
        tokens = super().allowed(at)
        return [*tokens, 10, 11, 12] if len(tokens) == 1 and tokens != [EOS] else tokens


def test_forced_tokens_are_spelt_the_same_with_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Scripted", Loose)
    plain = play(True).out
    assert play(True, logprobs=LogprobParams()).out == plain == play(False).out


def test_masks_made_in_a_thread_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = play(True).out
    monkeypatch.setattr("radixlm.engine.features.grammar._THREAD_PAYS_S", -1.0)
    assert play(True).out == alone


class Endless(Scripted):
    """A script whose end no EOS tells: nothing is allowed there."""

    def allowed(self, at: int) -> list[int]:
        return self.script[at] if at < len(self.script) else []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("jump", [True, False])
def test_a_finished_grammar_ends_the_request_without_an_eos(depth: int, jump: bool) -> None:
    feature = GrammarFeature(
        GrammarConfig(disable_jump_forward=not jump),
        lambda: None,  # type: ignore[arg-type,return-value]
        VOCAB,
        (),
        depth == 0,
    )
    feature._ticket = lambda spec, client: SimpleNamespace(  # type: ignore[assignment,method-assign,return-value]
        is_ready=True, matcher=lambda: Endless(SCRIPTS[int(spec.value)])
    )
    bench = SchedulerHarness(features=(feature,), depth=depth, eos_ids=())
    for i, script in enumerate(SCRIPTS):
        bench.submit(f"g{i}", [1, 2, 3, 20 + i], 30, grammar=GrammarSpec("regex", str(i)))
        bench.submit(f"full{i}", [1, 2, 9, i], len(script), grammar=GrammarSpec("regex", str(i)))
    bench.run()
    for i, script in enumerate(SCRIPTS):
        for rid in (f"g{i}", f"full{i}"):
            assert len(bench.out[rid]) == len(script)
            assert (bench.finish[rid].kind, bench.finish[rid].matched) == ("stop", None)


def test_an_accepted_eos_ends_the_request_whatever_it_asked_for() -> None:
    """Only EOS is allowed once a grammar has ended: ignore_eos would repeat it to the limit."""
    feature = GrammarFeature(GrammarConfig(), lambda: None, VOCAB, (EOS,))  # type: ignore[arg-type,return-value]
    feature._ticket = lambda spec, client: SimpleNamespace(  # type: ignore[assignment,method-assign,return-value]
        is_ready=True, matcher=lambda: Scripted(SCRIPTS[0])
    )
    bench = SchedulerHarness(features=(feature,))
    grammar = GrammarSpec("regex", "0")
    bench.submit("a", [1, 2, 3], 30, ignore_eos=True, grammar=grammar)
    bench.run()
    assert (bench.finish["a"].kind, bench.finish["a"].matched) == ("stop", EOS)
    assert bench.out["a"].count(EOS) == 1 and len(bench.out["a"]) == len(SCRIPTS[0]) + 1


SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Alan"]},
        "favourite_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_a_mathematician": {"type": "boolean"},
    },
    "required": ["first_name", "favourite_number", "is_a_mathematician"],
    "additionalProperties": False,
}
GRAMMARS = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "The answer is (4|5)2, without any doubt[.]"},
    {"ebnf": 'root ::= "result = " ("yes" | "no") " (certain)"'},
]
FORMS = (
    r'{"first_name": "(Ada|Alan)", "favourite_number": \d\d?, "is_a_mathematician": (true|false)}'
    r"|The answer is (4|5)2, without any doubt[.]|result = (yes|no) [(]certain[)]"
)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_the_bundled_model_gives_the_same(backend: str) -> None:
    """Greedy, with and without. The library's own masks of xgrammar allow forced text to be spelt
    with other tokens than a tokenizer would use: an odd spelling changes what comes next."""
    pytest.importorskip(backend)
    answers: dict[bool, list[Any]] = {}
    steps: dict[bool, int] = {}
    for jump in (True, False):
        with radixlm.Engine(
            model_path="radix-tiny",
            cpu_threads=1,
            log_level="error",
            grammar_backend=backend,
            constrained_json_disable_any_whitespace=True,
            disable_jump_forward=not jump,
        ) as engine:
            assert engine.tokenizer is not None
            template = load_chat_template(engine.tokenizer)
            prompt = template.render([{"role": "user", "content": "What is 17 + 25?"}])
            params = [{"temperature": 0.0, "max_new_tokens": 80} | g for g in GRAMMARS]
            answers[jump] = engine.generate([prompt] * 3, params)
            steps[jump] = engine.get_server_info()["internal_states"][0]["num_steps"]
            for answer in answers[jump]:
                text = answer["text"]
                assert re.fullmatch(FORMS, text) and answer["output_ids"], text
                assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert [a["output_ids"] for a in answers[True]] == [a["output_ids"] for a in answers[False]]
    longest = max(len(a["output_ids"]) for a in answers[True])
    # without jumps, forced text may be drafted: not compared with those steps
    assert steps[True] < 0.8 * longest, (steps, longest)
