"""Calls that are kept, told of, limited and awaited: cassettes, traces, budgets, async programs."""

from __future__ import annotations

import asyncio
import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from tests.lang.backends import Echo, Failing, Waiting, in_time
from tests.lang.test_tools import SOURCE

import radixlm as sgl
from radixlm.lang.cassette import CassetteError
from radixlm.lang.model_template import ModelTemplate
from radixlm.text.chat import ChatTemplate


@sgl.function
def talk(s: Any, question: str) -> None:
    s += sgl.user(question) + sgl.assistant(sgl.gen("a", max_tokens=8))
    group = s.fork(3)
    for child in group:
        child += sgl.gen("b", max_tokens=5)
    group.join()
    s += sgl.select("c", ["yes", "no"])


@sgl.function
def one_after_the_other(s: Any) -> None:
    s += "x" + sgl.gen("a", max_tokens=8) + sgl.gen("b", max_tokens=8) + sgl.gen("c")


def read(state: Any) -> list[Any]:
    metas = [state.get_meta_info(name) for name in "ac"]
    return [state.text(), *(state[name] for name in "abc"), *metas]


class Counting(Echo):
    """Answers "<n>" to its n-th call, so that no two answers are equal."""

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        super().generate(s, sampling_params)
        return f"<{len(self.calls)}>", {"prompt_tokens": 3, "completion_tokens": 2}


def test_a_cassette_answers_without_a_model(tmp_path: Path) -> None:
    backend = Counting()
    tape = sgl.Cassette(tmp_path / "calls", backend)
    expected = [read(talk.run(q, backend=tape)) for q in ("one", "two", "one")]
    num_calls = len(backend.calls)
    tape = sgl.Cassette(tmp_path / "calls")
    assert [read(talk.run(q, backend=tape)) for q in ("one", "two", "one")] == expected
    assert tape.num_left == 0 and num_calls == len(backend.calls)
    again = Counting()  # with a model: only what is new is computed
    tape = sgl.Cassette(tmp_path / "calls", again)
    assert [read(talk.run(q, backend=tape)) for q in ("one", "two", "one")] == expected
    assert read(talk.run("three", backend=tape)) and len(again.calls) == 5


class ChatEcho(Counting):
    is_chat_model = True


@pytest.mark.parametrize(
    "backend",
    [Counting(ModelTemplate(ChatTemplate(SOURCE), "<s>")), ChatEcho()],
    ids=["own", "chat"],
)
def test_a_cassette_keeps_the_template_and_the_kind_of_the_backend(
    tmp_path: Path, backend: Any
) -> None:
    expected = read(talk.run("one", backend=sgl.Cassette(tmp_path / "calls", backend)))
    tape = sgl.Cassette(tmp_path / "calls")
    assert read(talk.run("one", backend=tape)) == expected
    assert tape.num_left == 0


def test_a_missing_call_says_how_it_differs(tmp_path: Path) -> None:
    tape = sgl.Cassette(tmp_path / "calls", Echo())
    read(talk.run("What is it?", backend=tape))
    tape = sgl.Cassette(tmp_path / "calls")
    with pytest.raises(sgl.ProgramError, match="from character 10 on the nearest has 'is it"):
        talk.run("What was it?", backend=tape)["a"]
    other = sgl.function(lambda s: s.__iadd__(sgl.user("What is it?") + "ASSISTANT:" + sgl.gen()))
    with pytest.raises(sgl.ProgramError, match="max_new_tokens: 8 there, 128 here"):
        other.run(backend=sgl.Cassette(tmp_path / "calls")).sync()
    with pytest.raises(CassetteError, match="is not there"):
        sgl.Cassette(tmp_path / "none")
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(CassetteError, match="no cassette"):
        sgl.Cassette(tmp_path / "bad")
    (tmp_path / "worse").write_text('{"format": 1}\n[]\n')
    with pytest.raises(CassetteError, match="line 2: it is no call"):
        sgl.Cassette(tmp_path / "worse")


class Seeded(Echo):
    """Answers with the seed that it is given."""

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        super().generate(s, sampling_params)
        return f"<{sampling_params.seed}>", {}


@pytest.mark.parametrize("num_kept", range(7))
def test_a_checkpoint_goes_on_with_the_same_answers(tmp_path: Path, num_kept: int) -> None:
    """The file is cut after any number of calls, and amid the next one."""
    first = tmp_path / "whole"
    expected = read(talk.run("q", backend=Seeded(), checkpoint=first))
    lines = first.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.write_bytes(b"".join(lines[: 1 + num_kept]) + b"".join(lines[1 + num_kept :])[:9])
    backend = Seeded()
    assert read(talk.run("q", backend=backend, checkpoint=cut)) == expected
    assert len(backend.calls) == max(0, 5 - num_kept)


