"""Grammars are tried in a process that ends when they take too much, and clients take turns."""

from __future__ import annotations

import json
import signal
import string
import subprocess
import sys
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
            trial.run(FINE, 1)
            process = trial._process
            with pytest.raises(TooSlow):
                trial.run(hostile("x"), 0.5)
            assert trial._process is process, "no other one has to start"
        with pytest.raises(InvalidRequest, match="invalid regex") as caught:
            trial.run(GrammarSpec("regex", "(((("), 1)
        assert caught.value.param == "regex"
        with pytest.raises(InvalidRequest, match="é" * 9):
            trial.run(GrammarSpec("json_schema", json.dumps({"$ref": "é" * 99_999})), 9)
        trial.run(GrammarSpec("lark", "start: <[290]>"), 1)  # the server knows its token ids
        trial.run(FINE, 1)
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


def test_a_limit_of_the_whole_server_is_kept() -> None:
    """`ulimit -v` is a hard limit, which a process without privileges cannot raise."""
    code = """
import resource
from radixlm.grammar.trial import _limit_memory
hard = 1 << 40
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
_limit_memory()
soft, kept = resource.getrlimit(resource.RLIMIT_AS)
assert soft < kept == hard, (soft, kept)
resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
_limit_memory()
assert resource.getrlimit(resource.RLIMIT_AS) == (soft, soft)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_descriptors_the_server_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*args: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("subprocess.Popen", popen)
    with pytest.raises(Overloaded, match="Too many open files"):
        Trial(SETUP).run(FINE, 1)


def test_a_process_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(SETUP)
    try:
        trial.run(FINE, 1)
        process = trial._process
        assert process is not None
        process.kill()
        process.wait()
        trial.run(FINE, 1)
        assert trial._process not in (None, process)
        monkeypatch.setattr(trial_module, "_MAIN", "print(end='.', flush=True); input(); input()")
        trial.close()
        with pytest.raises(Overloaded, match="ended"):
            trial.run(FINE, 1)
    finally:
        trial.close()


def test_a_process_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "_MARGIN_S", 0.0)
    trial = Trial(SETUP)
    try:
        trial.run(FINE, 10)
        process = trial._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        trial.run(FINE, 1)
        assert process.returncode == -signal.SIGKILL
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


def taken(queue: module._Queue, costs_s: dict[str | None, float]) -> list[str]:
    """The texts in the order of the queue, each of which takes its client's cost."""
    texts = []
    while (job := queue.get(0)) is not None:
        texts.append(job[1].spec.text)
        queue.charge(job[0], costs_s.get(job[0], 1), was_stopped=False)
    return texts


def put(queue: module._Queue, client: str | None, *texts: str) -> list[GrammarFuture]:
    futures = [GrammarFuture(GrammarSpec("regex", text), 1, 30) for text in texts]
    for future in futures:
        queue.put(client, future)
    return futures


