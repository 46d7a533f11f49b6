"""The state machine below the formats: what is streamed when, what is closed, what is dropped."""

import json
import time

import pytest

from radixlm.text.tools import registry
from radixlm.text.tools.base import ParsedText, ToolSpec, join_deltas, parse_all

TOOL = ToolSpec("f", {"type": "object", "properties": {"a": {"type": "string"}}})


def feed(name: str, *chunks: str, drop_unknown: bool = False) -> list[ParsedText]:
    parser = registry.create(name, [TOOL], drop_unknown=drop_unknown)
    return [*map(parser.feed, chunks), parser.finish()]


def test_the_name_comes_first_then_the_arguments() -> None:
    parts = feed(
        "hermes", '<tool_call>{"name": "f", "arguments": ', '{"a": "x', 'y"}}', "</tool_call>"
    )
    assert [[(d.name, d.arguments) for d in part.calls] for part in parts] == [
        [], [("f", ""), (None, '{"a": "x')], [(None, 'y"}')], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("minimax-m2", '<invoke name="f"><parameter name="a">'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
    ],
)
def test_a_string_goes_out_while_it_arrives(name: str, opening: str) -> None:
    parts = feed(name, opening, "one ", "two ")
    assert "".join(d.arguments for d in parts[1].calls).endswith("one ")
    assert [d.arguments for d in parts[2].calls] == ["two "]


def test_text_is_held_only_while_it_may_be_a_marker() -> None:
    texts = [part.text for part in feed("hermes", "a", "b <", "tool_c", "ake>", " \n", "c")]
    assert texts == ["a", "b", "", " <tool_cake>", "", " \nc", ""]


@pytest.mark.parametrize(
    ("arguments", "closed", "rest"),
    [
        ('{"a": "x', {"a": "x"}, ""),
        ('{"a": ["x", {"b": 1', {"a": ["x", {}]}, '"b": 1'),
        ('{"a": 1, "b": tr', {"a": 1}, ', "b": tr'),
        ('{"a": 1, "b": oops}} more', {"a": 1}, ', "b": oops}} more'),
        ("{", {}, ""),
    ],
)
def test_a_broken_streamed_call_is_closed_and_reported(
    arguments: str, closed: dict[str, object], rest: str
) -> None:
    parts = feed("hermes", '<tool_call>{"name": "f", "arguments": ' + arguments)
    (call,) = join_deltas(d for part in parts for d in part.calls)
    assert json.loads(call.arguments) == closed
    assert [i for part in parts for i in part.incomplete] == [0]
    assert "".join(part.text for part in parts) == rest


def test_a_whole_call_is_not_incomplete_without_its_end_marker() -> None:
    parts = feed("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_')
    assert all(not part.incomplete for part in parts)
    assert "".join(part.text for part in parts) == ""


def test_the_end_of_the_message_behind_a_call_is_no_text() -> None:
    call = 'function call<|role_sep|>\n{"name": "f", "arguments": {"a": "1"}}'
    parts = feed("gigachat3", f"Good.<|message_sep|>\n\n{call}</s>")
    assert "".join(part.text for part in parts) == "Good."
    assert [c.name for c in join_deltas(d for part in parts for d in part.calls)] == ["f"]


def test_unknown_functions_pass_or_are_dropped_without_a_gap_in_the_index() -> None:
    def block(name: str) -> str:
        return '<tool_call>{"name": "' + name + '", "arguments": {"a": "1"}}</tool_call>'

    message = "x" + block("g") + block("f") + "y"
    passed = feed("hermes", message)
    assert [(d.index, d.name) for d in passed[0].calls if d.name] == [(0, "g"), (1, "f")]
    (part, _) = feed("hermes", message, drop_unknown=True)
    assert [(d.index, d.name) for d in part.calls if d.name] == [(0, "f")]
    assert part.text == "xy"


def test_a_finished_parser_returns_nothing() -> None:
    parser = registry.create("hermes")
    parser.feed("a <")
    assert parser.finish().text == " <"
    assert parser.finish() == parser.feed("b") == ParsedText("", [])


@pytest.mark.parametrize("depth", [100, 5000])
def test_deep_nesting_needs_no_stack(depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    text, calls = parse_all(
        registry.create("hermes"),
        '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>",
    )
    json.loads(calls[0].arguments)
    assert (text == "") == (depth == 100)


@pytest.mark.parametrize("name", registry.NAMES)
def test_time_is_linear_in_the_length(name: str) -> None:
    """Repeated openings that never become a call are the worst case."""
    parser = registry.create(name)
    unit = "".join(getattr(type(parser), "starts", ())) + "<parameter=a>{[\"'"
    start = time.process_time()
    text, _ = parse_all(registry.create(name), unit * 300 + "</x>")
    assert time.process_time() - start < 2
    assert len(text) <= len(unit) * 300 + 4


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "mistral"])
def test_openings_in_a_long_text_do_not_copy_its_rest(name: str) -> None:
    unit = getattr(type(registry.create(name)), "starts", ())[0]
    start = time.thread_time()
    assert parse_all(registry.create(name), unit * 10_000 + "x" * 6_000_000)[1] == []
    assert time.thread_time() - start < 4
