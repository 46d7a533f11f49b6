"""Reasoning parsers: any chunks give the same result, markers never leak, reasoning combines with
tools."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.text.reasoning import registry
from radixlm.text.reasoning.base import split_all
from radixlm.text.reasoning.table import MARKERS
from radixlm.text.tools import registry as tool_registry
from radixlm.text.tools.base import join_deltas

EXAMPLES: list[tuple[str, str, str, str]] = [
    ("deepseek-r1", "I think\n</think>\n\nAnswer", "I think", "Answer"),
    ("deepseek-r1", "<think>\nI think\n</think>\n\nAnswer", "I think", "Answer"),
    ("deepseek-r1", "never ends", "never ends", ""),
    ("step3", "hm</think>yes", "hm", "yes"),
    ("qwen3", "<think>\nI think\n</think>\n\nAnswer", "I think", "Answer"),
    ("qwen3", "<think>\n\n</think>\n\nAnswer", "", "Answer"),
    ("qwen3", "\n\nAnswer \n", "", "\n\nAnswer \n"),
    ("qwen3", "  ", "", "  "),
    ("qwen3", "a <thin", "", "a <thin"),
    ("qwen3", "</think>\n\nAnswer", "", "Answer"),
    ("qwen3", "a <think>b</think> c <think>d</think>e", "b", "a c <think>d</think>e"),
    ("qwen3", "<think>b</think>\n\n<think> opens it,</think>c", "b", "<think> opens it,</think>c"),
    ("qwen3", "<think>b</think>c</think> d", "b", "c d"),
    ("kimi", "◁think▷b◁/think▷c◁think▷d◁/think▷e", "b\nd", "ce"),
    ("qwen3", "<think>I <tool_call>{}</tool_call>", "I", "<tool_call>{}</tool_call>"),
    ("qwen3-thinking", "hm</think>yes", "hm", "yes"),
    ("deepseek-v3", "<think>hm</think>yes", "hm", "yes"),
    ("deepseek-v3", "yes", "", "yes"),
    ("glm45", "\n<think>hm</think>\nyes", "hm", "yes"),
    ("kimi", "◁think▷hm◁/think▷yes", "hm", "yes"),
    ("kimi_k2", "<think>hm<|tool_calls_section_begin|>x", "hm", "<|tool_calls_section_begin|>x"),
    ("mistral", "[THINK]hm[/THINK]yes", "hm", "yes"),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
        "hm",
        "yes",
    ),
    ("gpt-oss", "hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>", "hm", "yes"),
    ("gpt-oss", "<|channel|>analysis<|mess", "", ""),
    ("gpt-oss", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>comm", "", "a"),
    ("gpt-oss", "<|channel|>final {no header", "<|channel|>final {no header", ""),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "a\nb",
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    ),
    ("minimax", "hm</think>yes", "hm", "yes"),
    ("minimax-append-think", "hm</think>yes", "", "<think>hm</think>yes"),
    ("minimax-m3", "<mm:think>hm</mm:think>yes", "hm", "yes"),
    ("minimax-m3", "</mm:think>yes", "", "yes"),
    ("gemma4", "<|channel>thought\nhm\n<channel|>yes", "hm", "yes"),
    (
        "apertus2509",
        "<|inner_prefix|>a <|tools_prefix|>[{}]<|tools_suffix|> b<|inner_suffix|>yes",
        "a\nb",
        "<|tools_prefix|>[{}]<|tools_suffix|>yes",
    ),
    ("cohere_command4", "hm<|END_THINKING|><|START_TEXT|>yes<|END_TEXT|>", "hm", "yes"),
    ("cohere_command4", "<|START_TEXT|>yes<|END_TEXT|>", "", "yes"),
    (
        "kimi_k3",
        "hm<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>"
        "<|open|>tools<|sep|>",
        "hm",
        "yes<|open|>tools<|sep|>",
    ),
    (
        "inkling",
        "<|message_model|><|content_thinking|>hm<|end_message|><|message_model|>"
        "<|content_text|>yes<|end_message|><|content_model_end_sampling|>",
        "hm",
        "yes",
    ),
    (
        "muse",
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>yes<|eot|>",
        "hm",
        "yes",
    ),
    ("k2_horizon", "<ifm|think_fast>hm</ifm|think_fast>yes", "hm", "yes"),
    ("hunyuan", "<think>\nhm\n</think>\n<answer>\nyes</answer>", "hm", "yes"),
    ("granite", "Here is my thought process: hm Here is my response: yes", "hm", "yes"),
    ("granite", "<think>hm</think><response>yes</response>", "hm", "yes"),
    ("nemotron_3", "<think>hm</think>yes", "hm", "yes"),
    ("interns1", "<think>hm<|action_start|>x", "hm", "<|action_start|>x"),
    ("mimo", "<think>hm</think>yes", "hm", "yes"),
    ("seed_oss", "<seed:think>hm</seed:think>yes", "hm", "yes"),
]  # fmt: skip


def split_in(name: str, chunks: list[str], **options: Any) -> tuple[str, str]:
    parser = registry.create(name, **options)
    parts = [*map(parser.feed, chunks), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(("name", "message", "reasoning", "text"), EXAMPLES)
def test_documented_message(name: str, message: str, reasoning: str, text: str) -> None:
    assert split_all(registry.create(name), message) == (reasoning, text)
    assert split_in(name, list(message)) == (reasoning, text)


@pytest.mark.parametrize("name", registry.NAMES)
@settings(max_examples=10, derandomize=True, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999))
def test_any_chunks_give_the_same(name: str, data: st.DataObject, seed: int) -> None:
    markers = MARKERS[name]
    alphabet = [
        *markers.starts, *markers.ends, *markers.breaks, *markers.stripped, markers.resume, "a",
        "b\n", " ", "\n\n", "<", "<|", "日本", "<|start|>assistant", "<|end|>", "<|channel|>final",
        "<|message|>", "<|call|>", " to=functions.f", *(s[:-2] for s in markers.starts),
    ]  # fmt: skip
    pieces = data.draw(st.lists(st.sampled_from(alphabet), max_size=9))
    message = "".join(pieces)
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(message) + 1), k=6))
    chunks = [message[a:b] for a, b in zip([0, *cuts], [*cuts, len(message)], strict=True)]
    for options in ({}, {"starts_inside": bool(seed % 2)}, {"stream_reasoning": False}):
        whole = split_in(name, [message], **options)
        assert split_in(name, chunks, **options) == whole
        assert split_in(name, list(message), **options) == whole


# the names of SGLang; "beam" is documented nowhere
TABLE = (
    "deepseek-r1 step3 step3p5 gigachat35 deepseek-v3 glm45 qwen3 qwen3-thinking minimax kimi "
    "gpt-oss kimi_k2 mistral nemotron_3 granite_thinking_parser interns1 mimo poolside_v1 dots "
    "nanbeige ling3 minimax-append-think minimax-m3 gemma4 apertus2509 cohere_command4 hunyuan "
    "deepseek-v4 deepseek-v41 kimi_k3 k2_horizon muse inkling iquest_q1"
).split()


def test_every_name_of_the_table_is_there() -> None:
    assert set(TABLE) <= set(registry.NAMES)


@pytest.mark.parametrize("name", registry.NAMES)
def test_five_hundred_splits(name: str) -> None:
    """One message with all markers of the format, split at random."""
    markers = MARKERS[name]
    message = f"{markers.starts[0]}a <b\n{markers.ends[0]}\n\nc </d {''.join(markers.breaks)}e"
    message += "".join(markers.stripped) + markers.starts[-1][:-1]
    whole = split_in(name, [message])
    rng = random.Random(name)
    for _ in range(500):
        cuts = sorted(rng.choices(range(len(message) + 1), k=rng.randint(1, 8)))
        pairs = zip([0, *cuts], [*cuts, len(message)], strict=True)
        assert split_in(name, [message[a:b] for a, b in pairs]) == whole


@pytest.mark.parametrize("name", [n for n in registry.NAMES if n != "minimax-append-think"])
@settings(max_examples=10, derandomize=True, deadline=None)
@given(data=st.data())
def test_markers_never_leak_and_no_word_is_lost(name: str, data: st.DataObject) -> None:
    markers = MARKERS[name]
    if name == "gpt-oss":
        units = ["<|start|>assistant<|channel|>final<|message|>", "<|end|>", *markers.starts]
    else:
        units = [*markers.starts, *markers.ends, *markers.stripped]
    parts = data.draw(st.lists(st.sampled_from([*units, "w ", "x", "\n"]), max_size=8))
    reasoning, text = split_all(registry.create(name), "".join(parts))
    is_quoted = not markers.is_special and any(start in text for start in markers.starts)
    for unit in units:
        assert unit not in reasoning
        assert unit not in text or (is_quoted and unit not in markers.stripped)
    shown = (reasoning + text).count("w") + (reasoning + text).count("x")
    assert shown == sum(part in ("w ", "x") for part in parts)


@pytest.mark.parametrize("name", registry.NAMES)
def test_where_the_prompt_ends_decides_where_the_answer_starts(name: str) -> None:
    markers = MARKERS[name]
    assert registry.starts_inside(name, "user: hi\n" + markers.starts[0] + "\n")
    assert not registry.starts_inside(name, markers.starts[0] + "\n\n" + markers.ends[0] + "\n\n")
    assert registry.starts_inside(name, "what is " + markers.starts[0] + "? ai:") == (
        markers.is_inside
    )


def test_reasoning_streams_unless_it_is_buffered() -> None:
    chunks = ["one ", "two</th", "ink>", "yes"]
    streaming = registry.create("deepseek-r1")
    assert [streaming.feed(chunk) for chunk in chunks] == [
        ("one", ""), (" two", ""), ("", ""), ("", "yes"),
    ]  # fmt: skip
    held = registry.create("deepseek-r1", stream_reasoning=False)
    assert [held.feed(chunk) for chunk in chunks] == [
        ("", ""), ("", ""), ("one two", ""), ("", "yes"),
    ]  # fmt: skip
    cut = registry.create("deepseek-r1", stream_reasoning=False)
    assert (cut.feed("one"), cut.finish()) == (("", ""), ("one", ""))


TEMPLATES = [
    ("qwen3", "<think> {% if enable_thinking is false %}", None),
    ("qwen3-thinking", "{{- '<|im_start|>assistant\\n<think>\\n' }} </think>", None),
    ("deepseek-r1", "'<｜Assistant｜><think>\\n' </think>", None),
    ("deepseek-v3", "{% if thinking %}<｜Assistant｜><think>{% else %}</think>", None),
    ("deepseek-v4", "<think> <｜DSML｜tool_calls>", None),
    ("glm45", "<think></think> <arg_key> enable_thinking", None),
    ("gpt-oss", "<|channel|>analysis<|message|>", None),
    ("kimi", "◁think▷", None),
    ("kimi_k2", "<think></think> <|tool_calls_section_begin|>", None),
    ("mistral", "[THINK]", None),
    ("minimax", "<minimax:tool_call> <think>", None),
    ("minimax-m3", "<mm:think>", None),
    ("gemma4", "<|channel>thought <channel|>", None),
    ("cohere_command4", "<|START_THINKING|>", None),
    ("apertus2509", "<|inner_prefix|>", None),
    ("granite", "<|start_of_role|> <think>", None),
    ("hunyuan", "<think> <answer>", None),
    ("step3", "<think> <｜tool_calls_begin｜>", None),
    ("interns1", "<think> <|action_start|>", None),
    ("seed_oss", "<seed:think>", None),
    ("deepseek-r1", "{{ prefix }}", "ai: <think>\n"),
    ("qwen3", "<think>", "ai:"),
    (None, "{{ messages }}", "ai:"),
]


@pytest.mark.parametrize(("name", "template", "prompt"), TEMPLATES)
def test_templates_are_recognised(name: str | None, template: str, prompt: str | None) -> None:
    assert registry.detect(template, prompt) == name


def test_properties_of_a_parser() -> None:
    assert registry.end_marker("qwen3") == "</think>"
    assert registry.end_marker("gpt-oss") == "<|channel|>final<|message|>"
    assert registry.template_switch("qwen3") == ("enable_thinking", True)
    assert registry.template_switch("deepseek-v3") == ("thinking", False)
    assert registry.template_switch("deepseek-r1") is None
    assert registry.keep_special_tokens("mistral")
    assert not registry.keep_special_tokens("qwen3")
    with pytest.raises(ConfigError, match=r"--reasoning-parser 'quark'.*qwen3"):
        registry.create("quark")


COMPOSED = [
    (
        "qwen3",
        "qwen25",
        "<think>\nhm\n</think>\n\nOn it.\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": "</think>"}}'
        "\n</tool_call>",
        "On it.",
    ),
    ("kimi_k2", "kimi_k2", "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     '<|tool_call_argument_begin|>{"a": "</think>"}<|tool_call_end|>', ""),
    ("gpt-oss", "gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
     "commentary<|message|>On it.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"a": "</think>"}<|call|>', "On it."),
    ("minimax", "minimax-m2", 'hm</think>\n<minimax:tool_call>\n<invoke name="f">\n'
     '<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>', ""),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "tools", "message", "shown"), COMPOSED)
@pytest.mark.parametrize("num_chars", [1, 7, 1000])
def test_reasoning_and_tools_compose(
    reasoning: str, tools: str, message: str, shown: str, num_chars: int
) -> None:
    splitter, parser = registry.create(reasoning), tool_registry.create(tools)
    thought, text, deltas = "", "", []
    chunks = [message[i : i + num_chars] for i in range(0, len(message), num_chars)]
    for new_thought, answer in [*map(splitter.feed, chunks), splitter.finish()]:
        parsed = parser.feed(answer)
        thought, text = thought + new_thought, text + parsed.text
        deltas += parsed.calls
    last = parser.finish()
    (call,) = join_deltas([*deltas, *last.calls])
    assert (thought, text + last.text, call.name) == ("hm", shown, "f")
    assert list(json.loads(call.arguments)) == ["a"]
