"""Convert the untyped values of XML-like formats to JSON, by the tool's JSON schema."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from radixlm.text.tools.base import ToolSpec

_MAX_REF_DEPTH = 16
_MAX_LITERAL_CHARS = 1 << 16
_MAX_NUMBER_CHARS = 400
_INTEGER = re.compile(r"[-+]?[0-9]+(?:\.0*)?")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_TYPES_BY_PYTHON: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_ALIASES = {
    "str": "string", "text": "string", "enum": "string", "int": "integer", "long": "integer",
    "float": "number", "double": "number", "bool": "boolean", "list": "array", "arr": "array",
    "dict": "object", "map": "object",
}  # fmt: skip
_LOAD_ERRORS = (ValueError, RecursionError)

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = "\\'\"abfnrtv0123xNuU\n"

STRING = frozenset(("string",))
ANY: frozenset[str] = frozenset()


def json_text(value: Any) -> str:
    """``value`` as JSON; lone surrogates, which cannot be encoded, become U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode()


def escape(text: str) -> str:
    """``text`` as the content of a JSON string, without quotes."""
    return json_text(text)[1:-1]


def parameter_types(tool: ToolSpec | None, key: str) -> frozenset[str]:
    """JSON types of the parameter; empty if unknown."""
    root = tool.parameters if tool else None
    if not isinstance(root, Mapping):
        return ANY
    return _types(member_schema(root, key, root), root, 0)


def member_schema(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """The schema of a member of an object, None if there is none."""
    schema = _resolve(schema, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties") if isinstance(schema, Mapping) else None


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that ``schema`` allows, with references resolved in ``root``; empty if unknown."""
    return _types(schema, root, 0)


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REF_DEPTH):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema
        schema = root
        for part in ref[1:].strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) and name else schema
    return None


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = _resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REF_DEPTH:
        return ANY
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if isinstance(declared, list):
        return frozenset(_ALIASES.get(t.lower(), t.lower()) for t in declared if isinstance(t, str))
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            found = [_types(option, root, depth + 1) for option in options]
            known = [types for types in found if types]
            # an option that allows anything makes the type unknown, except within allOf
            if known and (keyword == "allOf" or len(known) == len(found)):
                return frozenset().union(*known)
            return ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset(map(_type_of, values)) if isinstance(values, list) else ANY


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES_BY_PYTHON if isinstance(value, kind)), "null")


def convert(text: str, types: frozenset[str]) -> str:
    """``text`` as JSON of one of ``types``, a string if none fits; without types by its form."""
    if types == STRING:
        return json_text(text)
    stripped = text.strip()
    candidates = types or frozenset(("null", "boolean", "number", "object", "array"))
    found = _scalar(stripped, candidates)
    if found is None and candidates & {"object", "array"} and stripped[:1] in ("{", "[", "("):
        found = _container(stripped, candidates, is_lenient=bool(types))
    return json_text(text) if found is None else found


def _scalar(text: str, types: frozenset[str]) -> str | None:
    lower = text.lower() if len(text) <= 5 else ""
    if "null" in types and lower in ("null", "none"):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    if types & {"integer", "number"} and _INTEGER.fullmatch(text):
        return str(int(text.partition(".")[0])) if "integer" in types else _number(text)
    if "number" in types and _NUMBER.fullmatch(text):
        return _number(text)
    return None


def _number(text: str) -> str | None:
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if math.isfinite(value) else None


def _container(text: str, types: frozenset[str], is_lenient: bool) -> str | None:
    value = load_json(text)
    if value is None and is_lenient and '\\"' in text:  # escaped once more, as inside a string
        value = load_json(str(load_json(f'"{text}"')))
    if value is None and is_lenient and len(text) <= _MAX_LITERAL_CHARS:
        value = load_python(text)
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, dict | list) or _type_of(value) not in types:
        return None
    try:
        return json_text(value)
    except (TypeError, *_LOAD_ERRORS):
        return None


def load_json(text: str) -> Any:
    """The value of a JSON text, None if invalid, nested too deeply or not finite."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except _LOAD_ERRORS:
        return None


def load_python(text: str) -> Any:
    """The value of a Python literal, None if invalid."""
    try:
        return ast.literal_eval(double_unknown_escapes(text))
    except (SyntaxError, TypeError, MemoryError, *_LOAD_ERRORS):
        return None


def double_unknown_escapes(source: str) -> str:
    """Python source with backslashes doubled that begin no escape, as in ``"\\d"``.

    Python accepts these too, but warns.
    """

    def double(found: re.Match[str]) -> str:
        return found[0] if found[1] in _KNOWN_ESCAPES else "\\" + found[0]

    return _ESCAPE.sub(double, source)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
