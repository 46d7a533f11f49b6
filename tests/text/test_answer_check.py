"""Answers that do not fit their schema are found, in bounded time."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from tests.text.test_held_schema import DOCUMENTS, _draw

from radixlm.text.answer_check import NotChecked, document_error, unheld_schema
from radixlm.text.stop_regex import occurs


def test_the_verdict_is_that_of_the_standard() -> None:
    rng = random.Random(1)
    verdicts = set()
    for _ in range(60):
        schema = _draw(rng, 3)
        for document in rng.sample(DOCUMENTS, 20):
            fits = jsonschema.Draft202012Validator(schema).is_valid(document)
            assert (document_error(schema, json.dumps(document)) is None) == fits
            verdicts.add(fits)
    assert verdicts == {True, False}


@pytest.mark.parametrize("pattern", ["b", "^a*$", "^(a|b){2}$", "^$", r"a\b", "[^b]$", "c|^b", "."])
def test_patterns_occur_where_pythons_do(pattern: str) -> None:
    for text in ("", "a", "b", "ab", "ba", "aab", "abc d", "a b"):
        assert occurs(pattern, text) == bool(re.search(pattern, text)), text
        schema = {"not": {"pattern": pattern}}
        found = document_error(schema, json.dumps(text))
        assert (found is None) != bool(re.search(pattern, text))


def test_what_the_client_is_told() -> None:
    schema = {"type": "array", "uniqueItems": True}
    unheld = unheld_schema(schema, "sampling_params.json_schema")
    assert unheld is not None
    assert unheld.note == "sampling_params.json_schema: not enforced: uniqueItems"
    assert unheld.error("[1, 2]") == ""
    assert "does not fit: [1, 1] has non-unique" in unheld.error("[1, 1]")
    assert "does not fit: not JSON" in unheld.error("[1, 1")
    assert unheld_schema({"type": "array"}, "x") is None


@pytest.mark.parametrize(
    ("schema", "document", "reason"),
    [
        ({"not": {"pattern": "^(a+)+$"}}, "a" * 3000 + "b", None),
        ({"not": {"pattern": "(?=a)"}}, "a", "not supported"),
        ({"not": {"pattern": "a"}}, "b" * 5000, "long text"),
        ({"enum": list(range(50_001)), "not": {}}, [1], "too long"),
        ({"uniqueItems": True}, [{"a": i} for i in range(2000)], "too long"),
        ({"not": {"$ref": "#"}}, 1, "recursion"),
        ({"not": {"$ref": "http://127.0.0.1:9/x"}}, 1, "Unresolvable|WrappedReferencing"),
        ({"not": {"patternProperties": {"a": {}}}}, {"a": 1}, "patternProperties"),
        ({"not": {"type": 5}}, 1, "."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_schemas_are_not_checked(schema: Any, document: Any, reason: str | None) -> None:
    if reason is None:
        assert document_error(schema, json.dumps(document)) is None
        return
    with pytest.raises(NotChecked, match=reason):
        document_error(schema, json.dumps(document))


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    unheld = unheld_schema({"uniqueItems": True}, "here")
    assert unheld is not None
    assert unheld.error("[]") == "here: the answer is not checked: pip install 'radixlm[grammar]'"
