"""A run over its time: latency percentiles, load against throughput, and each request as a bar."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.bench.backends import Outcome

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 300, 64, 40, 16, 16
_COLOURS = ("#2563eb", "#d97706", "#dc2626")
_MAX_BARS, _BAR = 300, 4
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Windows of equal length. `at_s`: their middles, from the start of the run; `ttft_ms`,
    `e2e_ms`: percentile -> its value among the requests sent in the window, NaN for none;
    `running`: mean requests at once; `tokens_s`: output tokens a second, those of a request spread
    evenly from its first token to its end."""

    at_s: Floats
    ttft_ms: Mapping[int, Floats]
    e2e_ms: Mapping[int, Floats]
    running: Floats
    tokens_s: Floats


def timeline(outcomes: Sequence[Outcome], num_windows: int = 30) -> Timeline | None:
    """None if no request succeeded."""
    good = [outcome for outcome in outcomes if outcome.is_ok]
    if not good:
        return None
    start = np.array([outcome.start_s for outcome in good])
    start -= start.min()
    first = start + np.array([outcome.ttft_s for outcome in good])
    end = start + np.array([outcome.latency_s for outcome in good])
    edges = np.linspace(0, max(float(end.max()), 1e-9), num_windows + 1)
    window = np.clip(np.searchsorted(edges, start, "right") - 1, 0, num_windows - 1)
    rates = np.array([max(o.num_output, 0) for o in good]) / np.maximum(end - first, 1e-9)
    length = edges[1]
    return Timeline(
        (edges[1:] + edges[:-1]) / 2,
        _percentiles((first - start) * 1e3, window, num_windows),
        _percentiles((end - start) * 1e3, window, num_windows),
        _overlap(start, end, edges, np.ones(len(good))) / length,
        _overlap(first, np.maximum(end, first + 1e-9), edges, rates) / length,
    )


def _percentiles(values: Floats, window: NDArray[np.int64], count: int) -> dict[int, Floats]:
    found = {percent: np.full(count, np.nan) for percent in (50, 90, 99)}
    for i in np.unique(window):
        for percent, row in found.items():
            row[i] = np.percentile(values[window == i], percent)
    return found


def _overlap(begin: Floats, end: Floats, edges: Floats, weights: Floats) -> Floats:
    """Weighted seconds of the intervals inside each window."""
    low = np.maximum(begin[:, None], edges[None, :-1])
    high = np.minimum(end[:, None], edges[None, 1:])
    return np.asarray((np.maximum(high - low, 0) * weights[:, None]).sum(0))


def sections(outcomes: Sequence[Outcome], round_up: Any) -> str:
    """SVG drawings for a page. `round_up`: the top of an axis for its largest value."""
    found = timeline(outcomes)
    if found is None:
        return ""
    order = np.argsort(found.running)
    load = {"": (found.running[order], found.tokens_s[order])}
    parts = [
        _chart("Time to first token over time (ms)", "s",
               {f"p{p}": (found.at_s, ms) for p, ms in found.ttft_ms.items()}, round_up),
        _chart("End-to-end latency over time (ms)", "s",
               {f"p{p}": (found.at_s, ms) for p, ms in found.e2e_ms.items()}, round_up),
        _chart("Output tokens/s against concurrent requests", "requests", load, round_up, True),
        waterfall(outcomes),
    ]  # fmt: skip
    return "\n".join(parts)


