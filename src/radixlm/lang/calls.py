"""What expressions that call a backend do: start the call, and take its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.choices import ChoicesDecision
from radixlm.lang.ir import SglGen, SglSamplingParams, SglSelect, SglTemplate, SglToolLoop
from radixlm.lang.trace import CallRecord

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor


class Generated(str):
    """A text that a model has generated, with the token ids that made it."""

    ids: Sequence[int]

    @classmethod
    def of(cls, text: str, ids: Sequence[int]) -> Generated:
        made = cls(text)
        made.ids = ids
        return made


Call = SglGen | SglSelect | SglToolLoop


def generate(s: StreamExecutor, expr: SglGen) -> bool:
    """Whether the program waits for the text."""
    params = s.default_sampling_para.overridden(expr.sampling_params, s.chat_template.stop_str)
    name = _name_of(s, expr)
    if s.collects:
        s.backend.spec_gen(s, params, name)
        return False
    if s.num_api_spec_tokens is not None:
        return _speculate(s, expr, params, name)
    if s.budget is not None:
        params = s.budget.limited(params)
    if s.stream and (params.n or 1) == 1:
        return _stream(s, expr, params, name)
    return _ask(s, params, name, partial(_take, s, expr, name))


def _ask(
    s: StreamExecutor, params: SglSamplingParams, name: str, take: Callable[[Any, Any], None]
) -> bool:
    """Have the backend generate; ``take`` gets the text and its meta_info."""
    record = record_of(s, "gen", name)

    def apply(result: tuple[Any, Any]) -> None:
        _told(s, record, params, *result)
        take(*result)

    start = s.backend.start_generate
    return s.call(lambda done: start(s, params, done), apply, record)


def record_of(s: StreamExecutor, kind: str, name: str) -> CallRecord:
    return CallRecord(s.sid, kind, name, len(s.text_))


def _told(
    s: StreamExecutor, record: CallRecord, params: SglSamplingParams, value: Any, meta_info: Any
) -> None:
    record.value, record.meta_info = value, meta_info
    if s.budget is not None:
        s.budget.give_back(params, meta_info)


def _name_of(s: StreamExecutor, expr: Call) -> str:
    return expr.name if expr.name is not None else f"_gen_{next(s.unnamed)}"


def _take(
    s: StreamExecutor, expr: SglGen, name: str, found: str | list[str], meta_info: Any
) -> None:
    """The result of a call: the text goes on with the first of several."""
    texts = found if isinstance(found, list) else [found]
    _append(s, texts[0])
    values = [_parsed(expr, text) for text in texts]
    _set_maybe(s, expr, name, values if isinstance(found, list) else values[0], meta_info)


def _append(s: StreamExecutor, text: str) -> None:
    """Append a result; its token ids are kept where they are known."""
    start = len(s.text_)
    s.text_ += text
    if isinstance(text, Generated):
        s.spans.append((start, len(s.text_), text.ids))


def _set_maybe(s: StreamExecutor, expr: Call, name: str, value: Any, meta: Any) -> None:
    if expr.name is not None:
        s.assign(name, value, meta)


def _stream(s: StreamExecutor, expr: SglGen, params: SglSamplingParams, name: str) -> bool:
    s.streamed[name] = ""
    record = record_of(s, "gen", name)

    def add(text: str, meta_info: Any) -> None:
        record.meta_info = meta_info
        with s.lock:
            s.text_ += text
            s.streamed[name] += text
            if expr.name is not None:
                s.variables[name] = s.streamed[name]
                s.meta_info[name] = meta_info
            s.notify()

    def apply(whole: Any) -> None:
        if isinstance(whole, Generated):
            s.spans.append((len(s.text_) - len(whole), len(s.text_), whole.ids))
        _told(s, record, params, s.streamed[name], record.meta_info)
        _set_maybe(s, expr, name, _parsed(expr, s.streamed[name]), None)

    start = s.backend.start_stream
    return s.call(lambda done: start(s, params, add, done), apply, record)


def fill_template(s: StreamExecutor, expr: SglTemplate) -> bool:
    """Whether the program waits for the one call that fills all holes."""
    assert expr.call is not None
    made = s.default_sampling_para.overridden(expr.call.sampling_params)
    params = s.budget.limited(made) if s.budget is not None else made

    def take(text: str, meta_info: Any) -> None:
        values = expr.read(text)
        _append(s, text)
        for hole, value in zip(expr.holes, values, strict=True):
            own = _parsed(hole, value) if isinstance(hole, SglGen) else value
            _set_maybe(s, hole, hole.name or "", own, meta_info)

    return _ask(s, params, "template", take)


def select(s: StreamExecutor, expr: SglSelect) -> bool:
    name = _name_of(s, expr)
    if s.budget is not None:
        s.budget.check_time()
    record = record_of(s, "select", name)

    def apply(decision: ChoicesDecision) -> None:
        record.value, record.meta_info = decision.decision, decision.meta_info
        s.text_ += decision.decision
        _set_maybe(s, expr, name, decision.decision, decision.meta_info)

    start = s.backend.start_select
    return s.call(lambda done: start(s, expr, done), apply, record)


def loop_tools(s: StreamExecutor, expr: SglToolLoop) -> bool:
    name = _name_of(s, expr)
    params = s.default_sampling_para.overridden(expr.sampling_params)
    record = record_of(s, "tools", name)

    def apply(result: tuple[str, Any]) -> None:
        record.value = result[0]  # its answers have records, and tokens, of their own
        s.text_ += result[0]
        _set_maybe(s, expr, name, *result)

    work = partial(load("radixlm.lang.tools:run_tools"), s, expr, params)
    return s.call(lambda done: s.backend.start(work, done, waits=True), apply, record)


def _speculate(s: StreamExecutor, expr: SglGen, params: SglSamplingParams, name: str) -> bool:
    """Answer a call from the text that an earlier one has generated beyond its own end."""
    stops, limit = params.stops(), params.max_new_tokens or 0

    def cut(meta_info: Any) -> None:
        ends = [p for stop in stops if (p := s.speculated_text.find(stop)) >= 0]
        end = min(ends, default=min(limit, len(s.speculated_text)))
        found, s.speculated_text = s.speculated_text[:end], s.speculated_text[end:]
        _take(s, expr, name, found, meta_info)

    def take(text: str, meta_info: Any) -> None:
        s.speculated_text = text
        cut(meta_info)

    if s.speculated_text and (stops or len(s.speculated_text) >= limit):
        cut({})
        return False
    more = params.clone()
    more.max_new_tokens, more.stop = max(limit, s.num_api_spec_tokens or 0), None
    if s.budget is not None:
        more = s.budget.limited(more)
    return _ask(s, more, name, take)


def _parsed(expr: SglGen, text: str) -> Any:
    return expr.parse(text) if expr.parse is not None else text
