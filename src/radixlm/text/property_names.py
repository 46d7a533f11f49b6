"""Rewrites "propertyNames" of JSON schemas, which llguidance does not support."""

import re
from collections.abc import Mapping
from typing import Any

_ONE = frozenset(
    "items additionalProperties not if then else contains unevaluatedItems unevaluatedProperties "
    "additionalItems".split()
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_NAME_RULES = frozenset(("type", "pattern", "minLength", "maxLength", "enum", "const"))


def without_property_names(schema: Any) -> Any:
    """``schema`` with "propertyNames" as "patternProperties" wherever that is equivalent."""
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            result[key] = [without_property_names(item) for item in value]
        elif key in _ONE:
            result[key] = without_property_names(value)
        elif key in _MAPS and isinstance(value, Mapping):
            result[key] = {name: without_property_names(item) for name, item in value.items()}
        else:
            result[key] = value
    pattern = name_pattern(result.get("propertyNames"))
    if pattern is None or "patternProperties" in result:
        return result
    del result["propertyNames"]
    rest = result.pop("additionalProperties", True)
    if rest is not False:
        result["patternProperties"] = {pattern: {} if rest is True else rest}
    return result | {"additionalProperties": False}


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
