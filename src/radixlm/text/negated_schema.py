"""The complement of a JSON schema, written with keywords that grammars hold."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]
TYPES = ("string", "number", "boolean", "null", "array", "object")  # integers are numbers
# keyword -> (type that it is about, keyword of the complement, what is added to the value)
_BOUNDS: Mapping[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_ANNOTATIONS = frozenset("title description default examples $comment deprecated".split())
_MAX_DEPTH = 8
_MAX_CHARS, _MAX_NUMBERS = 512, 16  # of the values that are excluded
_REST = r"(.|\n)*"


def negated(schema: Any, depth: int = 0) -> Any | None:
    """A schema with exactly the documents that ``schema`` does not allow; None where none can be
    written."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    options: list[Any] = []
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        option = _without(key, value, depth + 1)
        if option is None:
            return None
        options += [] if option is False else [option]
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


def _without(key: str, value: Any, depth: int) -> Any | None:
    """The documents that break one keyword."""
    if key in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
        kind, other, step = _BOUNDS[key]
        bound = value + step
        return False if step < 0 and bound < 0 else {"type": kind, other: bound}
    if key == "type":
        return _other_types([value] if isinstance(value, str) else value)
    if key == "not":
        return value
    if key in ("const", "enum"):
        return _other_values([value] if key == "const" else value)
    if key in ("anyOf", "allOf") and isinstance(value, list):
        parts = [negated(one, depth) for one in value]
        is_whole = bool(parts) and None not in parts
        return {"allOf" if key == "anyOf" else "anyOf": parts} if is_whole else None
    if key in ("required", "properties"):
        options = list(_without_properties(key, value, depth))
        return None if None in options else {"anyOf": options} if options else False
    return None


def _other_types(types: Any) -> Any | None:
    if not isinstance(types, list) or not all(isinstance(one, str) for one in types):
        return None
    if "integer" in types and "number" not in types:
        return None  # numbers that are no integers
    others = [one for one in TYPES if one not in types]
    return {"type": others} if others else False


def _other_values(values: Any) -> Any | None:
    """All documents but ``values``, which are no arrays and objects."""
    if not isinstance(values, list) or any(isinstance(one, list | dict) for one in values):
        return None
    booleans = {one for one in values if isinstance(one, bool)}
    texts = [one for one in values if isinstance(one, str)]
    numbers = sorted({one for one in values if type(one) in (int, float)})
    touched = {"boolean": booleans, "string": texts, "number": numbers, "null": None in values}
    options: list[Any] = [{"type": [one for one in TYPES if not touched.get(one)]}]
    options += [{"const": one} for one in (True, False) if booleans and one not in booleans]
    if sum(map(len, texts)) > _MAX_CHARS or len(numbers) > _MAX_NUMBERS:
        return None
    if texts:
        options.append({"type": "string", "pattern": f"^({_other_texts(texts)})$"})
    for low, high in itertools.pairwise([None, *numbers, None]) if numbers else ():
        between = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        bounds = {key: bound for key, bound in between.items() if bound is not None}
        options.append({"type": "number", **bounds})
    return {"anyOf": options}


def _other_texts(texts: list[str]) -> str:
    """A regular expression of all texts but these."""
    heads = sorted({text[0] for text in texts if text})
    options = [] if "" in texts else [""]
    if heads:
        listed = "".join(_in_class(head) for head in heads)
        options.append(rf"[^{listed}]{_REST}")
        for head in heads:
            tails = [text[1:] for text in texts if text.startswith(head)]
            options.append(f"{re.escape(head)}({_other_texts(tails)})")
    else:
        options.append(rf"(.|\n){_REST}")
    return "|".join(options)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in r"\]^-[&~" else char


def _without_properties(key: str, value: Any, depth: int) -> Iterator[Schema | None]:
    if key == "required" and isinstance(value, list):
        for name in value:
            if not isinstance(name, str):
                yield None
                return
            yield {"type": "object", "properties": {name: False}}
    elif key == "properties" and isinstance(value, Mapping):
        for name, one in value.items():
            other = negated(one, depth)
            if other is None:
                yield None
            elif other is not False:
                yield {"type": "object", "required": [name], "properties": {name: other}}
    else:
        yield None
