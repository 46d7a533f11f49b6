"""Every tool-call format: written calls are parsed from any chunks, and broken calls stay text."""

import json
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.text.tools import registry
from radixlm.text.tools.base import ParsedCall, ToolSpec, join_deltas, parse_all

Call = tuple[str, dict[str, object]]

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array"},
        "extra": {"$ref": "#/$defs/extra"},
    },
    "$defs": {"extra": {"type": "object"}},
}
NAMES = ("put", "get_weather", "mcp__x-1")
TOOLS = [ToolSpec(name, SCHEMA) for name in NAMES]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def is_string(value: object) -> str:
    return "true" if isinstance(value, str) else "false"


# writers: the calls of one block as a model writes them


def each(template: str, glue: str = "\n", around: str = "{}") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        parts = [
            template.replace("§n", name).replace("§a", dumps(arguments)).replace("§i", str(i))
            for i, (name, arguments) in enumerate(calls)
        ]
        return around.replace("{}", glue.join(parts))

    return write


def tags(
    around: tuple[str, str],
    call: tuple[str, str],
    pair: str,
    glue: str = "\n",
    encode: Callable[[object], str] = raw,
) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        blocks = []
        for name, arguments in calls:
            pairs = [
                pair.replace("§k", key).replace("§s", is_string(value)).replace("§v", encode(value))
                for key, value in arguments.items()
            ]
            parts = [call[0].replace("§n", name), *pairs, call[1]]
            blocks.append(glue.join(parts))
        return around[0] + glue.join(blocks) + around[1]

    return write


