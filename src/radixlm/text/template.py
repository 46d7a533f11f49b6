"""Untrusted Jinja templates: sandboxed, and limited in time, memory and output.

A chat template comes with a checkpoint, a file or a request. It gets plain data only, cannot reach
Python objects, and has a budget: every loop iteration, printed value and string it builds is
counted, so that "{% for i in range(99999) %}..." nested five deep ends with an error. The
environment is that of Hugging Face (trimmed blocks, loop controls, tojson without HTML escapes,
raise_exception, strftime_now, the generation tag), so templates render as they do there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from radixlm.base.errors import InvalidRequest

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 32 << 20
MAX_WORK_CHARS = 128 << 20
MAX_ITERATIONS = 5_000_000
MAX_SECONDS = 1.0  # of processor time, so that a busy machine does not fail a long chat
_PARTS_PER_CHECK = 256
_MAX_WIDTH = 10_000
_MAX_BITS = 4096
_MAX_SLOW_CHARS = 100_000  # for filters written in Python that take microseconds a character
_MAX_INDENT = 64
_SLOW = frozenset({"pprint", "striptags", "title", "urlize", "wordwrap", "xmlattr"})
_ITERATING = frozenset(
    "batch dictsort groupby list map max min reject rejectattr select selectattr slice sort sum "
    "unique wordcount".split()
)
"""Filters that look at every item, or every character, in Python."""
_ITERATIONS_OF_ITEM = 8
_CHARS_OF_ITEM = 8  # a place in a list has as many bytes
_SPACES = tuple(c for c in map(chr, range(0x3001)) if c.isspace())
_OF_JINJA = (Context, nodes.EvalContext, jinja2.Environment)
_OF_TEXT = frozenset({"e", "escape", "forceescape", "format", "join", "string", "tojson"}) | _SLOW
"""Filters that make text of whatever they are given, lists of lists too."""
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _OverBudget(TemplateError):
    """The template used up its time, iterations or characters."""


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("chars", "deadline", "iterations")

    def __init__(self) -> None:
        self.chars = MAX_WORK_CHARS
        self.iterations = MAX_ITERATIONS
        self.deadline = time.thread_time() + MAX_SECONDS

    def iterate(self, num_chars: int) -> str:
        """Count one loop iteration or macro call that prints ``num_chars`` of fixed text."""
        self.iterations -= 1
        if self.iterations < 0:
            raise _OverBudget("too many loop iterations")
        if self.iterations & 255 == 0 and time.thread_time() > self.deadline:
            raise _OverBudget("too slow")
        self.spend(num_chars)
        return ""

    def pass_over(self, num_items: int) -> None:
        """Count a filter's work on so many items before it begins."""
        self.iterations -= _ITERATIONS_OF_ITEM * num_items
        self.iterate(0)

    def spend(self, num_chars: int) -> None:
        """Count a string of ``num_chars``, if possible before it is built."""
        self.chars -= num_chars
        if self.chars < 0:
            raise _OverBudget("too much text")


_BUDGET: ContextVar[_Budget] = ContextVar("template_budget")


