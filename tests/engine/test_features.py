"""Features behind their hooks: grammars with the real scheduler, the in-flight log on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import radixlm
from radixlm.base.errors import InvalidRequest
from radixlm.config.grammar import GrammarConfig
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.inflight_log import InflightLog, read_inflight_rid
from radixlm.observe.ring import StepRing
from radixlm.text.chat import load_chat_template
from radixlm.wire.replies import StepReply
from radixlm.wire.requests import GrammarSpec
from tests.engine.test_features_jump import Scripted
from tests.fakes.executor import EOS, VOCAB, reference
from tests.fakes.scheduler_harness import SchedulerHarness
from tests.fakes.tiny_checkpoint import cached_tiny

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():  # type: ignore[no-untyped-def]
    folder = str(cached_tiny("Qwen3ForCausalLM"))
    with radixlm.Engine(
        model_path=folder, cpu_threads=1, log_level="error", max_total_tokens=4096
    ) as made:
        yield made


def test_random_weights_write_valid_json(engine: radixlm.Engine) -> None:
    params = {"max_new_tokens": 120, "temperature": 1.3, "json_schema": json.dumps(SCHEMA)}
    answers = engine.generate(["Say JSON"] * 12, params, return_logprob=True)
    finished = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(finished) >= 6
    for answer in finished:
        value = json.loads(answer["text"])
        assert set(value) == {"name", "ok"} and isinstance(value["ok"], bool)


def test_parallel_samples_share_a_grammar(engine: radixlm.Engine) -> None:
    params = {"max_new_tokens": 30, "temperature": 1.0, "regex": "[ab]{4}", "n": 5}
    answers = engine.generate("x", params)
    assert len(answers) == 5
    assert all(len(a["text"]) == 4 and set(a["text"]) <= set("ab") for a in answers)


def test_bad_grammar_fails_its_request_alone(engine: radixlm.Engine) -> None:
    with pytest.raises(InvalidRequest, match="regex"):
        engine.generate("x", {"regex": "(((("})
    assert engine.generate("x", {"max_new_tokens": 3, "ignore_eos": True})["output_ids"]


def test_any_json_object(engine: radixlm.Engine) -> None:
    params = {"max_new_tokens": 150, "temperature": 1.0, "json_schema": "$$ANY$$"}
    answers = engine.generate(["x"] * 6, params)
    finished = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert all(isinstance(json.loads(a["text"]), dict) for a in finished)
    assert all(a["text"].lstrip().startswith("{") for a in answers)


class _Capricious:
    """A matcher that fails after three tokens."""

    masks_forced = False

    is_terminated = False

    def __init__(self) -> None:
        self.count = 0

    def fill_mask(self, out) -> None:  # type: ignore[no-untyped-def]
        if self.count == 3:
            raise InvalidRequest("too complex", param="json_schema")
        out[:] = -1

    def accept(self, token: int) -> bool:
        self.count += 1
        return True

    def forced_tokens(self) -> list[int]:
        return []


def test_a_failing_grammar_fails_its_request_alone() -> None:
    feature = GrammarFeature(GrammarConfig(), lambda: None, 31, (0,))  # type: ignore[arg-type,return-value]
    ticket = SimpleNamespace(is_ready=True, matcher=_Capricious)
    feature._ticket = lambda spec, client: ticket  # type: ignore[assignment,method-assign,return-value]
    bench = SchedulerHarness(features=(feature,))
    bench.submit("a", [1, 2, 3], 9, ignore_eos=True, grammar=GrammarSpec("regex", "x"))
    bench.submit("b", [1, 2, 4], 9, ignore_eos=True)
    bench.run()
    assert (bench.finish["a"].kind, bench.finish["a"].status) == ("error", 400)
    assert bench.out["b"] == reference([1, 2, 4], 9, True)


def test_it_is_told_how_long_a_grammar_compiled() -> None:
    feature = GrammarFeature(GrammarConfig(), lambda: None, 31, (0,))  # type: ignore[arg-type,return-value]
    ticket = SimpleNamespace(is_ready=False, matcher=_Capricious, done_s=0.0)
    feature._ticket = lambda spec, client: ticket  # type: ignore[assignment,method-assign,return-value]
    bench = SchedulerHarness(features=(feature,), ring=StepRing())
    grammar, arrival_s = GrammarSpec("regex", "x"), bench.now_s
    bench.submit("a", [1, 2, 3], 2, ignore_eos=True, grammar=grammar)
    bench.tick()
    ticket.is_ready, ticket.done_s = True, bench.now_s
    bench.run()
    bench.submit("compiled before", [1, 2, 3], 2, ignore_eos=True, grammar=grammar)
    bench.run()
    replies = [reply for reply in bench.replies if isinstance(reply, StepReply)]
    told = [moment for reply in replies for moment in reply.moments if moment[1] == "grammar"]
    assert told == [("a", "grammar", arrival_s, ticket.done_s, 0, 0)]


def test_grammars_are_counted() -> None:
    feature = GrammarFeature(GrammarConfig(), lambda: None, 31, (0,))  # type: ignore[arg-type,return-value]
    assert feature.stats() == {}  # before the first grammar

    def refuse() -> None:
        raise InvalidRequest("no regex", param="regex")

    bad = SimpleNamespace(is_ready=False, matcher=refuse)
    feature._ticket = lambda spec, client: bad  # type: ignore[assignment,method-assign,return-value]
    feature._cache = SimpleNamespace(num_requests=3, num_hits=1)  # type: ignore[assignment]
    bench = SchedulerHarness(features=(feature,))
    bench.submit("a", [1, 2, 3], 9, grammar=GrammarSpec("regex", "x"))
    bench.tick()
    load = bench.scheduler.load(1.0)
    assert load.num_grammar_queue == 1
    bad.is_ready = True
    bench.run()
    load = bench.scheduler.load(1.0)
    assert bench.finish["a"].status == 400 and load.num_grammar_queue == 0
    found = {name: load.tiers[name] for name in load.tiers if name.startswith("grammar_")}
    counts = {"grammar_requests": 3, "grammar_hits": 1, "grammar_failures": 1}
    assert found == {"grammar_queue": 0, **counts}


def test_the_inflight_log_names_the_suspect(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    record = InflightLog(path)
    bench = SchedulerHarness(features=(record,))
    seen: list[str | None] = []
    forward = bench.executor.forward

    def spy(plan):  # type: ignore[no-untyped-def]
        seen.append(read_inflight_rid(path))
        return forward(plan)

    bench.executor.forward = spy  # type: ignore[method-assign]
    bench.submit("calm", [1, 2, 3], 6, ignore_eos=True)
    bench.submit("doubted", [1, 2, 4], 6, ignore_eos=True, is_quarantined=True)
    bench.run()
    assert seen[0] == "doubted" and set(seen[1:]) == {None}
    assert read_inflight_rid(path) is None


@pytest.mark.parametrize("name", ["int8wo", "w8a8_int8", "int4wo-32"])
def test_the_bundled_model_is_right_when_quantized_at_load(name: str) -> None:
    with radixlm.Engine(
        model_path="radix-tiny", quantization=name, cpu_threads=1, log_level="error"
    ) as engine:
        assert engine.tokenizer is not None
        template = load_chat_template(engine.tokenizer)
        prompt = template.render([{"role": "user", "content": "What is 17 + 25?"}])
        ids = engine.tokenizer.encode(prompt, template.adds_special_tokens)
        answer = engine.generate(input_ids=ids, sampling_params={"temperature": 0.0})
    assert answer["text"] == "42"


class _Marked:
    """A tokenizer whose tokens are given; the others are a dot."""

    def __init__(self, texts: dict[int, bytes]) -> None:
        self.texts = texts

    def token_bytes(self, token: int) -> bytes:
        return self.texts.get(token, b".")


def _scripted_feature(script: list[list[int]], texts: dict[int, bytes]) -> GrammarFeature:
    config = GrammarConfig(disable_jump_forward=True)
    feature = GrammarFeature(config, lambda: None, VOCAB, (EOS,))  # type: ignore[arg-type,return-value]
    ticket = SimpleNamespace(is_ready=True, matcher=lambda: Scripted(script))
    feature._ticket = lambda kind, text: ticket  # type: ignore[assignment,method-assign,return-value]
    feature._tokenizer = _Marked(texts)  # type: ignore[assignment]
    return feature


@pytest.mark.parametrize("num_emitted", range(4))
def test_a_continued_request_replays_its_grammar(num_emitted: int) -> None:
    """After a death the emitted tokens are shown to the new matcher."""
    script = [[4], [5], [6], [7]]
    bench = SchedulerHarness(features=(_scripted_feature(script, {}),))
    emitted = [4, 5, 6][:num_emitted]
    grammar = GrammarSpec("regex", "x")
    bench.submit("a", [1, 2, 3, *emitted], 9, grammar=grammar, num_emitted=num_emitted)
    bench.run()
    assert bench.finish["a"].kind == "stop"
    assert emitted + bench.out["a"] == [4, 5, 6, 7, EOS]


PROMPT = [2, 5, 1]
FREE = reference(PROMPT, 4, True)  # what the model says without a grammar


@pytest.mark.parametrize("num_emitted", range(6))
@pytest.mark.parametrize(
    "pieces",
    [
        {3: b"a</think>"},
        {2: b"so</thi", 3: b"nk>"},
        {1: b"</", 2: b"think", 3: b">b"},
        {0: b"<</", 1: b"t", 2: b"hi", 3: b"nk>"},
    ],
)
def test_a_grammar_begins_after_a_marker_split_over_tokens(
    pieces: dict[int, bytes], num_emitted: int
) -> None:
    assert len(set(FREE)) == len(FREE) and EOS not in FREE
    texts = {FREE[at]: text for at, text in pieces.items()}
    bench = SchedulerHarness(features=(_scripted_feature([[4], [5], [6]], texts),))
    whole = [*FREE, 4, 5, 6, EOS]
    emitted = whole[:num_emitted]
    grammar = GrammarSpec("regex", "x", after="</think>")
    bench.submit("a", PROMPT + emitted, 20, grammar=grammar, num_emitted=num_emitted)
    bench.run()
    assert emitted + bench.out["a"] == whole
