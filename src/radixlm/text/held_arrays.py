"""``contains`` and ``uniqueItems`` as the arrays that fulfil them, where those can be listed."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from radixlm.text.negated_schema import TYPES, negated

Schema = dict[str, Any]
_FIRST_ITEMS = 8  # where an array without maxItems must contain what it has to
_MAX_OPTIONS = 128


def contained(schema: Schema) -> list[Schema] | None:
    """The options that stand for ``contains`` with its counts; None if there are too many, or an
    item that does not fit cannot be described. The items that count are among the first
    ``maxItems``, or among the first 8."""
    wanted, low = schema["contains"], schema.get("minContains", 1)
    high, most = schema.get("maxContains"), schema.get("maxItems")
    if not all(_is_count(one) for one in (low, 0 if high is None else high)):
        return None
    if most is not None and not _is_count(most):
        return None
    size = _FIRST_ITEMS + low if most is None else most
    if high is not None and most is not None and high >= most:
        high = None
    other = True if high is None else negated(wanted)
    counts = range(low, (low if high is None else min(high, size)) + 1)
    if other is None or size > 64 or sum(math.comb(size, k) for k in counts) > _MAX_OPTIONS:
        return None
    options = [
        _array(_row(places, wanted, other), other, len(places) > 0)
        for k in counts
        for places in itertools.combinations(range(size), k)
    ]
    return [*options, *_other_types(schema)]


def _row(places: tuple[int, ...], wanted: Any, other: Any) -> list[Any]:
    end = places[-1] + 1 if places else 0
    return [wanted if place in places else other for place in range(end)]


def _array(first: list[Any], rest: Any, is_whole: bool) -> Schema:
    array: Schema = {"type": "array", "items": rest}
    if first:
        array["prefixItems"] = first
    return array | ({"minItems": len(first)} if is_whole else {})


def unique(schema: Schema, values: list[Any]) -> list[Schema] | None:
    """The options that stand for ``uniqueItems`` where each item is one of ``values``; None if
    there are too many."""
    most = schema.get("maxItems", len(values))
    if not _is_count(most) or "prefixItems" in schema:
        return None
    size = min(most, len(values))
    if len(values) > 64 or math.perm(len(values), size) > _MAX_OPTIONS:
        return None
    orders = itertools.permutations(values, size)
    options = [_array([{"const": one} for one in order], False, False) for order in orders]
    return [*options, *_other_types(schema)]


def _other_types(schema: Mapping[str, Any]) -> Iterator[Schema]:
    """The documents that are no arrays, of which these keywords say nothing."""
    if schema.get("type") != "array":
        yield {"type": [one for one in TYPES if one != "array"]}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