def _spend(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and (budget := _BUDGET.get(None)):
        budget.spend(len(value))
    return value


def _measure(value: Any) -> int:
    """Count the characters of ``value`` as text before it is built; the number of them. A list may
    hold one long string, or one list, a million times."""
    budget = _BUDGET.get()
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        num_chars = len(item) if isinstance(item, str) else 8
        budget.iterate(num_chars)
        total += num_chars
        if isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return total


def _finalize(value: Any) -> Any:
    """Count what is printed, before it is text."""
    if isinstance(value, list | tuple | Mapping) and _BUDGET.get(None) is not None:
        _measure(value)
    return _spend(value)


def _iterate(num_chars: int) -> str:
    return _BUDGET.get().iterate(num_chars)


def _splat(values: Any) -> Any:
    """Count what becomes so many objects: a character takes 80 bytes of its own."""
    if isinstance(values, Sized):
        _BUDGET.get().pass_over(len(values))
    return values


def _concat(*values: Any) -> str:
    for value in values:
        _measure(value)
    return "".join([str(value) for value in values])


class _Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's environment that counts everything that can grow."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check operators that make large values out of small ones first."""
        _check_operator(operator, left, right)
        return _spend(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format of the sandbox with checked widths."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            _check_string_method(value.__self__, value.__name__, args, kwargs)
            return function(*args, **kwargs)

        return run

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check methods of strings; count what a call returns."""
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_string_method(__obj.__self__, __obj.__name__, args, kwargs)
        return _spend(super().call(__context, __obj, *args, **kwargs))


def _check_operator(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and numbers and left.bit_length() * abs(right) > _MAX_BITS:
        raise _OverBudget("a number is too large")
    if operator == "*" and numbers and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise _OverBudget("a number is too large")
    if operator == "%" and isinstance(left, str):
        _check_format(left, right)
    if operator in "+*":
        sizes = [len(side) if isinstance(side, Sized) else side for side in (left, right)]
        if any(isinstance(side, Sized) for side in (left, right)):
            whole = [size for size in sizes if isinstance(size, int)]
            grown = sum(whole) if operator == "+" else max(0, whole[0] * whole[-1])
            if any(isinstance(side, list | tuple) for side in (left, right)):
                grown *= _CHARS_OF_ITEM
            _BUDGET.get().spend(grown)


def _check_format(text: str, *values: Any) -> None:
    """Each field of a format may be the largest of ``values``."""
    if _WIDE_FORMAT.search(text):
        raise _OverBudget("a format is too wide")
    _BUDGET.get().spend((text.count("%") + text.count("{")) * _measure(values))


def _check_string_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    values = (*args, *kwargs.values())
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"):
        _check_widths(values)
        if name.startswith("format"):
            _check_format(text, *values)
        if name == "expandtabs":
            _BUDGET.get().spend(text.count("\t") * _MAX_WIDTH)
    elif name == "replace" and len(values) >= 2 and all(isinstance(a, str) for a in values[:2]):
        _BUDGET.get().spend(text.count(values[0]) * len(values[1]))
    elif name == "join" and values and isinstance(values[0], Sized):
        _splat(values[0])
        _BUDGET.get().spend(len(text) * len(values[0]) + _measure(values[0]))
    elif name in ("split", "rsplit", "splitlines"):
        marks = [v for v in values if isinstance(v, str) and v] or _SPACES
        _BUDGET.get().pass_over(sum(map(text.count, marks)) // _ITERATIONS_OF_ITEM)
    elif name == "translate" and values and isinstance(values[0], Mapping):
        longest = max((len(new) for new in values[0].values() if isinstance(new, str)), default=1)
        _BUDGET.get().spend(len(text) * longest)


def _check_widths(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
        raise _OverBudget("a width is too large")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses wide padding and counts its result."""

    @wraps(function)  # also keeps Jinja's marks on the function
    def run(*args: Any, **kwargs: Any) -> Any:
        # Jinja gives some filters its environment or context first
        values = tuple(v for v in (*args, *kwargs.values()) if not isinstance(v, _OF_JINJA))
        if name in ("center", "indent", "batch", "slice", "wordwrap", "tojson"):
            _check_widths(values)
        texts = [value for value in values if isinstance(value, str)]
        _check_filter(name, values, texts)
        if name == "join" and args and not isinstance(args[-1], Sized):
            args = (*args[:-1], list(args[-1]))
        if name == "replace" and len(texts) >= 3:
            _BUDGET.get().spend(texts[0].count(texts[1]) * len(texts[2]))
        if name == "join" and texts and len(texts[-1]) > _MAX_WIDTH:
            raise _OverBudget("a separator is too long")
        return _spend(function(*args, **kwargs))

    return run


def _check_filter(name: str, values: tuple[Any, ...], texts: list[str]) -> None:
    """Refuse or count what a filter would build of ``values``; ``texts``: the strings of them."""
    if name in _ITERATING and values and isinstance(values[0], Sized):
        _BUDGET.get().pass_over(len(values[0]))
    if name == "format" and texts:
        _check_format(texts[0], *values[1:])
    elif name in _OF_TEXT:
        num_chars = sum(map(_measure, values))
        if name in _SLOW and num_chars > _MAX_SLOW_CHARS:
            raise _OverBudget(f"a text is too long for the filter {name}")
    if name in ("indent", "wordwrap") and texts:
        numbers = [value for value in values if isinstance(value, int)]
        lines = texts[0].count("\n") + len(texts[0]) // max(1, *numbers, 1) + 1
        grown = max([*numbers, *map(len, texts[1:]), 4])
        _BUDGET.get().spend(grown * (lines if name == "wordwrap" else texts[0].count("\n") + 1))
    if name == "tojson" and any(isinstance(v, int) and v > _MAX_INDENT for v in values[1:]):
        raise _OverBudget("an indent is too large")
    if name == "sum" and any(isinstance(value, list | tuple) for value in values[1:]):
        raise _OverBudget("only numbers can be summed")


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks text for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """``namespace(...)`` without private names (``__html__``, ``_x``)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be a name in the template
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict(...)`` as a function: templates must not reach attributes of the class."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_finalize,
    )
    environment.filters["tojson"] = _tojson
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _guarded(name, function)
    del environment.globals["lipsum"]
    environment.globals.update(
        dict=_dict,
        namespace=_Names,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment


_ENVIRONMENT = _environment()


def _add_counters(tree: nodes.Template) -> None:
    """Insert a counter into each loop, macro and call body, each "~" and each "*arguments"."""
    bodies = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
    for node in list(tree.find_all(bodies)):
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        count = nodes.Call(_imported(_iterate), [nodes.Const(num_chars)], [], None, None)
        body: list[nodes.Node] = node.body  # type: ignore[attr-defined]
        body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
    for call in list(tree.find_all((nodes.Call, nodes.Filter, nodes.Test))):
        if (values := call.dyn_args) is not None:  # type: ignore[attr-defined]
            counted = nodes.Call(_imported(_splat), [values], [], None, None)
            call.dyn_args = counted.set_lineno(call.lineno)  # type: ignore[attr-defined]
    _replace_concat(tree)


def _replace_concat(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_concat(item)
            if isinstance(item, nodes.Concat):
                call = nodes.Call(_imported(_concat), item.nodes, [], None, None)
                items[index] = call.set_lineno(item.lineno)
        if not isinstance(value, list):
            setattr(node, field, items[0])


def _imported(function: Callable[..., Any]) -> nodes.ImportedName:
    """A reference that no name in the template can shadow."""
    return nodes.ImportedName(f"{__name__}.{function.__name__}")


class Template:
    """One compiled template. Safe to render from several threads."""

    def __init__(self, source: str, param: str = "chat_template") -> None:
        """Raises InvalidRequest(param) for a template that does not compile."""
        if len(source) > MAX_SOURCE_CHARS:
            raise InvalidRequest(f"a template has at most {MAX_SOURCE_CHARS} characters", param)
        self.source = source
        try:
            self.tree = _ENVIRONMENT.parse(source)
            counted = _ENVIRONMENT.parse(source)
            _add_counters(counted)
            code = _ENVIRONMENT.compile(counted)
            self._template = jinja2.Template.from_code(
                _ENVIRONMENT, code, dict(_ENVIRONMENT.globals)
            )
        except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise InvalidRequest(f"the template does not compile: {where}{error}", param) from None

    def render(self, variables: Mapping[str, Any], param: str = "messages") -> str:
        """The text; InvalidRequest(param) if the template fails, raises or exceeds its budget."""
        budget = _Budget()
        token = _BUDGET.set(budget)
        parts, num_chars = [], 0
        try:
            for part in self._template.generate(**_plain(variables)):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise _OverBudget("too much text")
                if len(parts) % _PARTS_PER_CHECK == 0 and time.thread_time() > budget.deadline:
                    raise _OverBudget("too slow")
        except (_OverBudget, SecurityError) as error:
            raise InvalidRequest(f"the chat template was stopped: {error}", param) from None
        except _FAILURES as error:
            raise InvalidRequest(f"the chat template raised: {error}", param) from None
        finally:
            _BUDGET.reset(token)
        return "".join(parts)


def _plain(value: Any) -> Any:
    """``value`` as plain JSON types, so that a template cannot call methods of other classes."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