def pythonic(around: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        texts = [
            f"{name.replace('-', '_')}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
            for name, arguments in calls
        ]
        return around.replace("CALLS", ", ".join(texts)).replace("LINES", "\n".join(texts))

    return write


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return dumps(value)


def gemma_calls(calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{n}{gemma(a)}<tool_call|>" for n, a in calls)


M3 = "]<]minimax[>["
ARG = "<arg_key>§k</arg_key>\n<arg_value>§v</arg_value>"
OBJECT = '{"name": "§n", "arguments": §a}'
PARAMETER = '<parameter name="§k">§v</parameter>'
INVOKE = ('<invoke name="§n">', "</invoke>")


def dsml(prefix: str, outer: str) -> Callable[[list[Call]], str]:
    return tags(
        (f"<{prefix}{outer}>\n", f"\n</{prefix}{outer}>"),
        (f'<{prefix}invoke name="§n">', f"</{prefix}invoke>"),
        f'<{prefix}parameter name="§k" string="§s">§v</{prefix}parameter>',
    )


def named_json(calls: list[Call]) -> str:
    return "<|tools_prefix|>" + dumps([{name: a} for name, a in calls]) + "<|tools_suffix|>"


def mistral(calls: list[Call]) -> str:
    if len(calls) % 2:
        return each("[TOOL_CALLS]§n[ARGS]§a", "")(calls)
    return each(OBJECT, ", ", "[TOOL_CALLS] [{}]")(calls)


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": each(f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen25": each('<tool_call>{"arguments": §a, "name": "§n"}</tool_call>', ""),
    "trinity": each(f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "llama3": each('{"name": "§n", "parameters": §a}', "; ", "<|python_tag|>{}"),
    "json": each('{"name":"§n","parameters":§a}', ",", "[{}]"),
    "mistral": mistral,
    "deepseekv3": each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>§n\n```json\n§a\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    "deepseekv31": each(
        "<｜tool▁call▁begin｜>§n<｜tool▁sep｜>§a<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": each(
        "<|tool_call_begin|>functions.§n:§i<|tool_call_argument_begin|>§a<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    ),
    "gpt-oss": each(
        "<|channel|>commentary to=functions.§n <|constrain|>json<|message|>§a<|call|>",
        "<|start|>assistant",
    ),
    "interns1": each('<|action_start|> <|plugin|>\n{"name": "§n", "parameters": §a}<|action_end|>'),
    "cohere_command4": each(
        '{"tool_call_id": "§i", "tool_name": "§n", "parameters": §a}',
        ",\n    ",
        "<|START_ACTION|>[\n    {}\n]<|END_ACTION|>",
    ),
    "apertus2509": named_json,
    "granite": each(OBJECT, ", ", "<|tool_call|>[{}]"),
    "phi4": each(OBJECT, ", ", "functools[{}]"),
    "gigachat3": each(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}<|message_sep|>", ""),
    "inkling": each(
        '<|message_model|>§n<|content_invoke_tool_json|>{"name":"§n","args":§a}<|end_message|>',
        "",
    ),
    "qwen3_coder": tags(
        ("", ""),
        ("<tool_call>\n<function=§n>", "</function>\n</tool_call>"),
        "<parameter=§k>\n§v\n</parameter>",
    ),
    "seed_oss": tags(
        ("", ""),
        ("<seed:tool_call>\n<function=§n>", "</function>\n</seed:tool_call>"),
        "<parameter=§k>\n§v\n</parameter>",
    ),
    "glm45": tags(("", ""), ("<tool_call>§n", "</tool_call>"), ARG),
    "glm47": tags(("", ""), ("<tool_call>§n", "</tool_call>"), ARG.replace("\n", ""), ""),
    "poolside_v1": tags(("", ""), ("<tool_call>§n", "</tool_call>"), ARG.replace("§v", "\n§v\n")),
    "hunyuan": tags(
        ("<tool_calls>\n", "\n</tool_calls>"), ("<tool_call>§n<tool_sep>", "</tool_call>"), ARG
    ),
    "iquest_q1": tags(("", ""), ("<iquest_tool_call>§n\n", "</iquest_tool_call>"), ARG, ""),
    "k2_horizon": tags(
        ("<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
        ("<ifm|tool_call>§n", "</ifm|tool_call>"),
        ARG.replace("arg_", "ifm|arg_"),
    ),
    "step3": tags(
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="§n">',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        '<steptml:parameter name="§k">§v</steptml:parameter>',
        "",
    ),
    "deepseekv32": dsml("｜DSML｜", "function_calls"),
    "deepseekv4": dsml("｜DSML｜", "tool_calls"),
    "deepseekv41": dsml("｜DSML｜ ", "calls"),
    "gigachat35": dsml("｜GCML｜", "tool_calls"),
    "minimax-m2": tags(("<minimax:tool_call>\n", "\n</minimax:tool_call>"), INVOKE, PARAMETER),
    "dots": tags(("<dots_function_call>\n", "\n</dots_function_call>"), INVOKE, PARAMETER),
    "muse": tags(
        ("<atem:function_calls>\n", "\n</atem:function_calls>"),
        ('<atem:invoke name="§n">', "</atem:invoke>"),
        '<atem:parameter name="§k">§v</atem:parameter>',
    ),
    "minicpm5": tags(
        ("", ""), ('<function name="§n">', "</function>"), '<param name="§k">§v</param>', ""
    ),
    "minimax-m3": tags(
        (f"{M3}<tool_call>\n", f"\n{M3}</tool_call>"),
        (f'{M3}<invoke name="§n">', f"{M3}</invoke>"),
        f"{M3}<§k>§v{M3}</§k>",
    ),
    "kimi_k3": tags(
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ('<|open|>call tool="§n" index="1"<|sep|>', "<|close|>call<|sep|>"),
        '<|open|>argument key="§k"<|sep|>§v<|close|>argument<|sep|>',
        "",
    ),
    "gemma4": gemma_calls,
    "pythonic": pythonic("[CALLS]"),
    "lfm2": pythonic("<|tool_call_start|>[CALLS]<|tool_call_end|>"),
    "olmo3": pythonic("<function_calls>\nLINES\n</function_calls>"),
}
SAME_AS = {
    "qwen": "hermes", "glm": "glm45", "ling3": "glm45", "spark25": "glm45",
    "step3p5": "qwen3_coder", "nanbeige": "qwen3_coder", "mimo": "qwen3_coder",
}  # fmt: skip

PYTHON_NAMES = ("pythonic", "lfm2", "olmo3")
# text that an unescaped value cannot contain, because it would end the value
CANNOT_HOLD: dict[str, tuple[str, ...]] = {
    "gemma4": ('<|"|>',),
    "minimax-m3": (M3,),
    "minicpm5": ("</param>", "<![CDATA["),
    "kimi_k3": ("<|close|>",),
}
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "</parameter>", "</function>", "<parameter=x>", "</arg_value>",
    "<arg_key>", "[TOOL_CALLS]", "<|call|>", "</invoke>", "{", "}", "[", "]", '"', "'", "\\", "\n",
    "\t", " ", ",", ";", ":", "é", "日本", "🙂", "a", "B7", "null", "12", "\u2028", "<", "\x01",
)  # fmt: skip
SAFE_FRAGMENTS = ("<", "<tool", "[", "{x", "}", "ok", "é", "日本", "\n", " ", "·", '"', "<|", "]<]")

words = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
scalars = st.one_of(
    words, st.integers(-(10**15), 10**15), st.booleans(), st.none(), st.sampled_from([0.5, -2e-3])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner, max_size=1),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "path": words,
        "mode": words | st.none(),
        "count": st.integers(-(10**12), 10**12),
        "ratio": st.sampled_from([0.5, -2e-3, 3]),
        "flag": st.booleans(),
        "tags": st.lists(values, max_size=3),
        "extra": st.dictionaries(st.sampled_from(["k", "long_key"]), values, max_size=2),
    },
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
prose = st.lists(st.sampled_from(SAFE_FRAGMENTS), max_size=5).map("".join)


def split(text: str, seed: int) -> list[str]:
    """`text` split at random places; every third seed splits after each character."""
    rng = random.Random(seed)
    if seed % 3 == 0:
        return list(text)
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse_split(name: str, chunks: list[str]) -> tuple[str, list[ParsedCall]]:
    parser = registry.create(name, TOOLS)
    parts = [parser.feed(chunk) for chunk in chunks]
    parts.append(parser.finish())
    deltas = [delta for part in parts for delta in part.calls]
    return "".join(p.text for p in parts), join_deltas(deltas)


def fit(name: str, block: list[Call]) -> list[Call]:
    """Remove values that the format cannot express."""
    ends = CANNOT_HOLD.get(name, ())
    fitted = []
    for function, given_arguments in block:
        kept = {
            key: value
            for key, value in given_arguments.items()
            if not any(end in raw(value) for end in ends)
            and not (name not in JSON_LIKE and ENDS_A_VALUE.search(raw(value)))
            and not (name in PYTHON_NAMES and "\x01" in raw(value))
            and not (key == "mode" and name not in JSON_LIKE and is_ambiguous(value))
        }
        is_python = name in PYTHON_NAMES
        fitted.append((function.replace("-", "_") if is_python else function, kept))
    return fitted


JSON_LIKE = frozenset(
    name
    for name in WRITERS
    if registry.FORMATS[name].target.split(":")[0]
    in ("hermes", "llama3", "mistral", "deepseek_v3", "kimi_k2", "gpt_oss", "tagged_json",
        "pythonic", "gemma4")
)  # fmt: skip


ENDS_A_VALUE = re.compile(r"</[^>]+>\s*<")


def is_ambiguous(value: object) -> bool:
    """Untagged text of a parameter that may be a string or null."""
    return isinstance(value, str) and value.strip().lower() in ("null", "none")


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=10, derandomize=True, deadline=None)
@given(st.lists(st.tuples(prose, calls), min_size=1, max_size=2), prose, st.integers(0, 99))
def test_written_calls_are_read(
    name: str, parts: list[tuple[str, list[Call]]], tail: str, seed: int
) -> None:
    if name == "json":
        parts, tail = [("", parts[0][1])], ""
    message, expected = "", ""
    written: list[Call] = []
    for text, block in parts:
        fitted = fit(name, block)
        message += text + WRITERS[name](fitted)
        expected += text.rstrip(" \t\r\n")
        written += fitted
    message += tail
    expected += tail if tail.strip(" \t\r\n") else ""
    text, read = parse_all(registry.create(name, TOOLS), message)
    assert [(call.name, json.loads(call.arguments)) for call in read] == written
    assert [call.index for call in read] == list(range(len(written)))
    assert text == expected
    assert parse_split(name, split(message, seed)) == (text, read)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[str], str]:
    seed, num = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    noise = draw(st.sampled_from(("", "x", "<", "}", '"', "\n", "{", "]", "\\u", "\\ud83d", "<|")))

    def mutate(message: str) -> str:
        rng = random.Random(seed)
        for _ in range(num):
            start = rng.randint(0, len(message))
            end = min(len(message), start + rng.choice((0, 1, 3, 12)))
            kind = rng.randrange(4)
            if kind == 0:
                message = message[:start]
            elif kind == 1:
                message = message[:start] + noise + message[end:]
            elif kind == 2:
                message = message[:end] + message[start:]
            else:
                message = message[:start] + message[end:] + message[start:end]
        return message

    return mutate


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=10, derandomize=True, deadline=None)
@given(prose, calls, prose, mutations(), st.integers(0, 99))
def test_broken_messages_parse_equally_in_any_chunks(
    name: str, head: str, block: list[Call], tail: str, mutate: Callable[[str], str], seed: int
) -> None:
    message = mutate(head + WRITERS[name](fit(name, block)) + tail)
    whole = parse_all(registry.create(name, TOOLS), message)
    assert parse_split(name, split(message, seed)) == whole
    assert parse_split(name, list(message)) == whole
    for call in whole[1]:
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(st.floats(0, 1), st.integers(0, 99))
def test_nothing_of_a_cut_message_is_lost(name: str, where: float, seed: int) -> None:
    block: list[Call] = [
        ("put", {"path": "w1 w2\nw3", "tags": ["w4", "w5"], "count": 4711}),
        ("put", {"extra": {"k": "w6"}, "path": "w7"}),
    ]
    message = "w8 w9\n" if name != "json" else ""
    message += WRITERS[name](block)
    cut = message[: int(len(message) * where)]
    text, read = parse_split(name, split(cut, seed))
    shown = text + "".join(call.arguments for call in read)
    for word in (*(f"w{i}" for i in range(1, 10)), "4711"):
        assert (word in shown) or word not in cut, (cut, text, read)


@pytest.mark.parametrize("name", WRITERS)
def test_two_hundred_splits(name: str) -> None:
    """One valid and one broken message, without a generator in between, so it is cheap."""
    block: list[Call] = [("put", {"path": 'é"\n</x>', "tags": [{"k": 1}], "count": 7})]
    sound = "a <b\n" * (name != "json") + WRITERS[name](block) + " z" * (name != "json")
    for message in (sound, sound.replace("7", "{7", 1).replace("1", '"')):
        whole = parse_all(registry.create(name, TOOLS), message)
        for seed in range(1, 1 + 100):
            assert parse_split(name, split(message, 3 * seed + 1)) == whole


@pytest.mark.parametrize(("name", "twin"), SAME_AS.items())
def test_aliases_parse_like_their_format(name: str, twin: str) -> None:
    message = "hi " + WRITERS[twin]([("put", {"path": "a", "count": 3}), ("put", {})])
    assert parse_all(registry.create(name, TOOLS), message) == parse_all(
        registry.create(twin, TOOLS), message
    )


def test_every_format_has_a_writer() -> None:
    assert set(registry.NAMES) == set(WRITERS) | set(SAME_AS)


@pytest.mark.parametrize(
    ("name", "tag"), [("deepseekv32", "function_calls"), ("deepseekv4", "tool_calls")]
)
def test_invocations_without_arguments_may_be_one_tag(name: str, tag: str) -> None:
    invoke = '<｜DSML｜invoke name="put"'
    message = (
        f"<｜DSML｜{tag}>\n{invoke}/>\n{invoke} />\n{invoke}></｜DSML｜invoke>\n</｜DSML｜{tag}>"
    )
    text, read = parse_all(registry.create(name, TOOLS), message)
    assert (text, [(call.name, call.arguments) for call in read]) == ("", [("put", "{}")] * 3)
    for seed in range(20):
        assert parse_split(name, split(message, seed)) == (text, read)
