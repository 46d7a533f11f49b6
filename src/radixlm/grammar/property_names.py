"""JSON schemas said in another way, for a library that does not know every keyword."""

from __future__ import annotations

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
    """``schema`` with "propertyNames" told by "patternProperties", wherever that says the same."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            made[key] = [without_property_names(one) for one in value]
        elif key in _ONE:
            made[key] = without_property_names(value)
        elif key in _MAPS and isinstance(value, Mapping):
            made[key] = {name: without_property_names(one) for name, one in value.items()}
        else:
            made[key] = value
    pattern = _name_pattern(made.get("propertyNames"))
    if pattern is None or "patternProperties" in made:
        return made
    del made["propertyNames"]
    rest = made.pop("additionalProperties", True)
    if rest is not False:
        made["patternProperties"] = {pattern: {} if rest is True else rest}
    return made | {"additionalProperties": False}


def _name_pattern(rule: Any) -> str | None:
    """The expression that a name must match; None where one expression cannot tell."""
    if not isinstance(rule, Mapping) or not rule or not rule.keys() <= _NAME_RULES:
        return None
    if rule.get("type", "string") != "string":
        return None
    told = rule.keys() - {"type"}
    names = [rule["const"]] if told == {"const"} else rule.get("enum")
    if told in ({"const"}, {"enum"}) and isinstance(names, list):
        texts = [re.escape(name) for name in names if isinstance(name, str)]
        return f"^({'|'.join(texts)})$" if texts else None
    if told == {"pattern"} and isinstance(rule["pattern"], str):
        return str(rule["pattern"])
    low, high = rule.get("minLength", 0), rule.get("maxLength", "")
    if told <= {"minLength", "maxLength"} and all(v == "" or type(v) is int for v in (low, high)):
        return f"^(.|\\n){{{low},{high}}}$"
    return None
