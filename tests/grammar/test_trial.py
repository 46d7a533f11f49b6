"""Grammars are tried in a process that ends when they take too much, and clients take turns."""

from __future__ import annotations

import json
import string
import time
from typing import Any

import pytest
from tests.grammar.test_mask_sizes import BytesTokenizer

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.grammar import compile as module
from radixlm.grammar import trial as trial_module
from radixlm.grammar.compile import GrammarCache, GrammarFuture, create_backend, trial_maker
from radixlm.grammar.spec import GrammarSpec
from radixlm.grammar.trial import TooSlow, Trial, TrialSetup

TOKENIZER: Any = BytesTokenizer(300)
SETUP = TrialSetup("llguidance", None, False, ("</s>",))
FINE = GrammarSpec("regex", "[ab]{3}")


def hostile(name: str) -> GrammarSpec:
    """Twenty patterns that hold at once: the library works for minutes, and fills gigabytes."""
    patterns = [{"type": "string", "pattern": f".*{letter}.*"} for letter in string.ascii_letters]
    return GrammarSpec("json_schema", json.dumps({"title": name, "allOf": patterns[:20]}))


def test_a_hostile_grammar_is_stopped_and_the_next_one_works() -> None:
    trial = Trial(SETUP)
    try:
        for _ in range(2):
            with pytest.raises(TooSlow):
                trial.run(hostile("x"), 1)
            trial.run(FINE, 1)
        trial.run(GrammarSpec("regex", "(((("), 1)  # an error is found again by the server
    finally:
        trial.close()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "_START_S", 60)
    main = "from radixlm.grammar import trial; trial.MAX_MEMORY_BYTES = 80 << 20; trial.main()"
    monkeypatch.setattr(trial_module, "_MAIN", main)
    trial = Trial(SETUP)
    try:
        with pytest.raises(InvalidRequest, match="of memory") as caught:
            trial.run(hostile("x"), 60)
        assert caught.value.param == "json_schema"
    finally:
        trial.close()


def test_without_descriptors_the_server_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*args: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("subprocess.Popen", popen)
    with pytest.raises(Overloaded, match="Too many open files"):
        Trial(SETUP).run(FINE, 1)


def test_a_process_that_was_killed_is_replaced() -> None:
    trial = Trial(SETUP)
    try:
        trial.run(FINE, 1)
        process = trial._process
        assert process is not None
        process.kill()
        process.wait()
        trial.run(FINE, 1)
        assert trial._process is not process
    finally:
        trial.close()


def test_hostile_grammars_do_not_block_others() -> None:
    """Eight that would each take minutes, then one of another client."""
    backend = create_backend("llguidance", TOKENIZER, (1,), 300)
    assert backend is not None
    make = trial_maker("llguidance", TOKENIZER)
    cache = GrammarCache(backend, timeout_s=1, make_trial=make)
    for i in range(8):
        cache.request(hostile(str(i)), "evil")
    began_s = time.monotonic()
    good = [cache.request(GrammarSpec("regex", f"a{i}"), "good") for i in range(3)]
    for future in good:
        assert future.wait(60)
        future.matcher()
    assert time.monotonic() - began_s < 30
    cache.close()


class Backend:
    """Compiles anything at once, in the order in which it is asked."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def compile(self, spec: GrammarSpec) -> Any:
        self.texts.append(spec.text)
        raise InvalidRequest("no good", "regex")


def run_all(queue: module._Queue, backend: Backend) -> None:
    worker = module._Worker(backend, None, queue, None, 1)
    while (job := queue.get(0)) is not None:
        worker._do(*job)


def test_clients_take_turns() -> None:
    queue, backend = module._Queue(), Backend()
    for client, text in (("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), (None, "5"), ("b", "6")):
        queue.put(client, GrammarFuture(GrammarSpec("regex", text), 1, 30))
    run_all(queue, backend)
    assert backend.texts == ["1", "4", "5", "2", "6", "3"]


def test_queues_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_QUEUED_BY_CLIENT", 2)
    monkeypatch.setattr(module, "_MAX_QUEUED", 3)
    queue = module._Queue()
    future = GrammarFuture(FINE, 1, 30)
    queue.put("a", future)
    queue.put("a", future)
    with pytest.raises(Overloaded):
        queue.put("a", future)
    queue.put("b", future)
    with pytest.raises(Overloaded):
        queue.put("b", future)


def test_a_queued_grammar_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    queue, backend = module._Queue(), Backend()
    future = GrammarFuture(FINE, timeout_s=1, queue_timeout_s=30)
    queue.put("a", future)
    now_s[0] += 29
    assert not future.is_ready
    now_s[0] += 2
    assert future.is_ready and future.is_worth_another_try
    with pytest.raises(Overloaded, match="waited 30 s"):
        future.matcher()
    run_all(queue, backend)
    assert backend.texts == []
    with pytest.raises(Overloaded, match="waited 30 s"):
        future.matcher()


class Slow(Trial):
    """Every grammar takes too long."""

    def __init__(self) -> None:
        super().__init__(SETUP)
        self.limits_s: list[float] = []

    def run(self, spec: GrammarSpec, cpu_s: float) -> None:
        self.limits_s.append(cpu_s)
        raise TooSlow


def test_a_slow_grammar_gets_its_time_apart_from_the_others() -> None:
    trial, backend = Slow(), Backend()
    quick, slow = module._Queue(), module._Queue()
    future = GrammarFuture(FINE, 20, 30)
    quick.put("a", future)
    first = module._Worker(backend, trial, quick, slow, 20)
    first._do(*(quick.get(0) or ()))
    assert not future.is_ready
    second = module._Worker(backend, trial, slow, None, 20)
    second._do(*(slow.get(0) or ()))
    assert trial.limits_s == [0.25, 20]
    with pytest.raises(InvalidRequest, match="longer than 20 s"):
        future.matcher()
    assert backend.texts == []
