"""JSON schemas as clients mean them: an object has the properties that were declared, no others.

The standard lets an object have any further property where nothing is said of them; OpenAI's strict
mode and xgrammar's default do not, and nobody who declares two properties waits for a third.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_BRANCHES = ("allOf", "anyOf", "oneOf")  # rules for the same value, in lists
_CONDITIONS = ("not", "if", "then", "else")  # the same, one each
_ITEMS = ("items", "contains", "additionalItems", "unevaluatedItems")
_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SAYS_OF_OTHERS = frozenset((*_MEMBERS, "propertyNames"))
_SAYS_OF_MORE_ITEMS = frozenset((*_ITEMS[1:], *_BRANCHES, *_CONDITIONS, "$ref", "$dynamicRef"))


def closed(schema: Any) -> Any:
    """``schema`` without undeclared properties and items, where it says nothing of them.

    Parts that hold together with others for one value (``allOf``, a ``$ref`` beside properties)
    stay open: each would forbid what the others declare. So does an object that requires a property
    it does not declare, and one without ``properties``.
    """
    if not isinstance(schema, Mapping):
        return schema
    shared: set[str] = set()
    while True:
        known = len(shared)
        made = _Closer(shared).close(schema, "#", is_alone=True)
        if len(shared) == known:
            return made


class _Closer:
    """One pass. ``shared``: paths of the schemas that are one part of several, found on the way."""

    def __init__(self, shared: set[str]) -> None:
        self._shared = shared

    def close(self, schema: Any, path: str, is_alone: bool) -> Any:
        """``is_alone``: nothing else says what the value may hold."""
        if not isinstance(schema, Mapping):
            return schema
        is_alone = is_alone and path not in self._shared
        is_alone_below = is_alone and _passes_on(schema)
        ref = schema.get("$ref")
        if isinstance(ref, str) and not is_alone_below:
            self._shared.add(ref)
        made = dict(schema)
        for keys, child, is_in_place in _children(schema):
            below = "/".join((path, *(_escaped(key) for key in keys)))
            is_free = keys[0] not in (*_CONDITIONS, "dependentSchemas") and is_alone_below
            new = self.close(child, below, is_free if is_in_place else True)
            _put(made, keys, new)
        if is_alone and _is_closable(schema):
            made["additionalProperties"] = False
        if is_alone and _has_only_first_items(schema):
            made["additionalItems" if "items" in schema else "items"] = False
        return made


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """Keys of each schema within, the schema, whether it is for the same value."""
    for key in (*_ITEMS, *_MEMBERS, *_CONDITIONS):
        if isinstance(schema.get(key), Mapping):
            yield (key,), schema[key], key in _CONDITIONS
    for key in (*_MAPS, "dependentSchemas"):
        members = schema.get(key)
        for name, child in members.items() if isinstance(members, Mapping) else ():
            yield (key, name), child, key == "dependentSchemas"
    for key in (*_BRANCHES, "prefixItems", "items"):
        options = schema.get(key)
        for place, child in enumerate(options if isinstance(options, list) else ()):
            yield (key, str(place)), child, key in _BRANCHES


def _put(made: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    if len(keys) == 1:
        made[keys[0]] = value
        return
    key, name = keys
    if isinstance(made[key], list):
        made[key] = [value if str(i) == name else old for i, old in enumerate(made[key])]
    else:
        made[key] = {**made[key], name: value}


def _passes_on(schema: Mapping[str, Any]) -> bool:
    """Whether the one rule for the same value in it says alone what the value may hold."""
    if schema.keys() & {"properties", "patternProperties", "prefixItems", "dependentSchemas"}:
        return False
    rules = [key for key in (*_BRANCHES, "$ref", *_CONDITIONS) if key in schema]
    return len(rules) == 1 and (rules[0] != "allOf" or len(schema["allOf"]) == 1)


def _is_closable(schema: Mapping[str, Any]) -> bool:
    declared = schema.get("properties", {})
    if not schema.keys() & {"properties", "patternProperties"} or not isinstance(declared, Mapping):
        return False
    if schema.keys() & _SAYS_OF_OTHERS or "$ref" in schema or "$dynamicRef" in schema:
        return False
    if not _requires_only(schema, declared):
        return False
    parts = [child for _, child, is_in_place in _children(schema) if is_in_place]
    return all(_adds_nothing(part, declared) for part in parts)


def _adds_nothing(part: Any, declared: Mapping[str, Any]) -> bool:
    """Whether a further rule for an object names none but its declared properties."""
    if not isinstance(part, Mapping):
        return True
    names = part.get("properties", {})
    if not isinstance(names, Mapping) or names.keys() - declared.keys():
        return False
    if part.keys() & {"patternProperties", "$ref", "$dynamicRef"}:
        return False
    inner = [child for _, child, is_in_place in _children(part) if is_in_place]
    return _requires_only(part, declared) and all(_adds_nothing(one, declared) for one in inner)


def _requires_only(schema: Mapping[str, Any], declared: Mapping[str, Any]) -> bool:
    required = schema.get("required", [])
    return isinstance(required, list) and all(
        isinstance(name, str) and name in declared for name in required
    )


def _has_only_first_items(schema: Mapping[str, Any]) -> bool:
    """Whether the first items of a list are declared and nothing is said of more."""
    if schema.keys() & _SAYS_OF_MORE_ITEMS or {"items", "prefixItems"} <= schema.keys():
        return False
    first = schema.get("prefixItems", schema.get("items"))
    if not isinstance(first, list):
        return False
    least = schema.get("minItems", 0)
    return isinstance(least, int) and least <= len(first)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