def _chart(
    title: str,
    unit: str,
    lines: Mapping[str, tuple[Floats, Floats]],
    round_up: Any,
    is_scatter: bool = False,
) -> str:
    """Lines (or points) of x and y; NaN is left out."""
    x_top = round_up(max(float(np.max(x)) for x, _ in lines.values()))
    y_top = round_up(max(float(np.nanmax(y)) for _, y in lines.values()))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = []
    for step in range(5):
        y, x = _TOP + height * (1 - step / 4), _LEFT + width * step / 4
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_top * step / 4:g}</text>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{x_top * step / 4:g}</text>'
        )
    for colour, (name, (xs, ys)) in zip(_COLOURS, lines.items(), strict=False):
        points = [
            (_LEFT + width * x / x_top, _TOP + height * (1 - y / y_top))
            for x, y in zip(xs, ys, strict=True)
            if not np.isnan(y)
        ]
        if is_scatter:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
            ]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        place = _LEFT + 60 * list(lines).index(name)
        parts.append(f'<text x="{place}" y="{_HEIGHT - 4}" style="fill:{colour}">{name}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{unit}</text>')
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<h2>{html.escape(title)}</h2>\n{svg}"


def waterfall(outcomes: Sequence[Outcome]) -> str:
    """A bar for each request in the order of sending (at most 300, evenly chosen): grey until its
    first token, blue until its end, red if it failed."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.start_s)
    step = -(-len(ordered) // _MAX_BARS)
    shown, begin = ordered[::step], ordered[0].start_s
    last = max(o.start_s - begin + max(o.latency_s, o.ttft_s) for o in ordered) or 1.0
    width = 2 * _WIDTH
    scale, parts = (width - _RIGHT) / last, []
    for i, one in enumerate(shown):
        x, y = (one.start_s - begin) * scale, i * (_BAR + 1)
        bars = [
            (x, one.ttft_s, "#9ca3af"),
            (x + one.ttft_s * scale, one.latency_s - one.ttft_s, _COLOURS[0]),
        ]
        if not one.is_ok:
            bars = [(x, max(one.latency_s, last / 200), _COLOURS[2])]
        text = f"{one.num_output} tokens, first {one.ttft_s:.3f} s, whole {one.latency_s:.3f} s"
        text = html.escape(text if one.is_ok else one.error[:200])
        rects = "".join(
            f'<rect x="{at:.1f}" y="{y}" width="{max(s * scale, 0.5):.1f}" height="{_BAR}" '
            f'fill="{colour}"/>'
            for at, s, colour in bars
        )
        parts.append(f"<g>{rects}<title>{text}</title></g>")
    height = len(shown) * (_BAR + 1)
    parts.append(f'<text x="0" y="{height + 16}">0</text>')
    parts.append(
        f'<text x="{width - _RIGHT}" y="{height + 16}" text-anchor="end">{last:.2f} s</text>'
    )
    note = f" (each {step}th)" if step > 1 else ""
    svg = f'<svg width="{width}" height="{height + 24}" role="img">{"".join(parts)}</svg>'
    return f"<h2>Requests: until the first token, until the end{note}</h2>\n{svg}"


def draw_png(axes: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
    """The same on four axes of matplotlib."""
    found = timeline(outcomes)
    if found is None:
        return
    series = (("Time to first token", found.ttft_ms), ("End-to-end latency", found.e2e_ms))
    for axis, (title, percentiles) in zip(axes, series, strict=False):
        for percent, values in percentiles.items():
            seen = ~np.isnan(values)
            axis.plot(found.at_s[seen], values[seen], label=f"p{percent}")
        axis.set(title=f"{title} over time", xlabel="s", ylabel="ms", ylim=(0, None))
        axis.legend()
    axes[2].scatter(found.running, found.tokens_s, s=12)
    axes[2].set(title="Throughput", xlabel="concurrent requests", ylabel="output tokens/s")
    ordered = sorted((o for o in outcomes if o.is_ok), key=lambda outcome: outcome.start_s)
    begin = np.array([o.start_s for o in ordered]) - ordered[0].start_s
    first = np.array([o.ttft_s for o in ordered])
    rest = np.array([o.latency_s - o.ttft_s for o in ordered])
    rows = np.arange(len(ordered))
    axes[3].barh(rows, first, left=begin, color="#9ca3af", height=1.0)
    axes[3].barh(rows, rest, left=begin + first, height=1.0)
    axes[3].invert_yaxis()
    axes[3].set(title="Requests", xlabel="s")
