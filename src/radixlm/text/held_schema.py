"""JSON schemas rewritten with the keywords that grammars hold, and the names of those that remain.

Each rewriting is an equivalence: the new schema has exactly the valid documents of the old one. Two
allow less: ``contains`` without ``maxItems`` (``held_arrays.py``), and formats.
What has no equivalent is left as it is, and ``unheld_keywords`` names it. The rules are those of
JSON Schema, draft 2020-12.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from radixlm.text.held_arrays import contained, unique
from radixlm.text.negated_schema import negated
from radixlm.text.property_names import LISTS, MAPS, name_pattern, with_parts
from radixlm.text.string_formats import with_patterns

_UNHELD = frozenset(
    "not if then else contains minContains maxContains dependentRequired dependentSchemas "
    "unevaluatedItems unevaluatedProperties uniqueItems $dynamicRef $dynamicAnchor "
    "$recursiveRef".split()
)
_ONE = frozenset("items additionalProperties additionalItems propertyNames".split())
_MORE_ONE = frozenset(("not", "if", "then", "else", "contains", *_ONE))
_MAPS = MAPS - {"dependentSchemas"}  # which count as unheld themselves
_COUNTS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
_TYPES = frozenset("string number integer boolean null array object".split())
_FORMATS = frozenset(
    "date time date-time duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
_EVALUATING = frozenset("anyOf oneOf if then else dependentSchemas $ref $dynamicRef".split())
_ABOUT_PROPERTIES = frozenset("properties required type title description $comment".split())
_MAX_EXCLUDED = 8  # options of oneOf of which each excludes the others
_REWRITTEN = frozenset("contains uniqueItems not if oneOf".split())
_MAX_TRIES = 200  # schemas with such keywords in one schema
_MAX_NEGATED = 2_000  # parts of a schema whose complement is written
_MAX_NODES = 50_000  # of all rewritings of one schema
_MAX_LISTED = 65  # values of items that are looked at
_MAX_PAIRS = 40_000  # of options of oneOf in one schema: a tenth of a second
Schema = dict[str, Any]


def hold(schema: Any) -> Any:
    """``schema`` with dependent keywords, conditions over finite values, disjoint ``oneOf`` and
    keywords without effect written in other words."""
    root = schema if isinstance(schema, Mapping) else {}
    return _Rewriter(root).rewrite(schema)


def unheld_keywords(schema: Any) -> list[str]:
    """The keywords of ``hold(schema)`` that a grammar does not enforce, sorted; none for a schema
    that is too deep, which is refused elsewhere."""
    try:
        return sorted(set(_remaining(hold(schema))))
    except RecursionError:
        return []


class _Rewriter:
    """``root`` resolves local references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_pairs = self._num_nodes = self._num_tries = 0

    def rewrite(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        new = with_patterns(with_parts(schema, _MORE_ONE, self.rewrite))
        _evaluate_statically(new)
        _drop_without_effect(new)
        extra = list(self._extra(new))
        if len(extra) == 1 and not extra[0].keys() & new.keys():
            return new | extra[0]
        if extra:
            new["allOf"] = [*new.get("allOf", ()), *extra]
        return new

    def _extra(self, schema: Schema) -> Iterator[Schema]:
        """Take keywords out of ``schema``, and give the schemas that say the same."""
        yield from _dependent(schema)
        yield from _condition(schema)
        if "oneOf" in schema and self._are_disjoint(schema["oneOf"]):
            yield {"anyOf": schema.pop("oneOf")}
        if self._num_tries >= _MAX_TRIES or not schema.keys() & _REWRITTEN:
            return
        self._num_tries += 1
        for keys, other in self._rewritings(schema):
            if self._has_room(other):
                for key in keys:
                    schema.pop(key, None)
                yield other if isinstance(other, dict) else {"allOf": [other]}

    def _rewritings(self, schema: Schema) -> Iterator[tuple[tuple[str, ...], Any]]:
        """(keywords, the schema that says the same) for those that have one."""
        if "contains" in schema and (options := contained(schema)) is not None:
            yield ("contains", "minContains", "maxContains"), {"anyOf": options}
        values = _values(schema.get("items")) if schema.get("uniqueItems") is True else None
        if values is not None and (options := unique(schema, _distinct(values))) is not None:
            yield ("uniqueItems",), {"anyOf": options}
        if "not" in schema and (other := _complement(schema["not"])) is not None:
            yield ("not",), other
        if "if" in schema and (other := _complement(schema["if"])) is not None:
            cases = [{"allOf": [schema["if"], schema.get("then", True)]}]
            cases.append({"allOf": [other, schema.get("else", True)]})
            yield ("if", "then", "else"), {"anyOf": cases}
        if "oneOf" in schema and (options := self._options(schema["oneOf"])) is not None:
            yield ("oneOf",), {"anyOf": options}

    def _has_room(self, schema: Any) -> bool:
        """Count the parts of a rewriting, unless there are too many: what stands in several
        options, in itself in several, would not end."""
        size = _num_nodes(schema, _MAX_NODES - self._num_nodes)
        self._num_nodes += size or 0
        return size is not None

    def _options(self, one_of: Any) -> list[Any] | None:
        """``oneOf`` as ``anyOf``: each option with the others excluded."""
        if not isinstance(one_of, list) or len(one_of) > _MAX_EXCLUDED:
            return None
        others = [_complement(one) for one in one_of]
        if any(other is None for other in others):
            return None
        return [
            {"allOf": [one, *(other for j, other in enumerate(others) if j != i)]}
            for i, one in enumerate(one_of)
        ]

    def _are_disjoint(self, options: Any) -> bool:
        if not isinstance(options, list):
            return False
        self._num_pairs += len(options) ** 2
        if self._num_pairs > _MAX_PAIRS:
            return False
        options = [self._resolved(option) for option in options]
        pairs = ((a, b) for i, a in enumerate(options) for b in options[:i])
        return all(_is_disjoint(a, b) for a, b in pairs)

    def _resolved(self, schema: Any) -> Any:
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str) or len(schema) > 1 or not ref.startswith("#/"):
            return schema
        found: Any = self._root
        for part in ref[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _num_nodes(schema: Any, most: int) -> int | None:
    """The number of parts of a schema; None if there are more than ``most``."""
    count, left = 0, [schema]
    while left:
        one = left.pop()
        count += 1
        if count > most:
            return None
        left += one.values() if isinstance(one, Mapping) else one if type(one) is list else ()
    return count


def _complement(schema: Any) -> Any | None:
    """``negated`` of a schema that is not too large."""
    return None if _num_nodes(schema, _MAX_NEGATED) is None else negated(schema)


def _distinct(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values[:_MAX_LISTED]:
        found += [] if _is_in(value, found) else [value]
    return found


def _evaluate_statically(schema: Schema) -> None:
    """``unevaluated...`` as ``additionalProperties`` and ``items`` where it is known what else
    applies to the same value."""
    parts = schema.get("allOf", [])
    if schema.keys() & _EVALUATING or not isinstance(parts, list):
        return
    if not all(isinstance(part, Mapping) and part.keys() <= _ABOUT_PROPERTIES for part in parts):
        return
    own = schema.get("properties", {})
    names = [part.get("properties", {}) for part in parts]
    if "unevaluatedProperties" in schema and all(isinstance(one, Mapping) for one in [own, *names]):
        rest = schema.pop("unevaluatedProperties")
        if "additionalProperties" not in schema:
            declared = {name: True for one in names for name in one} | own
            schema |= {"properties": declared, "additionalProperties": rest}
    if "unevaluatedItems" in schema and "contains" not in schema:
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _drop_without_effect(schema: Schema) -> None:
    """Keywords that allow everything, or that work only beside another one."""
    for key in ("then", "else"):
        if schema.get(key, False) in (True, {}):
            del schema[key]
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    for key, value in (
        ("uniqueItems", False),
        ("unevaluatedItems", True),
        ("unevaluatedProperties", True),
        ("propertyNames", True),
    ):
        if schema.get(key) is value:
            del schema[key]
    if schema.get("uniqueItems") is True and _number(schema.get("maxItems")) in (0, 1):
        del schema["uniqueItems"]
    for key in _COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _dependent(schema: Schema) -> Iterator[Schema]:
    """ "If property a is there" as "a is not there, or"."""
    required = schema.get("dependentRequired")
    if isinstance(required, Mapping) and all(map(_is_names, required.values())):
        del schema["dependentRequired"]
        for name, others in required.items():
            if others:
                names = list(dict.fromkeys([name, *others]))
                yield {"anyOf": [{"properties": {name: False}}, {"required": names}]}
    schemas = schema.get("dependentSchemas")
    if isinstance(schemas, Mapping):
        del schema["dependentSchemas"]
        for name, other in schemas.items():
            if other is True or other == {}:
                continue
            held = {"required": [name], "allOf": [other]}
            absent: Schema = {"properties": {name: False}}
            yield absent if other is False else {"anyOf": [absent, held]}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _condition(schema: Schema) -> Iterator[Schema]:
    """A condition on properties whose values are listed: each combination is allowed or not."""
    test = schema.get("if")
    if not isinstance(test, Mapping) or not test.keys() <= {"properties", "required", "type"}:
        return
    properties = test.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return
    ((name, rule),) = properties.items()
    declared = schema.get("properties", {})
    own = declared.get(name) if isinstance(declared, Mapping) else None
    wanted, known = _values(rule), _values(own)
    is_for_objects = schema.get("type") == "object" and test.get("type", "object") == "object"
    if wanted is None or known is None or not is_for_objects or len(rule) != 1:
        return
    if test.get("required", [name]) != [name]:
        return
    fits = [value for value in known if _is_in(value, wanted)]
    rest = [value for value in known if not _is_in(value, wanted)]
    then, otherwise = schema.pop("then", True), schema.pop("else", True)
    del schema["if"]
    absent = otherwise if "required" in test else then
    cases = [_case({name: {"enum": fits}}, [name], then)] if fits else []
    cases += [_case({name: {"enum": rest}}, [name], otherwise)] if rest else []
    if name not in _required(schema):
        cases.append(_case({name: False}, [], absent))
    yield {"anyOf": cases}


def _case(properties: Schema, required: list[str], more: Any) -> Schema:
    case: Schema = {"properties": properties}
    if required:
        case["required"] = required
    return case if more is True else case | {"allOf": [more]}


def _values(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None if it does not."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [True, False] if schema.get("type") == "boolean" else None


def _is_in(value: Any, values: list[Any]) -> bool:
    """As JSON compares: 1 is 1.0, and neither is true."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def _is_disjoint(a: Any, b: Any) -> bool:
    """Whether it is certain that no document is valid for both."""
    if a is False or b is False:
        return True
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return False
    if not _types(a) & _types(b):
        return True
    one, two = _values(a), _values(b)
    if one is not None and two is not None and _are_plain([*one, *two]):
        return not any(_is_in(value, two) for value in one)
    if not _types(a) == _types(b) == {"object"}:
        return False
    names = [name for name in _required(a) if name in _required(b)]
    return any(_is_disjoint(_property(a, name), _property(b, name)) for name in names)


def _are_plain(values: list[Any]) -> bool:
    return not any(isinstance(value, list | dict) for value in values)


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema may have, with integers among the numbers."""
    values = _values(schema)
    if values is not None and "type" not in schema:
        return frozenset(_type_of(value) for value in values)
    said = schema.get("type", list(_TYPES))
    types = frozenset([said] if isinstance(said, str) else said if _is_names(said) else ())
    types = types or _TYPES
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _required(schema: Mapping[str, Any]) -> list[Any]:
    required = schema.get("required", [])
    return required if isinstance(required, list) else []


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties", {})
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def _remaining(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    yield from _UNHELD & schema.keys()
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        yield "format"
    if "propertyNames" in schema and (
        name_pattern(schema["propertyNames"]) is None or "patternProperties" in schema
    ):
        yield "propertyNames"
    options = schema.get("oneOf")
    if isinstance(options, list) and len(options) > 1:
        yield "oneOf"
    for key, value in schema.items():
        if key in LISTS and isinstance(value, list):
            for item in value:
                yield from _remaining(item)
        elif key in _ONE:
            yield from _remaining(value)
        elif key in _MAPS and isinstance(value, Mapping):
            for item in value.values():
                yield from _remaining(item)
