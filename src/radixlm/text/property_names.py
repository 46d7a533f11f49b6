"""Rewrites "propertyNames" of JSON schemas, which llguidance does not support."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_ONE = frozenset(
    "items additionalProperties not if then else contains unevaluatedItems unevaluatedProperties "
    "additionalItems".split()
)
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are lists of schemas, and schemas by name."""
_NAME_RULES = frozenset(("type", "pattern", "minLength", "maxLength", "enum", "const"))


def without_property_names(schema: Any) -> Any:
    """``schema`` with "propertyNames" as "patternProperties" wherever that is equivalent."""
    if not isinstance(schema, Mapping):
        return schema
    result = with_parts(schema, _ONE, without_property_names)
    pattern = name_pattern(result.get("propertyNames"))
    if pattern is None or "patternProperties" in result:
        return result
    del result["propertyNames"]
    rest = result.pop("additionalProperties", True)
    if rest is not False:
        result["patternProperties"] = {pattern: {} if rest is True else rest}
    return result | {"additionalProperties": False}


def with_parts(
    schema: Mapping[str, Any], ones: frozenset[str], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """A copy of ``schema`` with what ``change`` makes of the schemas in it: of those in lists and
    in maps, and of the values of the keywords ``ones``."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in LISTS and isinstance(value, list):
            result[key] = [change(item) for item in value]
        elif key in ones:
            result[key] = change(value)
        elif key in MAPS and isinstance(value, Mapping):
            result[key] = {name: change(item) for name, item in value.items()}
        else:
            result[key] = value
    return result


def name_pattern(rule: Any) -> str | None:
    """The regex that a name must match; None if one regex cannot express the rule."""
    if not isinstance(rule, Mapping) or not rule or not rule.keys() <= _NAME_RULES:
        return None
    if rule.get("type", "string") != "string":
        return None
    keys = rule.keys() - {"type"}
    names = [rule["const"]] if keys == {"const"} else rule.get("enum")
    if keys in ({"const"}, {"enum"}) and isinstance(names, list):
        texts = [re.escape(name) for name in names if isinstance(name, str)]
        return f"^({'|'.join(texts)})$" if texts else None
    if keys == {"pattern"} and isinstance(rule["pattern"], str):
        return str(rule["pattern"])
    low, high = rule.get("minLength", 0), rule.get("maxLength", "")
    if keys <= {"minLength", "maxLength"} and all(v == "" or type(v) is int for v in (low, high)):
        return f"^(.|\\n){{{low},{high}}}$"
    return None
