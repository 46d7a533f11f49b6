"""JSON schemas whose objects have no undeclared properties, and whose types are the standard's.

The standard allows further properties unless a schema forbids them; OpenAI's strict mode and
xgrammar's default do not, and clients who declare two properties do not expect a third.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_BRANCHES = ("allOf", "anyOf", "oneOf")  # rules for the same value, in lists
_CONDITIONS = ("not", "if", "then", "else")  # the same, one schema each
_ITEMS = ("items", "contains", "additionalItems", "unevaluatedItems")
_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ABOUT_OTHER_PROPERTIES = frozenset((*_MEMBERS, "propertyNames"))
_ABOUT_OTHER_ITEMS = frozenset((*_ITEMS[1:], *_BRANCHES, *_CONDITIONS, "$ref", "$dynamicRef"))

# names of types in databases and programming languages, as SGLang reads them in tools
_TYPE_NAMES = {
    "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea "
    "bytes varbinary",
    "boolean": "bool",
    "integer": "bigint smallint tinyint int uint long short unsigned",
    "number": "double decimal real numeric num float",
    "array": "arr tuple set list",
    "object": "map dict",
    "null": "",
}
_STANDARD = {name: kind for kind, names in _TYPE_NAMES.items() for name in (kind, *names.split())}
_BASE_NAME = re.compile(r"[a-z]+")


def standard_types(schema: Any) -> Any:
    """``schema`` with the standard's names of types: "string" for "varchar(9)", "integer" for
    "int32". ValueError for a name that is none."""
    if not isinstance(schema, Mapping):
        return schema
    named = _copied(schema)
    kind = named.get("type")
    if isinstance(kind, str):
        named["type"] = _standard_type(kind)
    elif isinstance(kind, list):
        named["type"] = list(dict.fromkeys(map(_standard_type, kind)))
    for keys, child, _ in _children(schema):
        _put(named, keys, standard_types(child))
    return named


def _standard_type(name: Any) -> str:
    found = _BASE_NAME.match(name.lower()) if isinstance(name, str) else None
    kind = _STANDARD.get(found.group()) if found else None
    if kind is None or (found and name[found.end() : found.end() + 1] == "_"):
        raise ValueError(f"type {name!r} is none of {', '.join(_TYPE_NAMES)}")
    return kind


def close_objects(schema: Any) -> Any:
    """``schema`` with undeclared properties and items forbidden, unless it mentions them.

    Parts that apply together with others to one value (``allOf``, a ``$ref`` beside properties)
    stay open: each would forbid what the others declare. So do objects that require a property
    they do not declare, and objects without ``properties``.
    """
    if not isinstance(schema, Mapping):
        return schema
    return _closed(schema, "#", True, _shared_paths(schema))


def _shared_paths(root: Mapping[str, Any]) -> set[str]:
    """Paths of the referenced schemas that apply together with others to one value."""
    shared: set[str] = set()
    schemas: dict[str, Any] = {}
    alone: dict[str, bool] = {}
    waiting: list[tuple[str, Any, bool]] = [("#", root, True)]
    while waiting:  # each schema at most twice: alone, and then not
        path, schema, is_alone = waiting.pop()
        is_alone = is_alone and path not in shared
        if not isinstance(schema, Mapping) or alone.get(path) in (is_alone, False):
            continue
        is_again = path in alone
        schemas[path], alone[path] = schema, is_alone
        is_alone_below, ref = is_alone and _has_single_rule(schema), schema.get("$ref")
        if isinstance(ref, str) and not is_alone_below and ref not in shared:
            shared.add(ref)
            if ref in schemas:
                waiting.append((ref, schemas[ref], False))
        for keys, child, is_in_place in _children(schema):
            if is_in_place or not is_again:
                is_free = not is_in_place or _is_free(keys, is_alone_below)
                waiting.append((_below(path, keys), child, is_free))
    return shared


def _closed(schema: Any, path: str, is_alone: bool, shared: set[str]) -> Any:
    """``is_alone``: no other schema applies to the same value."""
    if not isinstance(schema, Mapping):
        return schema
    is_alone = is_alone and path not in shared
    is_alone_below = is_alone and _has_single_rule(schema)
    closed = _copied(schema)
    for keys, child, is_in_place in _children(schema):
        is_free = not is_in_place or _is_free(keys, is_alone_below)
        _put(closed, keys, _closed(child, _below(path, keys), is_free, shared))
    if is_alone and _is_closable(schema):
        closed["additionalProperties"] = False
    if is_alone and _has_only_first_items(schema):
        closed["additionalItems" if "items" in schema else "items"] = False
    return closed


def _below(path: str, keys: tuple[str, ...]) -> str:
    return "/".join((path, *(_escaped(key) for key in keys)))


def _is_free(keys: tuple[str, ...], is_alone_below: bool) -> bool:
    """Whether a subschema for the same value is the only one for it."""
    return is_alone_below and keys[0] not in (*_CONDITIONS, "dependentSchemas")


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """(keys, subschema, whether it applies to the same value) of each subschema."""
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


def _copied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose subschemas ``_put`` may replace."""
    return {
        key: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, list)
        else value
        for key, value in schema.items()
    }  # fmt: skip


def _put(copied: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    *outer, last = keys
    holder: Any = copied[outer[0]] if outer else copied
    holder[int(last) if isinstance(holder, list) else last] = value


def _has_single_rule(schema: Mapping[str, Any]) -> bool:
    """Whether exactly one subschema for the same value defines what it may contain."""
    if schema.keys() & {"properties", "patternProperties", "prefixItems", "dependentSchemas"}:
        return False
    rules = [key for key in (*_BRANCHES, "$ref", *_CONDITIONS) if key in schema]
    return len(rules) == 1 and (rules[0] != "allOf" or len(schema["allOf"]) == 1)


def _is_closable(schema: Mapping[str, Any]) -> bool:
    declared = schema.get("properties", {})
    if not schema.keys() & {"properties", "patternProperties"} or not isinstance(declared, Mapping):
        return False
    if schema.keys() & _ABOUT_OTHER_PROPERTIES or "$ref" in schema or "$dynamicRef" in schema:
        return False
    if not _requires_only(schema, declared):
        return False
    parts = [child for _, child, is_in_place in _children(schema) if is_in_place]
    return all(_adds_nothing(part, declared) for part in parts)


def _adds_nothing(part: Any, declared: Mapping[str, Any]) -> bool:
    """Whether another schema for the object mentions declared properties only."""
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
    """Whether the schema declares the first items of a list and does not mention further ones."""
    if schema.keys() & _ABOUT_OTHER_ITEMS or {"items", "prefixItems"} <= schema.keys():
        return False
    first = schema.get("prefixItems", schema.get("items"))
    if not isinstance(first, list):
        return False
    min_items = schema.get("minItems", 0)
    return isinstance(min_items, int) and min_items <= len(first)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
