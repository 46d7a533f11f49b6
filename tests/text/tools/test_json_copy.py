"""The streaming JSON copier against json.loads, and its closing brackets."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.text.tools.json_copy import JsonCopier
from radixlm.text.tools.scan import Malformed, Scanner, Truncated

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


def copy(text: str, size: int, is_whole: bool = True) -> list[tuple[str, str]]:
    """Fragments and closers that the copier returns for `text` in chunks of `size` characters."""
    scanner = Scanner()
    given_out: list[tuple[str, str]] = []
    machine = JsonCopier(scanner, lambda text, closers: given_out.append((text, closers))).value()
    next(machine, None)
    for start in range(0, len(text), size):
        scanner.push(text[start : start + size])
        next(machine, None)
    scanner.is_ended = True
    if is_whole:
        next(machine, None)
    else:
        with pytest.raises(Truncated):
            next(machine)
    return given_out


@settings(max_examples=80, derandomize=True, deadline=None)
@given(values, st.integers(1, 9), st.booleans(), st.sampled_from([None, 1]))
def test_a_value_is_copied_and_every_prefix_can_be_closed(
    value: Any, size: int, is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    fragments = copy(text + " ", size)
    assert json.loads("".join(fragment for fragment, _ in fragments)) == value
    so_far = ""
    for fragment, closers in fragments:
        so_far += fragment
        json.loads(so_far + closers)
    assert fragments[-1][1] == ""


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.dictionaries(st.text(max_size=3), values, min_size=1), st.floats(0, 0.99))
def test_a_cut_value_gives_what_can_be_closed(value: dict[str, Any], where: float) -> None:
    text = json.dumps(value)
    fragments = copy(text[: int(len(text) * where)], 3, is_whole=False)
    if fragments:
        closed = "".join(fragment for fragment, _ in fragments) + fragments[-1][1]
        assert set(json.loads(closed)) <= set(value)


@pytest.mark.parametrize(
    "text",
    ["{a: 1}", "{'a': 1}", "[1 2]", "[,1]", "[01]", "[+1]", "[.5]", "[NaN]", "[tru]", "[1}",
     '{"a"}', '{"a" 1}', "{1: 2}", "[nulls]", "[--1]", "[1e]", "x", "]"],
)  # fmt: skip
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        copy(text + " ", 1)
