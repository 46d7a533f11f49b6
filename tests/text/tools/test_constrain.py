"""Tool choices as grammars, checked on a matcher: required calls are accepted, other output is
not."""

import json
from typing import Any

import llguidance
import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.text.tools import registry
from radixlm.text.tools.base import ToolSpec, parse_all
from radixlm.text.tools.constrain import call_array_schema, hoist

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}}
TREE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "node": {"$ref": "#/$defs/N"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"N": {**NODE, "additionalProperties": False}},
}
TOOLS = [ToolSpec("get_weather", TREE), ToolSpec("now")]
WEATHER = {"city": 'a"}', "node": {"next": {}}}
NAMED = {"type": "function", "function": {"name": "now"}}
GRAMMARS = {
    "lark": llguidance.LLMatcher.grammar_from_lark,
    "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
}


def is_accepted(found: dict[str, Any] | None, text: str) -> bool:
    assert found is not None
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, GRAMMARS[found["kind"]](found["value"]))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def array(*calls: tuple[str, dict[str, Any]]) -> str:
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


@pytest.mark.parametrize(("name", "write"), [("hermes", hermes), ("mistral", array)])
def test_required_calls(name: str, write: Any) -> None:
    found = registry.constraint(name, TOOLS, "required")
    assert found and found["is_forced"]
    for calls in ([("get_weather", WEATHER)], [("now", {}), ("get_weather", WEATHER)]):
        message = write(*calls)
        assert is_accepted(found, message)
        assert message.startswith(found["prefix"])
        text, read = parse_all(registry.create(found["parser"], TOOLS), message)
        assert text == ""
        assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    for refused in ("", "hello", write(("other", {})), write(("get_weather", {"town": "a"}))):
        assert not is_accepted(found, refused)


@pytest.mark.parametrize(("name", "write"), [("qwen25", hermes), ("llama3", array)])
def test_one_call_where_a_function_is_named_or_calls_are_not_parallel(
    name: str, write: Any
) -> None:
    named = registry.constraint(name, TOOLS, NAMED)
    assert is_accepted(named, write(("now", {})))
    assert not is_accepted(named, write(("get_weather", WEATHER)))
    single = registry.constraint(name, TOOLS, "required", parallel=False)
    for found in (named, single):
        assert not is_accepted(found, write(("now", {}), ("now", {})))


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_format_can_be_forced(name: str) -> None:
    found = registry.constraint(name, TOOLS, "required")
    assert found
    write = hermes if found["kind"] == "lark" else array
    assert is_accepted(found, write(("get_weather", WEATHER)))


def test_a_backend_without_lark_gets_a_schema() -> None:
    found = registry.constraint("hermes", TOOLS, "required", kinds=("json_schema",))
    assert found and (found["kind"], found["parser"]) == ("json_schema", "json")


def test_free_choices_are_not_constrained() -> None:
    assert registry.constraint("hermes", TOOLS, "none") is None
    assert registry.constraint("hermes", TOOLS, "auto") is None


def test_the_operator_can_have_all_functions_constrained() -> None:
    schemas = []
    for level in (1, 2):
        found = registry.constraint("hermes", [ToolSpec("f", TREE)], "auto", strict_level=level)
        assert found and not found["is_forced"]
        schemas += [tag["schema"] for tag in json.loads(found["value"])["structures"]]
    assert schemas == [{"type": "object"}, TREE]


@pytest.mark.parametrize("name", [n for n in registry.NAMES if registry.FORMATS[n].structure])
def test_strict_functions_get_tags_that_their_parser_reads(name: str) -> None:
    strict = ToolSpec("get_weather", TREE, strict=True)
    found = registry.constraint(name, [strict, TOOLS[1]], "auto")
    assert found and found["kind"] == "structural_tag" and not found["is_forced"]
    tags = json.loads(found["value"])
    assert [tag["schema"] for tag in tags["structures"]] == [TREE, {"type": "object"}]
    for tag, tool in zip(tags["structures"], ("get_weather", "now"), strict=True):
        assert tag["begin"].startswith(tags["triggers"][0])
        message = tag["begin"] + json.dumps(WEATHER) + tag["end"]
        text, (call,) = parse_all(registry.create(name, TOOLS), message)
        assert (text, call.name, json.loads(call.arguments)) == ("", tool, WEATHER)


@pytest.mark.parametrize(
    ("tools", "choice", "match"),
    [
        ([], "required", "needs tools"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "'nope'.*get_weather, now"),
        (TOOLS, {"type": "function"}, "None"),
        (TOOLS, "sometimes", "sometimes"),
    ],
)
def test_impossible_choices_are_refused(tools: list[ToolSpec], choice: Any, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        registry.constraint("hermes", tools, choice)


def test_references_move_with_their_schema() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"$ref": {"$ref": "#"}, "const": {"$ref": "#/$defs/N"}},
        "default": {"$ref": "#/kept"},
        "allOf": [{"$ref": "#/$defs/N"}],
    }
    assert hoist(schema, "tool0") == {
        "properties": {
            "$ref": {"$ref": "#/$defs/tool0"},
            "const": {"$ref": "#/$defs/tool0/$defs/N"},
        },
        "default": {"$ref": "#/kept"},
        "allOf": [{"$ref": "#/$defs/tool0/$defs/N"}],
    }


def test_a_schema_without_a_type_is_an_object() -> None:
    tool = ToolSpec("f", {"properties": {"a": {"type": "string"}}})
    assert call_array_schema([tool], True)["$defs"]["tool0"]["type"] == "object"


def test_a_forced_call_has_only_the_arguments_that_are_declared() -> None:
    """A schema that allows other arguments explicitly is left unchanged."""
    declared: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, is_open in [
        (declared, False),
        ({"properties": {"a": {}}}, False),
        (declared | {"additionalProperties": {"type": "integer"}}, True),
        (declared | {"patternProperties": {"^b$": {"type": "integer"}}}, True),
        (declared | {"allOf": [{"properties": {"b": {"type": "integer"}}}]}, True),
        ({"type": "object"}, True),
    ]:
        for name, write in (("hermes", hermes), ("mistral", array)):
            found = registry.constraint(name, [ToolSpec("f", schema)], "required")
            assert is_accepted(found, write(("f", {"a": 1})))
            assert is_accepted(found, write(("f", {"a": 1, "b": 2}))) == is_open


def test_tools_may_define_one_name_in_different_ways() -> None:
    def tool(name: str, kind: str) -> ToolSpec:
        properties = {"a": {"$ref": "#/$defs/D"}}
        schema = {"type": "object", "properties": properties, "$defs": {"D": {"type": kind}}}
        return ToolSpec(name, parameters=schema)

    schema = call_array_schema([tool("f", "string"), tool("g", "integer")], False)
    for index, kind in enumerate(("string", "integer")):
        place = schema["$defs"][f"tool{index}"]
        assert place["properties"]["a"] == {"$ref": f"#/$defs/tool{index}/$defs/D"}
        assert place["$defs"]["D"] == {"type": kind}