def test_a_batch_may_have_a_checkpoint(tmp_path: Path) -> None:
    batch, path = [("a",), ("b",), ("a",)], tmp_path / "calls"
    expected = list(map(read, talk.run_batch(batch, backend=Seeded(), checkpoint=path)))
    backend = Seeded()
    assert list(map(read, talk.run_batch(batch, backend=backend, checkpoint=path))) == expected
    assert not backend.calls


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_trace_has_each_call(tmp_path: Path) -> None:
    class Marked(Counting):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
            return "<script>" + super().generate(s, sampling_params)[0][1:], {
                "prompt_tokens": 3,
                "cached_tokens": 1,
                "completion_tokens": 2,
            }

    state = talk.run("q", backend=Marked())
    trace = state.trace()
    assert trace["program"] == "talk" and trace["model"] == "echo"
    assert [(c["kind"], c["name"]) for c in trace["calls"]] == [
        ("gen", "a"),
        *[("gen", "b")] * 3,
        ("select", "c"),
    ]
    sums = trace["prompt_tokens"], trace["cached_tokens"], trace["completion_tokens"]
    assert sums == (12, 4, 8) and len(trace["states"]) == 4
    parents = {one["parent"] for one in trace["states"][1:]}
    assert parents == {trace["states"][0]["id"]}
    page = Page()
    page.feed(trace.to_html(tmp_path / "trace.html"))
    assert "script" not in page.tags and "<script>" in page.text
    assert page.tags.count("details") == 5
    assert (tmp_path / "trace.html").read_text().startswith("<!doctype html>")
    events = trace.to_perfetto()["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
    assert json.loads(trace.to_json())["program"] == "talk"


def test_the_trace_has_the_call_that_failed() -> None:
    state = one_after_the_other.run(backend=Failing(after=1))
    assert "the server is gone" in str(state.error())
    errors = [call["error"] for call in state.trace()["calls"]]
    assert errors == [None, "ConnectionError: the server is gone"]
    assert "failed" in state.trace().to_html()


def test_a_budget_of_tokens_is_shared_with_forks() -> None:
    asked: list[int] = []

    class Counted(Echo):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
            asked.append(sampling_params.max_new_tokens)
            return "x", {"completion_tokens": min(4, sampling_params.max_new_tokens)}

    with pytest.raises(sgl.ProgramError, match=r"10 tokens \(max_total_tokens\) are used"):
        talk.run("q", backend=Counted(), max_total_tokens=10)
    assert asked == [8, 5, 2]  # 4 used of each but the last


def test_a_budget_counts_what_was_written_ahead() -> None:
    asked: list[int] = []

    class Ahead(Echo):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
            asked.append(sampling_params.max_new_tokens)
            return "a b", {"completion_tokens": 3}

    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += sgl.gen("a", max_tokens=9, stop=" ") + " " + sgl.gen("b", max_tokens=9, stop="!")
        s += sgl.gen("c", max_tokens=9)

    state = program.run(backend=Ahead(), max_total_tokens=40)
    assert state.error() is None
    assert asked == [40, 37]


def test_a_budget_bounds_turns_of_a_chat_model() -> None:
    class Turns(ChatEcho):
        def spec_fill(self, s: Any, value: str) -> None: ...

        def spec_gen(self, s: Any, params: Any, name: str) -> None: ...

        def role_end_generate(self, s: Any) -> None:
            self.calls.append((s.text_, None))

    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        for name in "ab":
            s += sgl.user("q") + sgl.assistant(sgl.gen(name))

    backend = Turns()
    error = program.run(backend=backend, max_total_tokens=64).error()
    assert "64 tokens (max_total_tokens) are used" in str(error)
    assert len(backend.calls) == 1


def test_a_program_ends_in_its_time() -> None:
    with pytest.raises(sgl.ProgramError, match=r"0 s \(timeout_s\) are over"):
        one_after_the_other.run(backend=Echo(), timeout_s=0.0).text()
    choose = sgl.function(lambda s: s.__iadd__(sgl.select("a", ["x", "y"])))
    with pytest.raises(sgl.ProgramError, match=r"0 s \(timeout_s\) are over"):
        choose.run(backend=Echo(), timeout_s=0.0).text()


def test_the_others_of_a_batch_end_with_one_that_fails() -> None:
    ended: list[str] = []

    @sgl.function
    async def program(s: Any, kind: str) -> None:
        if kind == "fails":
            raise KeyError(kind)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(kind)
            raise

    async def both() -> None:
        with pytest.raises(KeyError):
            await program.arun_batch([("waits",), ("fails",)], backend=Echo(), concurrency=2)
        await asyncio.sleep(0)

    asyncio.run(both())
    assert ended == ["waits"]


@sgl.function
async def ask(s: Any, question: str) -> str:
    s += sgl.user(question)
    answer = await s.gen("a", max_tokens=4)
    group = s.fork(2)
    for child in group:
        child += "!" + sgl.gen("b")
    await group.ajoin()
    chosen = await s.select(None, ["x", "y"])
    return f"{answer} {s['b']} {chosen}"


def test_async_programs_in_a_loop() -> None:
    backend = Waiting()
    backend.go.set()
    expected = ask.run("q1", backend=Echo()).ret_value
    assert expected.startswith("[")

    async def all_of_them() -> list[Any]:
        one = await ask.arun("q1", backend=backend)
        many = await ask.arun_batch([(f"q{n}",) for n in range(50)], backend=backend, concurrency=9)
        sync = await talk.arun("q", backend=backend)
        return [one.ret_value, many[1].ret_value, sync["c"], len(many)]

    found = in_time(lambda: asyncio.run(all_of_them()))
    assert found == [expected, expected, talk.run("q", backend=Echo())["c"], 50]
    assert [s.ret_value for s in ask.run_batch([("q1",)] * 2, backend=Echo())] == [expected] * 2


def test_reading_too_early_in_an_async_program_says_what_to_write() -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "x" + sgl.gen("a")
        s["a"]

    backend = Waiting()
    try:
        with pytest.raises(RuntimeError, match=r"await s.get\('a'\)"):
            in_time(lambda: program.run(backend=backend))
    finally:
        backend.go.set()


def test_an_async_program_raises_what_its_backend_raises() -> None:
    with pytest.raises(sgl.ProgramError, match="the server is gone"):
        in_time(lambda: ask.run("q", backend=Failing(is_immediate=False)))
    state = ask.run("q", backend=Failing(is_immediate=False), stream=True)
    with pytest.raises(sgl.ProgramError, match="the server is gone"):
        in_time(lambda: list(state.text_iter()))
