"""tool_loop: functions that the model calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.lang.backends import LIMIT_S, Echo, in_time

import radixlm as sgl
from radixlm.lang.backend import base_backend
from radixlm.lang.model_template import ModelTemplate
from radixlm.lang.tools import Tool
from radixlm.text.chat import ChatTemplate

SOURCE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Scripted(Echo):
    """Gives its answers one after the other."""

    def __init__(self, *answers: str) -> None:
        super().__init__(ModelTemplate(ChatTemplate(SOURCE)))
        self._answers = list(answers)

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        super().generate(s, sampling_params)
        return self._answers.pop(0), {"completion_tokens": 1}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def add(a: int, b: int = 2) -> int:
    """The sum."""
    return a + b


def fail() -> str:
    """Never works."""
    raise ValueError("no luck")


@sgl.function
def program(s: Any, tools: Any, max_rounds: int) -> None:
    s += sgl.user("What is 1 + 2?")
    s += sgl.assistant(
        sgl.tool_loop("a", tools, max_rounds=max_rounds, parser="hermes", temperature=0)
    )
    s += sgl.user("Thanks.")


def run(backend: Any, *tools: Any, max_rounds: int = 3) -> Any:
    return in_time(lambda: program.run(list(tools), max_rounds, backend=backend))


def test_calls_are_made_and_told() -> None:
    backend = Scripted(call("add", '{"a": 1}') + call("add", '{"a": "x"}'), "It is 3.")
    state = run(backend, add)
    assert state["a"] == "It is 3."
    first, second = state.get_meta_info("a")["tool_calls"]
    assert first == {"name": "add", "arguments": '{"a": 1}', "result": "3"}
    assert second["result"].startswith("Error: ValidationError: 1 validation error")
    assert state.text().endswith(
        "assistant\nIt is 3.<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
    )
    prompts = [text for text, _ in backend.calls]
    assert prompts[0].startswith("<tools>add </tools><|im_start|>user\nWhat is 1 + 2?")
    assert "<|im_start|>tool\n3<|im_end|>" in prompts[1]
    kinds = [(one["kind"], one["name"], one["error"] is None) for one in state.trace()["calls"]]
    assert sorted(kinds) == sorted(
        [
            ("tools", "a", True),
            ("gen", "answer", True),
            ("gen", "answer", True),
            ("tool", "add", True),
            ("tool", "add", False),
        ]
    )


def test_failures_and_unknown_tools_are_told_to_the_model() -> None:
    asked = call("fail", "{}"), call("nothing", "{}"), call("fail", '{"other": 1}')
    state = run(Scripted(*asked, "Sorry."), fail)
    results = [one["result"] for one in state.get_meta_info("a")["tool_calls"]]
    assert results[0] == "Error: ValueError: no luck"
    assert "there is no tool 'nothing'; there are fail" in results[1]
    assert "other\n  Extra inputs are not permitted" in results[2]


def test_the_last_round_offers_no_tools() -> None:
    backend = Scripted(*[call("add", '{"a": 1}')] * 2, "Enough.")
    state = run(backend, add, max_rounds=2)
    assert state["a"] == "Enough."
    assert ["<tools>" in text for text, _ in backend.calls] == [True, True, False]


def test_calls_of_one_round_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=LIMIT_S)

    def meet(who: str) -> str:
        both.wait()
        return who

    asked = call("meet", '{"who": "a"}') + call("meet", '{"who": "b"}')
    state = run(Scripted(asked, "Done."), meet)
    assert [one["result"] for one in state.get_meta_info("a")["tool_calls"]] == ["a", "b"]


async def later(who: str) -> str:
    """A function that awaits."""
    return f"{who} later"


def test_a_function_may_be_async() -> None:
    state = run(Scripted(call("later", '{"who": "a"}'), "Done."), later)
    assert [one["result"] for one in state.get_meta_info("a")["tool_calls"]] == ["a later"]


def test_a_function_that_never_returns_ends_with_the_programs_time() -> None:
    held = threading.Event()

    def hang() -> None:
        held.wait(LIMIT_S)

    backend = Scripted(call("hang", "{}"), "Done.")
    try:
        state = in_time(lambda: program.run([hang], 3, backend=backend, timeout_s=0.5))
        with pytest.raises(sgl.ProgramError, match=r"\(timeout_s\) is over amid a tool"):
            in_time(state.text)
        assert not held.is_set()
    finally:
        held.set()


def test_more_loops_than_threads_for_calls(monkeypatch: Any) -> None:
    pool = base_backend._new_pool(2)
    monkeypatch.setattr(base_backend, "_pool", lambda: pool)
    asks = call("add", '{"a": 1}')

    class Threaded(Scripted):
        is_immediate = False

        def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
            self._answers = ["It is 3." if "tool\n3" in s.text_ else asks]
            return super().generate(s, sampling_params)

    states = [program.run([add], 3, backend=Threaded()) for _ in range(9)]
    try:
        assert [in_time(state.text) for state in states] == [states[0].text()] * 9
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(AssertionError, match="needs tools"):
        sgl.tool_loop("a")
    with pytest.raises(TypeError, match=r"add_all: a tool names its arguments, not \*numbers"):
        Tool(_named("add_all", lambda *numbers: 0))
    with pytest.raises(sgl.ProgramError, match="chat template of its own"):
        run(Echo(), add)["a"]
    assert Tool(add).spec["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "title": "A"},
            "b": {"type": "integer", "title": "B", "default": 2},
        },
        "required": ["a"],
    }


def _named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


def test_the_bundled_model_calls_a_function() -> None:
    cities = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    @sgl.function
    def ask(s: Any) -> None:
        s += sgl.user("What is the weather in Paris?")
        s += sgl.assistant(sgl.tool_loop("a", [get_weather], max_tokens=48, temperature=0))

    with sgl.Engine(log_level="error", cpu_threads=1) as engine:
        state = in_time(lambda: ask.run(backend=engine))
        assert state["a"] and cities[0] == "Paris"
        assert state.get_meta_info("a")["tool_calls"][0]["result"] == "sunny"
