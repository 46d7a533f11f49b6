"""Programs on backends without a model: texts, messages, variables, forks, errors, streams."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from tests.lang.backends import LIMIT_S, Echo, Failing, Waiting, in_time

import radixlm as sgl
from radixlm.lang.backend.generate_api import GenerateBackend
from radixlm.lang.chat_template import get_chat_template
from radixlm.lang.executor import ProgramError, StreamExecutor
from radixlm.lang.interpreter import run_program, run_program_batch
from radixlm.lang.ir import REGEX_INT, SglGen, SglSamplingParams, SglVariable


@sgl.function
def two_turns(s: Any, question: str, more: str = "more") -> str:
    """Two questions."""
    s += sgl.system("Be short.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("first", max_tokens=4))
    s += sgl.user(more) + sgl.assistant(sgl.gen("second"))
    return "done"


EXPECTED = "SYSTEM:Be short.\nUSER:q\nASSISTANT:[34]\nUSER:more\nASSISTANT:[59]\n"


@pytest.mark.parametrize("make", [Echo, lambda: _set(Waiting())])
def test_text_messages_and_variables(make: Any) -> None:
    state = two_turns.run("q", backend=make())
    assert state.text() == EXPECTED
    assert (state["first"], state["second"], state.ret_value) == ("[34]", "[59]", "done")
    assert state.get_meta_info("first") == {"prompt_tokens": 34}
    assert [message["content"] for message in state.messages()] == [
        *("Be short.", "q", "[34]", "more", "[59]")
    ]
    assert "first" in state and "third" not in state and state.error() is None
    with pytest.raises(KeyError):
        state["third"]


def _set(backend: Waiting) -> Waiting:
    backend.go.set()
    return backend


def test_the_default_system_text_and_the_template_stops() -> None:
    backend = Echo(get_chat_template("qwen"))
    own = ["Q"]

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("hi")
        s += sgl.assistant(sgl.gen("a", stop=own))

    state = program.run(backend=backend)
    assert state.messages()[0] == {"role": "system", "content": "You are a helpful assistant."}
    assert [params.stop for _, params in backend.calls] == [["Q", "<|im_end|>"]]
    program.run(backend=backend)
    assert own == ["Q"], "the caller's list stays as it is"


def test_run_parameters_hold_where_a_call_names_none() -> None:
    backend = Echo()
    two_turns.run("q", backend=backend, max_new_tokens=9, temperature=0.5, stop="x", n=1)
    limits = [params.max_new_tokens for _, params in backend.calls]
    assert limits == [4, 9]
    assert {params.temperature for _, params in backend.calls} == {0.5}
    assert backend.calls[0][1].stop == ["x"]


def test_roles_as_scopes_and_var_scopes() -> None:
    @sgl.function
    def program(s: Any) -> None:
        with s.user():
            s += "a"
            with s.var_scope("scope"):
                s += "b" + sgl.gen("c")
        s.assistant("d")

    state = program.run(backend=Echo())
    assert (state.text(), state["scope"]) == ("USER:ab[7]\nASSISTANT:d\n", "b[7]")

    @sgl.function
    def nested(s: Any) -> None:
        with s.user(), s.assistant():
            s += "x"

    with pytest.raises(ProgramError, match="Nested roles"):
        nested.run(backend=Echo()).text()


def test_forks_join_and_copy() -> None:
    @sgl.function
    def program(s: Any, is_joined: bool) -> None:
        s += "base"
        s.set_var("kept", "k")
        group = s.fork(3)
        group += lambda i: f"-{i}" * (i + 1)
        group += sgl.gen("x")
        group += ["a", "b", "c"]
        assert len(group) == 3 and group[1]["x"] == "[8]"
        if is_joined:
            group.join("concate_and_append")
        else:
            group.join()
        with s.copy() as other:
            other += sgl.gen("y")

    for backend in (Echo(), _set(Waiting())):
        state = program.run(False, backend=backend)
        assert (state.text(), state["x"], state["y"]) == ("base", ["[6]", "[8]", "[10]"], ["[4]"])
        assert state["kept"] == "k"
        joined = program.run(True, backend=backend)
        assert joined.text() == "base-0[6]a-1-1[8]b-2-2-2[10]c"
    with pytest.raises(ValueError, match="Invalid join mode"):
        program.run(False, backend=Echo()).fork(1).join("other")


def test_a_fork_begins_where_it_was_made_and_waits_for_what_comes_before() -> None:
    backend = Waiting()

    @sgl.function
    def program(s: Any) -> Any:
        s += "a" + sgl.gen("one")
        group = s.fork(2)
        s += "later"
        group += sgl.gen("two")
        return group

    state = program.run(backend=backend)
    assert not backend.calls, "nothing has been answered"
    backend.go.set()
    assert [child["two"] for child in state.ret_value] == ["[4]", "[4]"]
    assert state.ret_value[0].text() == "a[1][4]"
    assert state.text() == "a[1]later"


def test_several_samples_are_a_list_and_the_text_goes_on_with_the_first() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("many", n=3) + sgl.gen("next")

    state = program.run(backend=Echo())
    assert state["many"] == ["[1]0", "[1]1", "[1]2"]
    assert (state.text(), state["next"]) == ("a[1]0[5]", "[5]")


def test_calls_without_a_name_set_no_variable() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen() + sgl.gen() + sgl.select(choices=["x"])

    state = program.run(backend=Echo())
    assert (state.text(), state.stream_executor.variables) == ("a[1][4]x", {})


@pytest.mark.parametrize("is_immediate", [True, False])
def test_after_an_error_every_read_ends_and_says_why(is_immediate: bool) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("ok") + sgl.gen("bad") + "b"
        child = s.fork(1)[0]
        s += "never"
        s.set_var("child", child)

    state = program.run(backend=Failing(1, is_immediate))
    assert in_time(lambda: state["ok"]) == "[1]"
    reads = [
        state.text,
        state.sync,
        state.messages,
        lambda: state["bad"],
        lambda: state.get_meta_info("bad"),
        lambda: list(state.text_iter()),
        lambda: state["child"].text(),
        lambda: state.fork(2)[1].text(),
    ]
    for read in reads:
        with pytest.raises(ProgramError, match="ConnectionError: the server is gone") as caught:
            in_time(read)
        assert isinstance(caught.value.__cause__, ConnectionError)
    state += "more"
    assert isinstance(in_time(state.error), ConnectionError)
    assert "a[1]" in repr(state)


def test_without_a_thread_each_call_is_over_where_it_is_appended() -> None:
    seen: list[Any] = []

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        seen.append(dict(s.stream_executor.variables))
        s += sgl.gen("y")
        seen.append("never")

    backend = Failing(1, is_immediate=False)
    with pytest.raises(ProgramError, match="the server is gone"):
        in_time(lambda: program.run(backend=backend, use_thread=False))
    assert seen == [{"x": "[1]"}]
    params = SglSamplingParams()
    executor = StreamExecutor(_set(Waiting()), {}, params, None, False, None, False)
    executor.submit(SglGen("z"))
    assert executor.variables == {"z": "[0]"}


def test_an_error_of_the_function_is_raised_where_it_is_read() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=Echo())
    state = program.run(backend=Echo(), stream=True)
    pieces: list[str] = []
    with pytest.raises(ProgramError, match="LookupError: mine"):
        in_time(lambda: pieces.extend(state.text_iter()))
    assert "".join(pieces) in ("a[1]", "a", "")
    with pytest.raises(LookupError):
        program.run_batch([{}, {}], backend=Failing(9, False))


def test_what_cannot_be_appended() -> None:
    @sgl.function
    def program(s: Any, value: Any) -> None:
        s += value

    with pytest.raises(ValueError, match="None"):
        program.run(None, backend=Echo())
    with pytest.raises(TypeError, match=r"5 is no expression: append a string, for example str"):
        program.run(5, backend=Echo())
    with pytest.raises(AssertionError, match='first argument must be "s"'):
        sgl.function(lambda state: None)
    with pytest.raises(AssertionError, match="specify a backend"):
        program.run("x")


def test_streams_give_the_text_in_pieces() -> None:
    for backend in (Echo(), _set(Waiting())):
        state = two_turns.run("q", backend=backend, stream=True)
        assert in_time(lambda s=state: "".join(s.text_iter())) == EXPECTED
        again = two_turns.run("q", backend=backend, stream=True)
        assert in_time(lambda s=again: "".join(s.text_iter("second"))) == "[59]"
        assert again["first"] == "[34]"
    plain = two_turns.run("q", backend=Echo())
    assert list(plain.text_iter("first")) == ["[34]"]
    assert in_time(lambda: list(plain.text_iter())) == [EXPECTED]


def test_streams_of_a_program_with_an_event_loop() -> None:
    async def read(name: str | None, meta: bool = False) -> list[Any]:
        state = two_turns.run("q", backend=_set(Waiting()), stream=True)
        pieces = state.text_async_iter(name, return_meta_data=meta)
        return [piece async for piece in pieces]

    async def work() -> None:
        assert "".join(await read(None)) == EXPECTED
        pairs = await read("second", True)
        assert "".join(text for text, _ in pairs) == "[59]"
        assert pairs[-1][1] == {"prompt_tokens": 59}
        plain = two_turns.run("q", backend=Echo())
        assert [piece async for piece in plain.text_async_iter("first")] == ["[34]"]

    in_time(lambda: asyncio.run(work()))


@pytest.mark.parametrize("count", ["auto", 1, 3])
def test_batches_keep_their_order_and_call_the_function_once_each(count: Any) -> None:
    seen: list[str] = []

    @sgl.function
    def program(s: Any, a: str, b: str = "x") -> None:
        seen.append(a)
        s += f"{a}{b}" + sgl.gen("n")
        s += s["n"]

    for backend in (Echo(), _set(Waiting())):
        seen.clear()
        batch = [{"a": "i" * i} for i in range(1, 9)]
        states = program.run_batch(batch, backend=backend, num_threads=count)
        assert [state["n"] for state in states] == [f"[{i + 1}]" for i in range(1, 9)]
        assert sorted(seen) == sorted(one["a"] for one in batch)
    tuples = program.run_batch([("a",), ("b", "c")], backend=Echo())
    assert [state.text() for state in tuples] == ["ax[2][2]", "bc[2][2]"]
    shown = program.run_batch([("a",)] * 5, backend=Echo(), generator_style=True)
    assert [state["n"] for state in shown] == ["[2]"] * 5
    assert program.run_batch([], backend=Echo()) == []
    with pytest.raises(Exception, match="mismatch the SGL function signature"):
        program.run_batch([("a", "b", "c")], backend=Echo())
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        program.run_batch([("a",)], backend=Echo(), temprature=1)


def test_programs_that_wait_have_no_threads_of_their_own() -> None:
    backend = Echo()
    before = threading.active_count()
    states = [two_turns.run("q", backend=backend) for _ in range(100)]
    assert threading.active_count() <= before
    assert {state.text() for state in states} == {EXPECTED}


def test_bind_keeps_the_speculation() -> None:
    program = sgl.function(two_turns.func, num_api_spec_tokens=8).bind(question="q")
    assert program.num_api_spec_tokens == 8
    assert two_turns.bind(question="q").run(backend=Echo()).text() == EXPECTED
    assert two_turns.bind(question="q").run_batch([("more",)], backend=Echo())[0].text() == EXPECTED
    with pytest.raises(AssertionError, match="has no argument other"):
        program.bind(other=1)


def test_calls_are_cut_out_of_what_a_completion_model_wrote_ahead() -> None:
    class Ahead(Echo):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str, Any]:
            self.calls.append((s.text_, sampling_params))
            return " Ann\nAge: 7\nrest", {}

    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += "Name:" + sgl.gen("name", stop="\n") + "\nAge:" + sgl.gen("age", stop="\n")
        with s.copy() as other:
            other += "\n" + sgl.gen("rest", stop="!")

    backend = Ahead()
    state = program.run(backend=backend)
    assert (state["name"], state["age"], state["rest"]) == (" Ann", " 7", ["rest"])
    assert [(text, p.max_new_tokens, p.stop) for text, p in backend.calls] == [("Name:", 128, None)]


def test_types_of_results() -> None:
    class Scripted(Echo):
        def __init__(self, *texts: str) -> None:
            super().__init__()
            self.texts = list(texts)

        def generate(self, s: Any, sampling_params: Any) -> tuple[str, Any]:
            self.calls.append((s.text_, sampling_params))
            return self.texts.pop(0), {}

    @sgl.function
    def program(s: Any, kind: Any) -> None:
        s += sgl.gen("x", type=kind)

    cases = [(int, "12", 12), (Literal["a.b", "c"], "a.b", "a.b"), (bool, "True", True)]
    for kind, text, value in [*cases, (list[int], "[1, 2]", [1, 2])]:
        state = program.run(kind, backend=Scripted(text))
        assert (state["x"], state.text()) == (value, text)
    backend = Scripted("c")
    program.run(Literal["a.b", "c"], backend=backend)
    assert backend.calls[0][1].regex == r"a\.b|c"
    with pytest.raises(ProgramError, match="is no whole list"):
        program.run(list[int], backend=Scripted("[1,")).text()


def test_dtypes_become_regular_expressions_and_the_value_stays_a_string() -> None:
    stop = ["x"]
    params = SglSamplingParams(dtype="int", stop=stop).constrained()
    assert (params.regex, params.stop, stop) == (REGEX_INT, ["x", " ", "\n"], ["x"])
    with pytest.warns(UserWarning, match="is used"):
        SglSamplingParams(dtype=float, regex="a").constrained()
    with pytest.raises(ValueError, match="one of int, float, str, bool works"):
        SglSamplingParams(dtype=list).constrained()
    assert sgl.gen_int("i").sampling_params.dtype is int
    assert sgl.gen_string("i", 3, 2).sampling_params.n == 2


def test_thinking_and_answer_are_separate_variables() -> None:
    class Thinks(Echo):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str, Any]:
            return "<think>so</think>yes", {}

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("q")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3"))

    state = program.run(backend=Thinks())
    assert state["a"].strip() == "yes" and state["a_reasoning_content"].strip() == "so"
    assert "think" not in state.text()
    with pytest.raises(ValueError, match="needs a name"):
        program.func(state, *[]) if False else sgl.separate_reasoning(sgl.gen(), "qwen3").expr_list[
            1
        ].name


def test_images_are_in_the_text_and_in_the_messages() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user(sgl.image(b"abc") + "what?" + sgl.image(b"d"))
        s += sgl.assistant(sgl.gen("a"))
        s += sgl.user("again")

    state = program.run(backend=Echo())
    assert state.text().startswith("USER:<image>what?<image>\n")
    content = state.messages()[0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "image_url"]
    assert content[1]["image_url"]["url"] == "data:image/jpeg;base64,YWJj"
    assert state.messages()[2]["content"] == "again"
    assert len(state.stream_executor.images_) == 2


def test_a_draw_of_a_choice_repeats_with_the_seed() -> None:
    from radixlm.lang.choices import ChoicesDecision, drawn

    decision = ChoicesDecision("a", {"normalized_prompt_logprobs": [-0.1, -0.2, -9.0]})
    random.seed(1)
    first = [drawn(decision, ["a", "b", "c"], 1.0).decision for _ in range(200)]
    random.seed(1)
    assert first == [drawn(decision, ["a", "b", "c"], 1.0).decision for _ in range(200)]
    assert {"a", "b"} <= set(first) and first.count("c") < 5
    assert drawn(decision, ["a", "b", "c"], 0.0) is decision


def test_names_of_the_reference() -> None:
    params = SglSamplingParams(max_new_tokens=3, stop=[])
    state = run_program(two_turns, Echo(), ("q",), {}, params, False, sync=True)
    assert state.text() == EXPECTED
    (state,) = run_program_batch(two_turns, Echo(), [{"question": "q"}], params, "auto", False)
    assert state.text() == EXPECTED
    assert two_turns.__name__ == "two_turns"
    assert two_turns.compile() is two_turns
    for name in sgl.__all__:
        assert name in dir(sgl)
        if name not in ("OpenAI", "Anthropic", "LiteLLM", "VertexAI"):
            getattr(sgl, name)


def test_a_read_ends_though_an_answer_comes_after_the_functions_error() -> None:
    backend = Waiting()

    class Pieces(Waiting):
        def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[tuple[str, Any]]:
            assert self.go.wait(LIMIT_S)
            yield "late", {}

    backend = Pieces()

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        raise LookupError("mine")

    state = program.run(backend=backend, stream=True)
    assert isinstance(in_time(state.error), LookupError)
    backend.go.set()
    executor = state.stream_executor
    in_time(lambda: executor._wait(lambda: executor.variables.get("x") == "late", LIMIT_S))
    assert in_time(lambda: state["x"]) == "late"


def test_the_functions_error_comes_before_the_streams_end(monkeypatch: Any) -> None:
    ended: list[Any] = []
    end = StreamExecutor.end

    def note(self: StreamExecutor) -> None:
        ended.append(self.error_)
        end(self)

    @sgl.function
    def program(s: Any) -> None:
        raise LookupError("mine")

    monkeypatch.setattr(StreamExecutor, "end", note)
    state = program.run(backend=Echo(), stream=True)
    with pytest.raises(ProgramError, match="mine"):
        in_time(lambda: list(state.text_iter()))
    assert [type(error) for error in ended] == [LookupError]


def test_forks_and_separated_variables_of_a_stream_end() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3")
        assert "".join(s.text_iter()) == "[0]"
        (child,) = s.fork(1)
        child += "x" + sgl.gen("b")
        assert "".join(child.text_iter()) == "[0]x[4]"
        return child

    for backend in (Echo(), _set(Waiting())):
        state = program.run(backend=backend, stream=True)
        assert in_time(lambda s=state: s["a"]) == "[0]", "also before the function has begun"
        assert in_time(state.text) == "[0]"
        child = state.ret_value
        assert in_time(lambda c=child: "".join(c.text_iter())) == "[0]x[4]"
        assert in_time(lambda s=state: "".join(s.fork(1)[0].text_iter())) == "[0]"

    async def read() -> list[str]:
        plain = program.run(backend=Echo())
        return [piece async for piece in plain.ret_value.text_async_iter()]

    assert in_time(lambda: asyncio.run(read())) == ["[0]x[4]"]


def test_a_streamed_text_is_what_was_generated_not_its_value() -> None:
    class Words(Echo):
        def generate(self, s: Any, sampling_params: Any) -> Any:
            return ('{"a": "b"}', {}) if (sampling_params.n or 1) == 1 else (["x", "y"], [{}, {}])

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("value", type=dict[str, str]) + sgl.gen() + sgl.gen("many", n=2)

    state = program.run(backend=Words(), stream=True)
    assert in_time(lambda: "".join(state.text_iter("value"))) == '{"a": "b"}'
    assert in_time(lambda: "".join(state.text_iter())) == '{"a": "b"}{"a": "b"}x'
    assert (state["value"], state["many"]) == ({"a": "b"}, ["x", "y"])
    assert state.stream_executor.variables.keys() == {"value", "many"}


def test_an_interrupt_leaves_no_reader_waiting() -> None:
    class Interrupted(Echo):
        def generate(self, s: Any, sampling_params: Any) -> Any:
            raise KeyboardInterrupt

    kept: list[Any] = []

    @sgl.function
    def program(s: Any) -> None:
        kept.append(s)
        s += sgl.gen("a")

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=Interrupted())
    with pytest.raises(ProgramError, match="KeyboardInterrupt"):
        in_time(kept[0].text)


def test_a_variable_of_another_state_is_awaited_outside_of_the_backends_thread() -> None:
    backend = Waiting()

    @sgl.function
    def first(s: Any) -> None:
        s += sgl.gen("a")

    @sgl.function
    def second(s: Any, other: Any) -> None:
        s += SglVariable("a", other) + "!"

    other = first.run(backend=backend)
    state = second.run(other, backend=backend)
    backend.go.set()
    assert in_time(state.text) == "[0]!"


def test_a_fork_of_a_stream_is_read_in_other_threads() -> None:
    go = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        (child,) = s.fork(1)
        child += "a" + sgl.gen("x")
        s.set_var("child", child)
        assert in_time(child.text) == "a[1]", "a thread of the function's own"
        assert go.wait(LIMIT_S)
        child += "b"

    state = program.run(backend=Echo(), stream=True)
    pieces = in_time(lambda: state["child"]).text_iter()
    assert in_time(lambda: next(pieces)) in ("a", "a[", "a[1", "a[1]")
    go.set()
    assert in_time(lambda: "".join(pieces)).endswith("b"), "until the function has ended"


def test_numbers_and_strings_take_the_arguments_of_gen_in_their_order() -> None:
    for make in (sgl.gen_int, sgl.gen_string):
        params = make("a", 4, 1, ["x"], [7], 0.5).sampling_params
        assert (params.stop, params.stop_token_ids, params.temperature) == (["x"], [7], 0.5)


def test_verbosity_prints_the_text_of_each_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    two_turns.run("q", backend=Echo())
    assert capsys.readouterr().out == EXPECTED + "\n"


def test_special_tokens_of_the_output_follow_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies: list[dict[str, Any]] = []

    class Posts(GenerateBackend):
        is_immediate = True

        def _post(self, body: dict[str, Any]) -> Any:
            bodies.append(body)
            return {"text": "x", "meta_info": {}}

        def _stream(self, body: dict[str, Any]) -> Any:
            raise NotImplementedError

    for value in (True, False):
        monkeypatch.setattr(sgl.global_config, "skip_special_tokens_in_output", value)
        two_turns.run("q", backend=Posts())
    sent = [body["sampling_params"]["skip_special_tokens"] for body in bodies]
    assert sent == [True, True, False, False]


def test_a_template_is_one_call() -> None:
    class Filled(Echo):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str, Any]:
            self.calls.append((s.text_, sampling_params))
            return '{"name": "A(b", "age": 41, "side": "south."}', {"completion_tokens": 9}

    backend = Filled()

    @sgl.function
    def program(s: Any) -> None:
        s += "Fill in: " + sgl.template(
            '{"name": "',
            sgl.gen("name", regex=r"([A-Z]\(|x)[a-z]+", max_tokens=6),
            '", "age": ',
            SglGen("age", sgl.gen("", 4, dtype=int).sampling_params, int),
            ', "side": "',
            sgl.select("side", ["north", "south."]),
            '"}',
        )
        s += "!"

    state = program.run(backend=backend)
    assert (state["name"], state["age"], state["side"]) == ("A(b", 41, "south.")
    assert state.text() == 'Fill in: {"name": "A(b", "age": 41, "side": "south."}!'
    ((text, params),) = backend.calls
    assert (text, params.max_new_tokens) == ("Fill in: ", 10)
    assert params.regex == (
        r'\{"name":\ "((?:[A-Z]\(|x)[a-z]+)",\ "age":\ ([-+]?[0-9]+[ \n]*)'
        r',\ "side":\ "(north|south\.)"\}'
    )


def test_a_template_that_cannot_be_one_call_says_so() -> None:
    with pytest.raises(ValueError, match=r"Gen\('a'\) in a template needs a regex"):
        sgl.template("x", sgl.gen("a"))
    with pytest.raises(sgl.ProgramError, match="is no whole template: more max_tokens"):
        sgl.function(lambda s: s.__iadd__(sgl.template("x", sgl.gen("a", regex="[a-z]")))).run(
            backend=Echo()
        )["a"]
