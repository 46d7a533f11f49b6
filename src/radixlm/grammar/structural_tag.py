"""Structural tags: free text with constrained parts, as a Lark grammar.

Reads both forms: {"structures": [{"begin", "schema", "end"}], "triggers": [...]} and
{"type": "structural_tag", "format": node} with the nodes of xgrammar's format.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from radixlm.grammar.spec import refuse
from radixlm.text.json_schema import close_objects

_ANY_TEXT = r"/(.|\n)*/"
_MAX_RULES = 10_000
_MAX_REPEAT = 1000
_MAX_TAGS = 512  # alternatives after one free text
_MAX_TEXT = 1 << 15
Node = Mapping[str, Any]


def _invalid(reason: str) -> Exception:
    return refuse("structural_tag", reason)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def to_format(tag: Any) -> dict[str, Any]:
    """The {"format": ...} form of a tag; InvalidRequest if it has neither form."""
    if not isinstance(tag, dict):
        raise _invalid("must be an object")
    if "format" in tag:
        return tag
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _invalid('must have "format", or "structures" and "triggers"')
    tags = []
    for item in structures:
        if not isinstance(item, dict):
            raise _invalid("each of structures must be an object")
        schema = item.get("schema", item.get("schema_"))
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise _invalid(f"a schema is not JSON: {error}") from None
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        begin, end = item.get("begin"), item.get("end", "")
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    format_: dict[str, Any] = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    format_["at_least_one"] = bool(tag.get("at_least_one", False))
    return {"type": "structural_tag", "format": format_}


class StructuralTagWriter:
    """Writes one structural tag as Lark rules.

    ``special``: special tokens, which a grammar writes as <token> because text cannot match them.
    ``json_options`` go to each schema; ``to_lark`` turns an EBNF grammar into Lark and
    ``to_regex`` a regular expression into Lark's form.
    """

    def __init__(
        self,
        special: frozenset[str],
        json_options: Mapping[str, Any],
        to_lark: Callable[[str], str],
        to_regex: Callable[[str], str],
    ) -> None:
        self._special = special
        self._json_options = dict(json_options)
        self._to_lark = to_lark
        self._to_regex = to_regex
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._writers: dict[str, Callable[[Node], str]] = {
            "const_string": lambda node: self._text(_string(node, "value")),
            "json_schema": self._write_schema,
            "regex": lambda node: f"/{self._to_regex(_string(node, 'pattern'))}/",
            "grammar": self._write_grammar,
            "any_text": self._write_any_text,
            "sequence": lambda node: " ".join(self._all(node, "elements")),
            "or": lambda node: " | ".join(self._all(node, "elements")),
            "tag": self._write_tag,
            "triggered_tags": self._write_triggered,
            "tags_with_separator": self._write_separated,
            "optional": lambda node: f"({self._inner(node)})?",
            "plus": lambda node: f"({self._inner(node)})+",
            "star": lambda node: f"({self._inner(node)})*",
            "repeat": self._write_repeat,
        }

    def write(self, tag: Any) -> str:
        """The grammar in llguidance's JSON form."""
        start = self._rule(to_format(tag).get("format"))
        lark = "\n".join([f"start: {start}", *self._rules])
        first = {"name": "structural_tag", "lark_grammar": lark}
        return json.dumps({"grammars": [first, *self._grammars]})

    def _rule(self, node: Any) -> str:
        """A new rule for ``node``; its name."""
        if not isinstance(node, Mapping):
            raise _invalid("a format must be an object")
        writer = self._writers.get(str(node.get("type")))
        if writer is None:
            known = ", ".join(self._writers)
            raise _invalid(f"the format {node.get('type')!r:.40} is none of: {known}")
        return self._add(writer(node))

    def _add(self, body: str) -> str:
        if len(self._rules) >= _MAX_RULES:
            raise _invalid(f"more than {_MAX_RULES} rules")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _all(self, node: Node, key: str) -> list[str]:
        items = node.get(key)
        if not isinstance(items, list) or not items:
            raise _invalid(f"{node.get('type')}.{key} must be a list with at least one item")
        return [self._rule(item) for item in items]

    def _inner(self, node: Node) -> str:
        return self._rule(node.get("content"))

    def _text(self, text: str) -> str:
        """A text as a sequence of strings and special tokens."""
        if len(text) > _MAX_TEXT:
            raise _invalid(f"a text of {len(text)} characters, at most {_MAX_TEXT}")
        parts, rest = [], text
        while rest:
            matches = [(rest.find(s), -len(s), s) for s in self._special if s in rest]
            if not matches:
                parts.append(_quote(rest))
                break
            position, _, special = min(matches)
            if position:
                parts.append(_quote(rest[:position]))
            parts.append(special_name(special))
            rest = rest[position + len(special) :]
        return " ".join(parts) or '""'

    def _write_schema(self, node: Node) -> str:
        if node.get("style", "json") != "json":
            raise _invalid(f"json_schema.style {node['style']!r:.40} is not supported, only json")
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise _invalid("json_schema.json_schema must be an object")
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            schema = {**close_objects(schema), "x-guidance": self._json_options}
        return f"%json {json.dumps(schema)}"

    def _write_grammar(self, node: Node) -> str:
        name = f"g{len(self._grammars)}"
        lark = self._to_lark(_string(node, "grammar"))
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _write_any_text(self, node: Node) -> str:
        excludes = node.get("excludes") or []
        if not excludes:
            return _ANY_TEXT
        if not all(isinstance(text, str) and text for text in excludes):
            raise _invalid("any_text.excludes must hold strings")
        choices = "|".join(_escape(text) for text in excludes)
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: /(.|\\n)*/ & ~/(.|\\n)*({choices})(.|\\n)*/")
        return name

    def _write_tag(self, node: Node) -> str:
        return f"{self._text(_string(node, 'begin'))} {self._tag_rest(node)}"

    def _tag_rest(self, node: Node) -> str:
        """Content and end. Free text and its end are matched as one lazy terminal."""
        ends = node.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise _invalid("tag.end must be a string or a list of strings")
        content = node.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            return self._until(ends, [""] * len(ends))
        closing = " | ".join(self._text(end) for end in ends)
        return f"{self._rule(content)} ({closing})"

    def _until(self, markers: list[str], bodies: list[str]) -> str:
        """Free text up to the first of ``markers``, then the body of that marker."""
        choices = []
        for marker, body in zip(markers, bodies, strict=True):
            if marker in self._special:
                choices.append(f"{_ANY_TEXT} {special_name(marker)} {body}")
            else:
                name = f"u{len(self._rules)}"
                self._rules.append(f"{name}[lazy]: {_ANY_TEXT} {_quote(marker)}")
                choices.append(f"{name} {body}")
        return f"({' | '.join(choices)})"

    def _write_triggered(self, node: Node) -> str:
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise _invalid("triggers must be a list with at least one string")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _invalid("triggers must hold strings that are not empty")
        tags = _tags(node)
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for tag in tags:
            begin = _string(tag, "begin")
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise _invalid(f"no trigger begins the tag {begin!r:.60}")
            rest = begin[len(trigger) :]
            body = self._add(f"{self._text(rest)} {self._tag_rest(tag)}")
            bodies[trigger].append(body)
            whole.append(self._add(f"{self._text(trigger)} {body}"))
        used = [trigger for trigger in triggers if bodies[trigger]]
        part = self._add(self._until(used, [f"({' | '.join(bodies[t])})" for t in used]))
        first = self._add(" | ".join(whole))
        at_least_one = bool(node.get("at_least_one", False))
        if node.get("stop_after_first", False):
            return first if at_least_one else f"{part} | {_ANY_TEXT}"
        return f"{first} {part}* {_ANY_TEXT}" if at_least_one else f"{part}* {_ANY_TEXT}"

    def _write_separated(self, node: Node) -> str:
        one = self._add(" | ".join(self._add(self._write_tag(tag)) for tag in _tags(node)))
        separator = self._text(_string(node, "separator"))
        more = "" if node.get("stop_after_first", False) else f" ({separator} {one})*"
        return f"{one}{more}" if node.get("at_least_one", False) else f"({one}{more})?"

    def _write_repeat(self, node: Node) -> str:
        low, high = node.get("min", 0), node.get("max", -1)
        if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= _MAX_REPEAT):
            raise _invalid(f"repeat.min must be in [0, {_MAX_REPEAT}]")
        if high != -1 and not low <= high <= _MAX_REPEAT:
            raise _invalid(f"repeat.max must be -1 or in [min, {_MAX_REPEAT}]")
        return f"({self._inner(node)}){{{low},{'' if high == -1 else high}}}"


def special_name(text: str) -> str:
    """The special token as a Lark grammar writes it."""
    return text if text.startswith("<") and text.endswith(">") else f"<{text}>"


def _tags(node: Node) -> list[Node]:
    tags = node.get("tags")
    if not isinstance(tags, list) or not tags or not all(isinstance(t, Mapping) for t in tags):
        raise _invalid("tags must be a list with at least one tag")
    if len(tags) > _MAX_TAGS:
        raise _invalid(f"{len(tags)} tags, at most {_MAX_TAGS}")
    return tags


def _string(node: Node, key: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise _invalid(f"{node.get('type', 'tag')}.{key} must be a string")
    return value


def _escape(text: str) -> str:
    return "".join(f"\\x{{{ord(c):x}}}" if not c.isalnum() else c for c in text)
