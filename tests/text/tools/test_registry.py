"""Formats by name and by chat template; call ids."""

import random
import re

import pytest

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.text.tools import registry
from radixlm.text.tools.base import ToolCallDelta, ToolSpec, join_deltas, tool_specs

TEMPLATES = [
    ("qwen25", '<|im_start|>system ... return <tool_call>\\n{"name": ...}\\n</tool_call>'),
    ("qwen3_coder", "<|im_start|> <tool_call>\n<function=example>\n<parameter=x>\n</tool_call>"),
    ("hermes", "<|begin_of_text|> within <tool_call></tool_call> XML tags"),
    ("llama3", "<|start_header_id|>ipython<|end_header_id|> ... <|python_tag|>"),
    ("llama3", '<|start_header_id|> {"name": function name, "parameters": dictionary}'),
    ("pythonic", "<|header_start|>assistant<|header_end|> <|python_start|>"),
    ("mistral", "[AVAILABLE_TOOLS] ... [TOOL_CALLS]"),
    ("deepseekv3", "'<｜tool▁calls▁begin｜>' + 'function<｜tool▁sep｜>' + '\\n```json\\n'"),
    ("deepseekv31", "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'"),
    ("deepseekv32", "<｜DSML｜function_calls>\n<｜DSML｜invoke name=..."),
    ("deepseekv4", "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=..."),
    ("deepseekv41", "<｜DSML｜ calls>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    ("kimi_k3", "<|open|>tools<|sep|>"),
    ("glm45", "[gMASK]<sop> <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"),
    ("step3", "<｜tool_calls_begin｜> <steptml:invoke name="),
    ("gpt-oss", "<|start|>assistant<|channel|>commentary to=functions. <|call|>"),
    ("minimax-m2", "<minimax:tool_call>"),
    ("interns1", "<|action_start|> <|plugin|>"),
    ("hunyuan", "<tool_calls><tool_call>x<tool_sep>"),
    ("lfm2", "<|tool_call_start|>[<|tool_call_end|>"),
    ("cohere_command4", "<|START_ACTION|>"),
    ("apertus2509", "<|tools_prefix|>"),
    ("granite", "<|start_of_role|>available_tools<|end_of_role|>"),
    ("phi4", "<|tool|>{{ tools }}<|/tool|>"),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>"),
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_templates_are_recognised(name: str, template: str) -> None:
    assert registry.detect(template) == name


def test_a_template_without_tools_is_none() -> None:
    assert registry.detect("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}") is None


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'hermit'.*hermes"):
        registry.create("hermit")


# the names of SGLang; "beam" is documented nowhere
TABLE = (
    "llama3 qwen25 qwen hermes mistral deepseekv3 deepseekv31 pythonic kimi_k2 qwen3_coder step3p5 "
    "nanbeige mimo glm45 glm glm47 ling3 spark25 poolside_v1 step3 gpt-oss deepseekv32 deepseekv4 "
    "deepseekv41 minimax-m2 minimax-m3 interns1 hunyuan lfm2 cohere_command4 apertus2509 minicpm5 "
    "kimi_k3 dots gigachat3 gigachat35 gemma4 inkling iquest_q1 k2_horizon muse trinity"
).split()


def test_every_name_of_the_table_is_there() -> None:
    assert set(TABLE) <= set(registry.NAMES)


def test_ids() -> None:
    mistral = registry.call_id("mistral", "f", 0)
    assert re.fullmatch(r"[A-Za-z0-9]{9}", mistral)
    assert registry.call_id("mistral", "f", 0) != mistral
    assert registry.call_id("kimi_k2", "f", 4) == "functions.f:4"
    drawn = registry.call_id("hermes", "f", 0)
    assert re.fullmatch(r"call_[0-9a-f]{24}", drawn)
    assert registry.call_id("hermes", "f", 0) != drawn
    first, second = (registry.call_id("hermes", "f", 0, random.Random(7)) for _ in range(2))
    assert first == second and re.fullmatch(r"call_[0-9a-f]{24}", first)


def test_special_tokens_are_kept_for_formats_made_of_them() -> None:
    assert registry.keep_special_tokens("mistral")
    assert registry.keep_special_tokens("gpt-oss")
    assert not registry.keep_special_tokens("qwen25")


def test_tool_specs_read_both_forms() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    expected = ToolSpec("f", {"type": "object"}, None, True)
    assert tool_specs([{"type": "function", "function": function}, function]) == [expected] * 2


@pytest.mark.parametrize("tool", [{"type": "function"}, {"name": "f", "parameters": [1]}])
def test_an_invalid_tool_is_named(tool: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        tool_specs([tool])


def test_deltas_are_joined_by_index() -> None:
    deltas = [
        ToolCallDelta(0, "f", "", "id"),
        ToolCallDelta(1, "g", "{"),
        ToolCallDelta(0, None, "{}"),
        ToolCallDelta(1, None, "}"),
    ]
    joined = join_deltas(deltas)
    assert [(c.index, c.name, c.arguments, c.call_id) for c in joined] == [
        (0, "f", "{}", "id"),
        (1, "g", "{}", None),
    ]
