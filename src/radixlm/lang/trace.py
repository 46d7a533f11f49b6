"""What a program has called: times, tokens and texts of its calls, as data, as a page, as spans."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from radixlm.base.lazy import load

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor

_MICRO = 1e6
_EPOCH_S = time.time() - time.monotonic()  # so that no call seems longer when the clock is set
_NANO = 1e9


def _now_s() -> float:
    return _EPOCH_S + time.monotonic()


@dataclass
class CallRecord:
    """One call of a backend. ``kind``: gen, select, turn, tools or tool. Times: Unix time, in
    seconds; ``end_s`` is 0 while it runs. ``num_before``: characters of the text before it."""

    state: str
    kind: str
    name: str
    num_before: int
    begin_s: float = field(default_factory=_now_s)
    end_s: float = 0.0
    value: Any = None
    meta_info: Any = None
    error: str | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.end_s = _now_s()
        self.error = None if error is None else f"{type(error).__name__}: {error}"

    def tokens(self, name: str) -> int:
        """Sum of a count of meta_info over the call's samples."""
        metas = self.meta_info if isinstance(self.meta_info, list) else [self.meta_info]
        return sum(int(one.get(name) or 0) for one in metas if isinstance(one, dict))


class Trace(dict[str, Any]):
    """A program's calls: "program", "states" ({"id", "parent"}, the first is the program's own),
    "calls" (the fields of CallRecord, and token counts) and sums."""

    def to_json(self) -> str:
        return orjson.dumps(self, default=str, option=orjson.OPT_INDENT_2).decode()

    def to_perfetto(self) -> dict[str, Any]:
        """Events for ui.perfetto.dev and chrome://tracing, a thread a state."""
        rows = {state["id"]: number for number, state in enumerate(self["states"])}
        events = [
            {
                "name": f"{call['kind']} {call['name']}",
                "ph": "X",
                "pid": 1,
                "tid": rows[call["state"]],
                "ts": call["begin_s"] * _MICRO,
                "dur": max(0.0, (call["end_s"] or call["begin_s"]) - call["begin_s"]) * _MICRO,
                "args": {name: call[name] for name in _SHOWN},
            }
            for call in self["calls"]
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_otel(self, tracer: Any = None) -> None:
        """Make OpenTelemetry spans, one for the program and one a call, under the names of the
        GenAI conventions. ``tracer``: None, that of the global provider."""
        trace = load("opentelemetry.trace:set_span_in_context")
        if tracer is None:
            tracer = load("opentelemetry.trace:get_tracer")("radixlm.lang")
        begin = min((call["begin_s"] for call in self["calls"]), default=_now_s())
        end = max((call["end_s"] for call in self["calls"]), default=begin)
        root = tracer.start_span(self["program"], start_time=int(begin * _NANO))
        for call in self["calls"]:
            attributes = {
                "gen_ai.operation.name": "generate_content",
                "gen_ai.request.model": self["model"],
                "gen_ai.usage.input_tokens": call["prompt_tokens"],
                "gen_ai.usage.output_tokens": call["completion_tokens"],
                "radixlm.cached_tokens": call["cached_tokens"],
                "radixlm.kind": call["kind"],
            }
            span = tracer.start_span(
                f"{call['kind']} {call['name']}",
                trace(root),
                attributes=attributes,
                start_time=int(call["begin_s"] * _NANO),
            )
            if call["error"]:
                span.set_attribute("error.type", call["error"].partition(":")[0])
            span.end(int((call["end_s"] or call["begin_s"]) * _NANO))
        root.end(int(max(begin, end) * _NANO))

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page without scripts or links: a row a state, a bar a call; opened, its text."""
        page = _page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


_SHOWN = ("prompt_tokens", "cached_tokens", "completion_tokens", "value", "error")


def make_trace(executor: StreamExecutor, program: str) -> Trace:
    """The trace of a state's program so far."""
    calls = []
    for call in list(executor.calls):
        counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
        calls.append({**vars(call), **{name: call.tokens(name) for name in counts}})
    begins = [call["begin_s"] for call in calls]
    ends = [call["end_s"] for call in calls]
    return Trace(
        program=program,
        model=_model_of(executor),
        states=[{"id": own, "parent": parent} for own, parent in list(executor.states)],
        calls=calls,
        seconds=max(0.0, max(ends) - min(begins)) if calls else 0.0,
        prompt_tokens=sum(call["prompt_tokens"] for call in calls),
        cached_tokens=sum(call["cached_tokens"] for call in calls),
        completion_tokens=sum(call["completion_tokens"] for call in calls),
    )


def _model_of(executor: StreamExecutor) -> str:
    try:
        return executor.backend.get_model_name()
    except NotImplementedError:
        return ""


_STYLE = """
body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}
.row{position:relative;border-bottom:1px solid #ddd;padding:4px 0 4px 0}
.track{position:relative;height:18px;background:#f4f4f4}
.bar{position:absolute;top:2px;height:14px;min-width:2px;background:#3b76c4;border-radius:2px}
.select{background:#2d9a5b}.tool{background:#c98a1b}.turn{background:#8a5cc2}.failed{background:#c43b3b}
summary{cursor:pointer}pre{white-space:pre-wrap;background:#f8f8f8;padding:8px;margin:4px 0}
td,th{padding:2px 10px;text-align:right}th:first-child,td:first-child{text-align:left}
"""


def _page(trace: Trace) -> str:
    calls: Sequence[dict[str, Any]] = trace["calls"]
    begin = min((call["begin_s"] for call in calls), default=0.0)
    length = trace["seconds"] or 1e-9
    rows = []
    for number, state in enumerate(trace["states"]):
        own = [call for call in calls if call["state"] == state["id"]]
        bars = "".join(_bar(call, begin, length) for call in own)
        details = "".join(map(_details, own))
        title = "program" if state["parent"] is None else f"fork {number}"
        rows.append(
            f'<div class="row"><b>{title}</b><div class="track">{bars}</div>{details}</div>'
        )
    sums = ", ".join(
        f"{trace[name]} {name.replace('_', ' ')}"
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    name = html.escape(trace["program"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><h1>{name}</h1>"
        f"<p>{html.escape(trace['model'])}: {len(calls)} calls in {trace['seconds']:.3f} s, "
        f"{sums}</p>{''.join(rows)}</html>\n"
    )


def _bar(call: dict[str, Any], begin: float, length: float) -> str:
    left = 100 * (call["begin_s"] - begin) / length
    width = 100 * max(0.0, (call["end_s"] or call["begin_s"]) - call["begin_s"]) / length
    kind = "failed" if call["error"] else call["kind"]
    title = html.escape(f"{call['kind']} {call['name']}", quote=True)
    style = f"left:{left:.3f}%;width:{width:.3f}%"
    return f'<div class="bar {kind}" style="{style}" title="{title}"></div>'


def _details(call: dict[str, Any]) -> str:
    head = f"{call['kind']} {call['name']}"
    if call["end_s"]:
        head += f": {1000 * (call['end_s'] - call['begin_s']):.1f} ms"
    counts = "".join(f"<td>{call[name]}</td>" for name in _SHOWN[:3])
    names = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in _SHOWN[:3])
    text = html.escape(str(call["error"] or call["value"]))
    return (
        f"<details><summary>{html.escape(head)}</summary><table><tr>{names}</tr>"
        f"<tr>{counts}</tr></table><pre>{text}</pre></details>"
    )
