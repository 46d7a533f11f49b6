"""Example messages from the models' documentation, at least one for each format."""

import json

import pytest

from radixlm.text.tools import registry
from radixlm.text.tools.base import ToolSpec, parse_all

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
        },
    },
)
T = "]<]minimax[>["
PARIS = {"city": "Paris"}

EXAMPLES: list[tuple[str, str, str, list[tuple[str, dict[str, object]]]]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "Sure.",
        [("get_weather", PARIS)],
    ),
    (
        "qwen25",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    (
        "trinity",
        '<think>I call <tool_call>{"name": "now", "arguments": {}}</tool_call></think>Done',
        "I callDone",
        [("now", {})],
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "now", "parameters": {}}<|eom_id|>',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    (
        "llama3",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "llama3",
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"days": 1}}}',
        "",
        [("get_weather", {"days": 1})],
    ),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "mistral",
        'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "Let me see.",
        [("get_weather", PARIS), ("now", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "deepseekv3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    (
        "deepseekv31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "deepseekv32",
        "\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">{"a": 1}</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        [("get_weather", {"city": "Paris", "days": 3}), ("now", {"a": 1})],
    ),
    (
        "deepseekv41",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">12</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        "",
        [("get_weather", {"city": "12"})],
    ),
    (
        "pythonic",
        '[get_weather(city="Paris", days=2, options={"a": [1, None, True]}), now()]',
        "",
        [
            ("get_weather", {"city": "Paris", "days": 2, "options": {"a": [1, None, True]}}),
            ("now", {}),
        ],
    ),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='it\\'s', class=3, x=-1.5)]<|python_end|>",
        "",
        [("get_weather", {"city": "it's", "class": 3, "x": -1.5})],
    ),
    ("pythonic", "see [this](http://x/y) and [1]", "see [this](http://x/y) and [1]", []),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "kimi_k3",
        '<|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|>'
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>12<|close|>argument<|sep|>'
        '<|open|>argument key="x" type="object"<|sep|>{"a":1}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "Hi",
        [("get_weather", {"city": "12", "x": {"a": 1}})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\nTexas\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Paris\nTexas", "days": 3})],
    ),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n</parameter> x\n</parameter>\n</tool_call>",
        "",
        [("get_weather", {"city": "</parameter> x"})],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [("get_weather", {"city": "北京", "days": 2})],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        "",
        [("get_weather", {"city": "12"}), ("now", {})],
    ),
    (
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>',
        "Hm.",
        [("get_weather", PARIS)],
    ),
    (
        "gpt-oss",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        [("now", {})],
    ),
    ("gpt-oss", "<|channel|>final<|message|>Hello<|return|>", "Hello", []),
    ("gpt-oss", "<|channel|>commentary to=functions.now <|constr", "", []),
    ("gpt-oss", "a<|channel|>two words {", "a<|channel|>two words {", []),
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="tags">["a"]</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", {"city": "Paris", "tags": ["a"]}), ("now", {})],
    ),
    (
        "minimax-m3",
        f'{T}<tool_call>\n{T}<invoke name="get_weather">{T}<city>Paris{T}</city>'
        f"{T}<tags>{T}<item>a{T}</item>{T}<item>12{T}</item>{T}</tags>"
        f"{T}<options>{T}<k>{T}<n>1{T}</n>{T}</k>{T}</options>{T}</invoke>\n{T}</tool_call>",
        "",
        [("get_weather", {"city": "Paris", "tags": ["a", "12"], "options": {"k": {"n": 1}}})],
    ),
    (
        "interns1",
        'Fine.<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}'
        "<|action_end|>\n",
        "Fine.",
        [("get_weather", PARIS)],
    ),
    (
        "hunyuan",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n</tool_call>\n</tool_calls>",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.',
        "Checking.",
        [("get_weather", PARIS)],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
        "<|tool_call_end|>",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "cohere_command4",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris"}}\n]<|END_ACTION|>',
        "",
        [("get_weather", PARIS)],
    ),
    ("cohere_command4", "<|START_TEXT|>Hello<|END_TEXT|>", "Hello", []),
    (
        "apertus2509",
        'I check.<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]'
        "<|tools_suffix|>",
        "I check.",
        [("get_weather", PARIS), ("now", {})],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[a</param>\nb]]></param>'
        '<param name="days">3</param></function>',
        "",
        [("get_weather", {"city": "a</param>\nb", "days": 3})],
    ),
    (
        "granite",
        '<|tool_call|>[{"arguments": {"city": "Paris"}, "name": "get_weather"}]',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "phi4",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "phi4",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "gemma4",
        'Ok.<|tool_call>call:get_weather{city:<|"|>Pa"r}is<|"|>,days:3,'
        'options:{a:[1,<|"|>x<|"|>,true]}}<tool_call|>',
        "Ok.",
        [("get_weather", {"city": 'Pa"r}is', "days": 3, "options": {"a": [1, "x", True]}})],
    ),
    (
        "gigachat3",
        'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {"a": 1}}',
        "Hi",
        [("now", {"a": 1})],
    ),
    (
        "inkling",
        "<|message_model|><|content_text|>Hi<|end_message|><|message_model|>now"
        '<|content_invoke_tool_json|>{"name":"now","args":{"a": 1}}<|end_message|>',
        "Hi",
        [("now", {"a": 1})],
    ),
    (
        "muse",
        ' to=functions<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|>",
        "",
        [("get_weather", PARIS)],
    ),
    (
        "k2_horizon",
        "<ifm|tool_calls>\n<ifm|tool_call>now\n<ifm|arg_key>a</ifm|arg_key>"
        "<ifm|arg_type>string</ifm|arg_type><ifm|arg_value>12</ifm|arg_value></ifm|tool_call>\n"
        '<ifm|tool_call>{"name": "now", "arguments": {}}</ifm|tool_call></ifm|tool_calls>',
        "",
        [("now", {"a": "12"}), ("now", {})],
    ),
    (
        "olmo3",
        '<function_calls>\nget_weather(city="a\nb")\nnow()\n</function_calls>',
        "",
        [("get_weather", {"city": "a\nb"}), ("now", {})],
    ),
    (
        "json",
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}]',
        "",
        [("get_weather", PARIS)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message", "text", "calls"), EXAMPLES)
def test_documented_message(
    name: str, message: str, text: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    shown, read = parse_all(registry.create(name, [WEATHER]), message)
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    assert shown == text


def test_kimi_k2_keeps_the_ids_of_the_model() -> None:
    message = (
        "<|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    _, (call,) = parse_all(registry.create("kimi_k2", [WEATHER]), message)
    assert call.call_id == "functions.get_weather:3"
    assert call.call_id == registry.call_id("kimi_k2", "get_weather", 3)


FORGIVEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d"}}', {"a": "x\ny\\d"}),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"\\ud83d"}}</tool_call>', {"a": "\ufffd"}),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', {"a": 1}),
    ("qwen3_coder", "<tool_call><function=f></tool_call>", {}),
    ("pythonic", '[f(a="\\d")]', {"a": "\\d"}),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', {"a": 1}),
    ("deepseekv31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("name", "message", "arguments"), FORGIVEN)
def test_harmless_mistakes_are_accepted(
    name: str, message: str, arguments: dict[str, object]
) -> None:
    text, calls = parse_all(registry.create(name), message)
    assert text == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", arguments)]


STAYS_TEXT = [
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{oops"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", "a < b and <tool"),
    ("json", '[{"name": "f", "thoughts": "", "parameters": {}}]'),
    ("json", '{"name": "Bob"}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] none"),
    ("deepseekv3", "<｜tool▁calls▁begin｜>hello"),
    ("qwen3_coder", "use <function=name> so"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a=1"),
    ("gemma4", "<|tool_call>call:f(x)<tool_call|>"),
    ("minimax-m2", '<minimax:tool_call><invoke nam="f"></invoke></minimax:tool_call>'),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_end|>"),
    ("kimi_k3", '<|open|>call tool=""<|sep|>'),
    ("minimax-m3", f'{T}<invoke name="f">{T}<a>{T}<b>1{T}</a>'),
]


@pytest.mark.parametrize(("name", "message"), STAYS_TEXT)
def test_other_text_stays_text(name: str, message: str) -> None:
    assert parse_all(registry.create(name), message) == (message, [])


def test_a_call_after_a_broken_one_is_found() -> None:
    message = '<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call> end'
    text, (call,) = parse_all(registry.create("hermes"), message)
    assert (text, call.name) == ("<tool_call>oops end", "f")
