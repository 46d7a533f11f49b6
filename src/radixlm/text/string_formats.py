"""Formats of strings as patterns. Each pattern allows valid strings only; of those that no regular
expression describes it allows the plain ones (ASCII host names, for instance)."""

from collections.abc import Mapping
from typing import Any

_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # from 0001
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
_POINTER = "(/([^/~]|~[01])*)*"
_HEX = "%[0-9A-Fa-f]{2}"
_CHAR = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|{_HEX})"
_PATH = rf"(([A-Za-z0-9._~!$&'()*+,;=@-]|{_HEX})+(/{_CHAR}*)*|/({_CHAR}+(/{_CHAR}*)*)?)?"
_QUERY = rf"(\?({_CHAR}|[/?])*)?(#({_CHAR}|[/?])*)?"
_LABEL = "[A-Za-z0-9]{1,63}"
_URL = rf"[A-Za-z][A-Za-z0-9+.-]*://{_LABEL}(\.{_LABEL})*(:[0-9]{{1,5}})?(/{_CHAR}*)*"
_VARIABLE = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(:[1-9][0-9]{0,3}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}}"
_PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "uri-reference": f"({_URL}|{_PATH}){_QUERY}",
    "iri-reference": f"({_URL}|{_PATH}){_QUERY}",
    "iri": f"{_URL}{_QUERY}",
    "uri-template": rf"([A-Za-z0-9._~!$&()*+,;=:@/?#\[\]-]|{_HEX}|{_EXPRESSION})*",
    "time": _TIME,
}
_WORDS = r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*"  # two hyphens may begin an encoded label
_HOST = {"format": "hostname", "pattern": rf"^{_WORDS}(\.{_WORDS})*$", "maxLength": 253}
_OTHERS: Mapping[str, dict[str, Any]] = {
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "idn-email": {"format": "email"},
}
_OF_NUMBERS = {"int32": 31, "int64": 63}  # OpenAPI's, and the bits of the magnitude
_NO_RULES = frozenset(("float", "double", "password", "binary"))


def with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` (one level) with its ``format`` in other keywords where there is a pattern."""
    name = schema.get("format")
    if not isinstance(name, str):
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if name in _PATTERNS:
        return _both(rest, {"pattern": f"^({_PATTERNS[name]})$"})
    if name in _OF_NUMBERS:
        end = 1 << _OF_NUMBERS[name]
        return _both(rest, {"minimum": -end, "maximum": end - 1})
    if name in _OTHERS:
        return _both(rest, _OTHERS[name])
    return rest if name in _NO_RULES else schema


def _both(schema: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if not schema.keys() & more.keys():
        return schema | more
    return schema | {"allOf": [*schema.get("allOf", ()), more]}