def test_clients_take_turns_by_time() -> None:
    queue = module._Queue()
    for client, text in (("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), (None, "5"), ("b", "6")):
        put(queue, client, text)
    assert taken(queue, {}) == ["1", "4", "5", "2", "6", "3"]
    put(queue, "a", "1", "2", "3")
    put(queue, "b", "4", "5", "6", "7", "8")
    assert taken(queue, {"a": 3}) == ["4", "1", "5", "6", "7", "2", "8", "3"]


def test_who_comes_is_next_but_gets_no_credit() -> None:
    queue = module._Queue()
    put(queue, "evil", *"12345")
    for _ in range(3):
        client, _ = queue.get(0) or ("", None)
        queue.charge(client, 20, was_stopped=False)
    put(queue, "good", *"abc")
    assert taken(queue, {"evil": 20, "good": 15}) == ["a", "b", "4", "c", "5"]


def test_clients_of_stopped_grammars_leave_a_worker_free() -> None:
    queue = module._Queue()
    put(queue, "evil", *"12345")
    first = queue.get(0)
    assert first is not None
    queue.charge("evil", 0.3, was_stopped=True)
    assert queue.get(0) is not None
    assert queue.get(0) is None, "a second worker stays free"
    put(queue, "good", "a", "b")
    assert [(queue.get(0) or ("", None))[0] for _ in range(2)] == ["good", "good"]
    assert queue.get(0) is None
    queue.charge("evil", 0.01, was_stopped=False)
    assert [(queue.get(0) or ("", None))[0] for _ in range(2)] == ["evil", "evil"]


def test_queues_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_QUEUED_BY_CLIENT", 3)
    monkeypatch.setattr(module, "_MAX_QUEUED", 4)
    queue = module._Queue()
    mine = put(queue, "a", *"123")
    with pytest.raises(Overloaded):
        put(queue, "a", "4")
    put(queue, "b", "5")
    with pytest.raises(Overloaded):
        put(queue, "a", "6")
    put(queue, "c", "7")  # the place of the last one of who has the most
    assert [future.is_ready for future in mine] == [False, False, True]
    with pytest.raises(Overloaded):
        mine[2].matcher()
    assert mine[2].is_worth_another_try
    assert taken(queue, {}) == ["1", "5", "7", "2"]
    for client in "abcd":
        put(queue, client, client)
    with pytest.raises(Overloaded):
        put(queue, "e", "e")  # everybody has one
    assert sorted(taken(queue, {})) == ["a", "b", "c", "d"]


def test_tenants_share_no_grammars() -> None:
    backend = create_backend("llguidance", TOKENIZER, (1,), 300)
    assert backend is not None
    cache = GrammarCache(backend)
    try:
        first = cache.request(FINE, "x", "a")
        assert cache.request(FINE, "x", "b") is not first
        assert not cache.request(FINE).was_cached
        assert cache.request(FINE, "x", "a") is first and first.was_cached
    finally:
        cache.close()


def test_a_queued_grammar_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    queue, backend = module._Queue(), Backend()
    future = GrammarFuture(FINE, timeout_s=1, queue_timeout_s=30)
    queue.put("a", future)
    for _ in range(10):
        now_s[0] += 2.9
        assert not future.is_ready
    now_s[0] += 2
    assert future.is_ready and future.is_worth_another_try
    with pytest.raises(Overloaded, match="waited 30 s"):
        future.matcher()
    run_all(queue, backend)
    assert backend.texts == []
    with pytest.raises(Overloaded, match="waited 30 s"):
        future.matcher()


def test_a_process_that_stood_still_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused container: neither the queue nor the compiler has had the time."""
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    queue, backend = module._Queue(), Backend()
    future = GrammarFuture(FINE, timeout_s=20, queue_timeout_s=30)
    queue.put("a", future)
    now_s[0] += 3600
    assert not future.is_ready

    def compile_(spec: GrammarSpec) -> Any:
        now_s[0] += 3600
        assert not future.is_ready
        return backend.compile(spec)

    assert future.take()
    future.run(compile_)
    with pytest.raises(InvalidRequest, match="no good"):  # the backend's answer
        future.matcher()


class Slow(Trial):
    """Every grammar takes too long."""

    def __init__(self) -> None:
        super().__init__(SETUP)
        self.limits_s: list[float] = []

    def run(self, spec: GrammarSpec, cpu_s: float) -> None:
        self.limits_s.append(cpu_s)
        raise TooSlow


def test_a_slow_grammar_gets_its_time_apart_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial, backend = Slow(), Backend()
    quick, slow = module._Queue(), module._Queue()
    future = GrammarFuture(FINE, 20, 30)
    quick.put("a", future)
    first = module._Worker(backend, trial, quick, slow, 20)
    assert first._do(*(quick.get(0) or ()))
    assert not future.is_ready
    second = module._Worker(backend, trial, slow, None, 20)
    assert not second._do(*(slow.get(0) or ()))
    assert trial.limits_s == [0.25, 20]
    with pytest.raises(InvalidRequest, match="longer than 20 s"):
        future.matcher()
    assert backend.texts == []
    refused = GrammarFuture(FINE, 20, 30)
    monkeypatch.setattr(module, "_MAX_QUEUED_BY_CLIENT", 0)
    assert first._do("a", refused)
    with pytest.raises(Overloaded):
        refused.matcher()
