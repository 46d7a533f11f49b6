"""The expressions that a program appends to its state, and the sampling parameters of a call.

Names and defaults are those of SGLang's frontend language (``sglang.lang.ir`` 0.5.2).
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from radixlm.lang.choices import ChoicesSamplingMethod

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""
_NUMBER_STOPS = (" ", "\n")
# dtype -> regular expression, further stop strings
_DTYPES: dict[Any, tuple[str, tuple[str, ...]]] = {
    int: (REGEX_INT, _NUMBER_STOPS),
    float: (REGEX_FLOAT, _NUMBER_STOPS),
    str: (REGEX_STR, ()),
    bool: (REGEX_BOOL, ()),
}
_DTYPES |= {dtype.__name__: value for dtype, value in _DTYPES.items()}
_LOGPROB_FIELDS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)


@dataclass
class SglSamplingParams:
    """How one call samples. In an expression None means the value of ``run``."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = 0
    n: int | None = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    ignore_eos: bool | None = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    dtype: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stop_regex: str | Sequence[str] | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None

    def clone(self) -> SglSamplingParams:
        made = object.__new__(SglSamplingParams)  # a third of the time of dataclasses.replace
        made.__dict__.update(self.__dict__)
        return made

    def overridden(
        self, by: SglSamplingParams, more_stops: Sequence[str] = ()
    ) -> SglSamplingParams:
        """These with the values of ``by`` that are not None, and the stops of a chat template."""
        merged = self.clone()
        merged.__dict__.update({k: v for k, v in by.__dict__.items() if v is not None})
        merged.stop = [*merged.stops(), *more_stops]
        return merged

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def constrained(self) -> SglSamplingParams:
        """``dtype`` as a regular expression; it wins over ``regex``. ValueError if unknown."""
        if self.dtype is None:
            return self
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: one of int, float, str, bool works")
        if self.regex is not None:
            warnings.warn(f"dtype {self.dtype} is used, regex {self.regex!r} is not", stacklevel=2)
        regex, stops = _DTYPES[self.dtype]
        return replace(self, dtype=None, regex=regex, stop=[*self.stops(), *stops])

    def logprob_fields(self) -> dict[str, Any]:
        """The fields of /generate beside sampling_params."""
        found = {name: getattr(self, name) for name in _LOGPROB_FIELDS}
        return {name: value for name, value in found.items() if value is not None}

    def to_srt_kwargs(self) -> dict[str, Any]:
        """As sampling_params of /generate."""
        names = [f.name for f in fields(self) if f.name not in (*_LOGPROB_FIELDS, "dtype")]
        # other servers need not know them
        ours = ("ebnf", "structural_tag", "stop_regex", "seed", "skip_special_tokens")
        values = {name: getattr(self, name) for name in names}
        values = {k: v for k, v in values.items() if k not in ours or v is not None}
        if self.seed is not None:
            values["sampling_seed"] = values.pop("seed")
        return {**values, "stop": self.stops(), "stop_token_ids": list(self.stop_token_ids or ())}

    def _warn(self, whose: str, *others: Any) -> None:
        if any((self.regex, self.json_schema, self.ebnf, self.structural_tag, *others)):
            warnings.warn(
                f"Regular expression is not supported in the {whose} backend.", stacklevel=3
            )

    def to_openai_kwargs(self) -> dict[str, Any]:
        self._warn("OpenAI")
        return self._chat_kwargs() | {"max_completion_tokens": self.max_new_tokens, "n": self.n}

    def _chat_kwargs(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_new_tokens,
            "stop": self.stop or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def to_vertexai_kwargs(self) -> dict[str, Any]:
        self._warn("VertexAI", self.dtype)
        return {
            "candidate_count": 1,
            "max_output_tokens": self.max_new_tokens,
            "stop_sequences": self.stop,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if (self.top_k or -1) > 0 else None,
        }

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        self._warn("Anthropic", self.dtype)
        # newer clients have no arguments of these names, older ones no others
        more = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        unset = {"temperature": (None,), "top_p": (None, 1.0), "top_k": (None, -1, 0)}
        return {
            "max_tokens": self.max_new_tokens,
            "stop_sequences": self.stops(),
            "extra_body": {name: v for name, v in more.items() if v not in unset[name]},
        }

    def to_litellm_kwargs(self) -> dict[str, Any]:
        self._warn("LiteLLM", self.dtype)
        return self._chat_kwargs()


_UNSET = SglSamplingParams(**dict.fromkeys(one.name for one in fields(SglSamplingParams)))


class SglExpr:
    """An expression; they add to each other and to strings. ``node_id`` and ``prev_node`` are the
    tracer's. ``form``: of its ``repr``."""

    form: ClassVar[str] = ""
    _count = itertools.count()

    def __init__(self) -> None:
        self.node_id = next(SglExpr._count)
        self.prev_node: SglExpr | None = None
        self.pid: str | None = None

    def __repr__(self) -> str:
        return self.form.format(self=self)

    @property
    def before(self) -> int | None:
        """The number of the expression before it in a trace."""
        return self.prev_node.node_id if self.prev_node is not None else None

    def __add__(self, other: SglExpr | str) -> SglExprList:
        return SglExprList([*parts(self), *parts(other)])

    def __radd__(self, other: SglExpr | str) -> SglExprList:
        return SglExprList([*parts(other), *parts(self)])

    def print_graph_dfs(self) -> str:
        """The graph that a trace has found, one node a line, from the first on."""
        lines: list[str] = []
        seen: set[int] = set()
        todo: list[tuple[SglExpr, bool]] = [(self, False)]
        while todo:
            node, has_inputs = todo.pop()
            if has_inputs:
                joined = f"%{node.prev_node.node_id} + " if node.prev_node is not None else ""
                if isinstance(node, SglFork | SglGetForkItem):
                    joined = ""
                lines.append(f"%{node.node_id} = {joined}{node!r}\n")
            elif node.node_id not in seen:
                seen.add(node.node_id)
                todo.append((node, True))
                todo += [(one, False) for one in reversed(_inputs(node))]
        return "".join(lines)


def parts(value: SglExpr | str) -> list[SglExpr]:
    """The plain expressions of ``value``. TypeError if it is neither an expression nor a string."""
    if isinstance(value, SglExprList):
        return value.expr_list
    if isinstance(value, SglExpr):
        return [value]
    if isinstance(value, str):
        return [SglConstantText(value)]
    raise TypeError(f"{value!r} is no expression: append a string, for example str(...)")


def _inputs(node: SglExpr) -> list[SglExpr]:
    found = [node.prev_node] if node.prev_node is not None else []
    if isinstance(node, SglExprList):
        found += node.expr_list
    elif isinstance(node, SglVariable) and isinstance(node.source, SglExpr):
        found.append(node.source)
    return found


class SglExprList(SglExpr):
    form = "ExprList({self.expr_list})"

    def __init__(self, expr_list: Sequence[SglExpr]) -> None:
        super().__init__()
        self.expr_list = list(expr_list)


class SglArgument(SglExpr):
    """Stands for an argument of a program that is traced."""

    form = "Argument(name={self.name}, value={self.value!r})"

    def __init__(self, name: str, value: Any = None) -> None:
        super().__init__()
        self.name, self.value = name, value

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        raise TypeError(f"the argument {self.name} is not known in a trace: use +, not an f-string")


class SglConstantText(SglExpr):
    form = "Constant({self.value!r})"

    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value


class SglImage(SglExpr):
    """``path``: of a file, or its bytes, or a PIL image."""

    form = "SglImage({self.path})"

    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = path


class SglVideo(SglExpr):
    """``num_frames`` is not sent: the server's processor chooses the frames."""

    form = "SglVideo({self.path}, {self.num_frames})"

    def __init__(self, path: str, num_frames: int) -> None:
        super().__init__()
        self.path, self.num_frames = path, num_frames


class SglGen(SglExpr):
    """Generate text; the variable ``name`` gets it. ``parse`` makes the variable's value of the
    text."""

    form = "Gen('{self.name}')"

    def __init__(
        self,
        name: str | None = None,
        sampling_params: SglSamplingParams | None = None,
        parse: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__()
        self.sampling_params = sampling_params or _UNSET
        if self.sampling_params.regex is not None:
            re.compile(self.sampling_params.regex)
        self.name, self.parse = name, parse


class SglSelect(SglExpr):
    """Append the likeliest of ``choices``; with a ``temperature`` one drawn by their scores."""

    form = "Select({self.name}, choices={self.choices}, choices_method={self.choices_method})"

    def __init__(
        self,
        name: str | None,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> None:
        super().__init__()
        self.name, self.choices = name, list(choices)
        self.temperature, self.choices_method = temperature, choices_method


class SglToolLoop(SglExpr):
    """An answer for which the model may call ``tools``, in at most ``max_rounds`` rounds."""

    def __init__(
        self,
        name: str | None,
        tools: Sequence[Callable[..., Any]],
        max_rounds: int,
        parser: str | None,
        sampling_params: SglSamplingParams,
    ) -> None:
        super().__init__()
        self.name, self.tools, self.max_rounds = name, list(tools), max_rounds
        self.parser, self.sampling_params = parser, sampling_params

    def __repr__(self) -> str:
        return f"ToolLoop({self.name}, tools={[tool.__name__ for tool in self.tools]})"


class SglRoleBegin(SglExpr):
    form = "RoleBegin({self.role})"

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role


class SglRoleEnd(SglExpr):
    form = "RoleEnd({self.role})"

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role


class SglVarScopeBegin(SglExpr):
    form = "VarScopeBegin('{self.name}')"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class SglVarScopeEnd(SglExpr):
    form = "VarScopeEnd('{self.name}')"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class SglVariable(SglExpr):
    """The value that the variable ``name`` of ``source`` will have."""

    form = "Variable('{self.name}', source=%{self.source.node_id})"

    def __init__(self, name: str, source: Any) -> None:
        super().__init__()
        self.name, self.source = name, source


class SglSeparateReasoning(SglExpr):
    """Split the variables of ``expr``, which has been appended, into thinking and answer."""

    form = "SeparateReasoning(model_type={self.model_type}, name={self.name})"

    def __init__(self, model_type: str, expr: SglExpr) -> None:
        super().__init__()
        self.model_type, self.expr = model_type, expr

    @property
    def variables(self) -> Iterator[str]:
        """The names in ``expr``. ValueError if one has none."""
        for one in parts(self.expr):
            if isinstance(one, SglGen | SglSelect):
                if one.name is None:
                    raise ValueError("separate_reasoning needs a name: gen('answer')")
                yield one.name

    @property
    def name(self) -> str | None:
        """The variable that gets the thinking of the first."""
        return next((reasoning_name(name) for name in self.variables), None)

    @staticmethod
    def process_name_for_reasoning(name: str) -> str:
        """The variable of the thinking of ``name``, as SGLang calls it."""
        return reasoning_name(name)


class SglFork(SglExpr):
    form = (
        "Fork(%{self.before}, number={self.number}, position_ids_offset={self.position_ids_offset})"
    )

    def __init__(self, number: int, position_ids_offset: Any = None) -> None:
        super().__init__()
        self.number, self.position_ids_offset = number, position_ids_offset


class SglGetForkItem(SglExpr):
    form = "GetForkItem(%{self.before}, index={self.index})"

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class SglConcateAndAppend(SglExpr):
    form = "ConcatenateAndAppend('{self.states}')"

    def __init__(self, states: Sequence[Any]) -> None:
        super().__init__()
        self.states = list(states)


def reasoning_name(name: str) -> str:
    """The variable with the thinking that belongs to the answer ``name``."""
    return f"{name}_reasoning_content"


class SglTemplate(SglExpr):
    """Fixed texts and holes, answered by one call. A hole is a ``gen`` with a regex or a dtype, or
    a ``select``, whose choice is then generated. ValueError for another one."""

    form = "Template({self.holes})"

    def __init__(self, pieces: Sequence[SglExpr]) -> None:
        super().__init__()
        self.call: SglGen | None = None  # that answers it
        self.holes: list[SglGen | SglSelect] = []
        regex = ""
        for piece in pieces:
            if isinstance(piece, SglConstantText):
                regex += re.escape(piece.value)
                continue
            if isinstance(piece, SglSelect):
                own = "|".join(map(re.escape, piece.choices))
            elif isinstance(piece, SglGen) and piece.sampling_params.json_schema is None:
                own = piece.sampling_params.constrained().regex or ""
            else:
                own = ""
            if not own:
                raise ValueError(
                    f"{piece!r} in a template needs a regex, a dtype or choices: "
                    "gen('name', regex='[A-Z][a-z]+')"
                )
            self.holes.append(piece)  # type: ignore[arg-type]
            regex += f"(?P<hole{len(self.holes) - 1}>{_uncaptured(own)})"
        self.regex = regex
        found = [params.max_new_tokens for params in self._params()]
        self.max_new_tokens = None if None in found else sum(n or 0 for n in found)

    def _params(self) -> Iterator[SglSamplingParams]:
        return (one.sampling_params for one in self.holes if isinstance(one, SglGen))

    @property
    def asked(self) -> str:
        """The expression without names of groups, as grammars take it."""
        return re.sub(r"\(\?P<hole\d+>", "(", self.regex)

    def read(self, text: str) -> list[str]:
        """The texts of the holes. ValueError for a text that ends before the template does."""
        found = re.fullmatch(self.regex, text)
        if found is None:
            raise ValueError(f"{text!r} is no whole template: more max_tokens may help")
        return [found[f"hole{number}"] for number in range(len(self.holes))]


def _uncaptured(regex: str) -> str:
    """The expression whose groups capture nothing, so that none has a hole's place."""
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", regex)
