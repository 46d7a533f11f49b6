"""The grammar cache compiles once, evicts the oldest, and survives compilers that fail or hang."""

from __future__ import annotations

import gc
import threading

import pytest

from radixlm.base.errors import ConfigError, InvalidRequest, Overloaded
from radixlm.grammar import compile as module
from radixlm.grammar.compile import GrammarCache, GrammarFuture, create_backend
from radixlm.grammar.spec import CompiledGrammar, GrammarSpec, normalize_spec, read_json


class Grammar:
    warnings: tuple[str, ...] = ()

    def matcher(self) -> object:
        return "matcher"


class Backend:
    """Counts compilations; "wait" hangs until `go`, "bad" and "bug" fail."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.texts.append(spec.text)
        if spec.text.startswith("wait"):
            self.go.wait(30)
        if spec.text == "bad":
            raise InvalidRequest("no good", "regex")
        if spec.text == "bug":
            raise MemoryError("oops")
        return Grammar()  # type: ignore[return-value]


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def done(ticket: GrammarFuture) -> GrammarFuture:
    assert ticket.wait(10)
    return ticket


def test_equal_grammars_are_compiled_once() -> None:
    backend = Backend()
    cache = GrammarCache(backend)
    first, second = cache.request(regex("a")), cache.request(regex("a"))
    assert first is second
    assert done(first).matcher() == "matcher"
    assert first.was_cached
    done(cache.request(GrammarSpec("ebnf", "a")))
    assert backend.texts == ["a", "a"]
    assert (cache.num_hits, cache.num_requests) == (1, 3)
    any_object = cache.request(GrammarSpec("json_schema", "$$ANY$$"))
    assert any_object is cache.request(GrammarSpec("json_object"))
    cache.close()


def test_the_oldest_is_evicted() -> None:
    backend = Backend()
    cache = GrammarCache(backend, max_entries=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        done(cache.request(regex(text)))
    assert backend.texts == ["a", "b", "c", "b"]
    cache.clear()
    done(cache.request(regex("b")))
    assert backend.texts[-1] == "b"
    cache.close()


def test_errors_fail_their_request_only() -> None:
    cache = GrammarCache(Backend())
    for text, message in (("bad", "no good"), ("bug", "MemoryError: oops")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            done(cache.request(regex(text))).matcher()
        assert caught.value.param == "regex"
    assert done(cache.request(regex("good"))).matcher() == "matcher"
    cache.close()


def test_a_hanging_compiler_is_abandoned_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_STUCK_THREADS", 2)
    backend = Backend()
    cache = GrammarCache(backend, num_threads=1, timeout_s=0.05)
    for number in range(2):
        ticket = cache.request(regex(f"wait{number}"))
        assert ticket.wait(10)
        with pytest.raises(InvalidRequest, match="longer than"):
            ticket.matcher()
        if number == 0:
            assert done(cache.request(regex("quick"))).matcher() == "matcher"
    with pytest.raises(Overloaded):
        cache.request(regex("more"))
    backend.go.set()
    for worker in list(cache._stuck):
        worker.join(10)
    assert done(cache.request(regex("again"))).matcher() == "matcher"
    cache.close()


def test_fields_of_requests_name_their_kind() -> None:
    pairs = [
        (GrammarSpec("json_schema", "$$ANY$$"), GrammarSpec("json_object")),
        (GrammarSpec("ebnf", 'start: "a"'), GrammarSpec("lark", 'start: "a"')),
        (GrammarSpec("ebnf", 'root ::= "a"'), GrammarSpec("ebnf", 'root ::= "a"')),
        (GrammarSpec("regex", "a"), GrammarSpec("regex", "a")),
    ]
    for given, exact in pairs:
        assert normalize_spec(given) == exact


def test_backends_by_name() -> None:
    assert create_backend("none", None, [], 0) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--grammar-backend"):
        create_backend("smell", None, [], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_json_lacks_are_named(word: str) -> None:
    spec = GrammarSpec("json_schema", f'{{"maximum": {word}}}')
    with pytest.raises(InvalidRequest, match=f"json_schema: not JSON: {word} is no number of JSON"):
        read_json(spec)


def test_workers_of_a_forgotten_cache_end() -> None:
    cache = GrammarCache(Backend())
    done(cache.request(regex("a")))
    workers = cache._all_workers()
    del cache
    gc.collect()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
