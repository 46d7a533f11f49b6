"""Checks finished answers against JSON schemas of which a grammar cannot enforce every keyword.

The package jsonschema does the work. Its regular expressions backtrack and its keywords have no
bound, so patterns are searched by ``stop_regex`` and every keyword is counted.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.text.held_schema import unheld_keywords
from radixlm.text.stop_regex import occurs

_MAX_STEPS = 50_000  # some 100 ms
_MAX_PATTERN_CHARS = 4096  # of a text that a pattern is searched in


class NotChecked(Exception):
    """The check cannot be made; the message is the reason."""


class UnheldSchema(Record):
    """A schema of a request and the keywords, with commas, that its grammar does not enforce.
    ``where`` is the field that holds it."""

    schema: Any
    names: str
    where: str

    @property
    def note(self) -> str:
        """What the client is told before there is an answer."""
        return f"{self.where}: not enforced: {self.names}"

    def error(self, text: str) -> str:
        """What the client is told of an answer; empty if it is a document of the schema."""
        try:
            found = document_error(self.schema, text)
        except NotChecked as reason:
            return f"{self.where}: the answer is not checked: {reason}"
        return f"{self.where}: the answer does not fit: {found:.300}" if found else ""


def unheld_schema(schema: Any, where: str) -> UnheldSchema | None:
    """None for a schema that a grammar enforces in full."""
    names = ", ".join(unheld_keywords(schema))
    return UnheldSchema(schema, names, where) if names else None


def document_error(schema: Any, text: str) -> str | None:
    """Why ``text`` is no JSON document of ``schema``; None if it is one. NotChecked where the
    package is missing, and for schemas that take too long or refer to others."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    try:
        library = importlib.import_module("jsonschema")
        referencing: Any = importlib.import_module("referencing")
    except ImportError:
        raise NotChecked("pip install 'radixlm[grammar]'") from None
    steps = _Steps()
    kind = library.validators.extend(
        library.Draft202012Validator, _counted(library.Draft202012Validator.VALIDATORS, steps)
    )
    formats = library.Draft202012Validator.FORMAT_CHECKER
    # an empty registry: nothing is fetched
    checks = kind(schema, registry=referencing.Registry(), format_checker=formats)
    try:
        first = next(checks.iter_errors(document), None)
    except NotChecked:
        raise
    except (RecursionError, InvalidRequest) as error:
        raise NotChecked(str(error)[:200] or type(error).__name__) from None
    except Exception as error:  # the library raises what a broken schema leads to
        raise NotChecked(f"{type(error).__name__}: {error}"[:200]) from None
    return None if first is None else str(first.message)


class _Steps:
    def __init__(self) -> None:
        self.left = _MAX_STEPS

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise NotChecked("the check takes too long")


Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


def _counted(keywords: Mapping[str, Keyword], steps: _Steps) -> dict[str, Keyword]:
    """The keywords with a count, and with patterns that do not backtrack."""
    found = {name: _count(keyword, steps) for name, keyword in keywords.items()}
    error: Any = importlib.import_module("jsonschema").ValidationError

    def pattern(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not _is_found(value, instance, steps):
            yield error(f"{instance!r:.80} does not match {value!r:.80}")

    def refused(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        raise NotChecked("patternProperties")

    return found | {"pattern": pattern, "patternProperties": refused}


def _count(keyword: Keyword, steps: _Steps) -> Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
        sizes = [len(one) for one in (value, instance) if isinstance(one, list)]
        is_square = keyword.__name__ == "uniqueItems"
        steps.take(1 + sum(size * size // 8 if is_square else size for size in sizes))
        return keyword(validator, value, instance, schema)

    return counted


def _is_found(pattern: str, text: str, steps: _Steps) -> bool:
    """Whether the pattern occurs in the text."""
    if len(text) > _MAX_PATTERN_CHARS:
        raise NotChecked("a long text has a pattern")
    steps.take(len(text))
    return occurs(pattern, text)
