"""Plots of a run: a PNG by matplotlib, or an HTML page without dependencies or other origins."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import require
from radixlm.bench.backends import Outcome
from radixlm.bench.timeline import draw_png, sections

_SUFFIXES = (".png", ".html")
_PERCENTS = np.arange(0.0, 100.5, 0.5)
_MARKS = (50, 90, 99)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 300, 64, 40, 16, 16

Curves = Mapping[str, NDArray[np.float64]]


def check_plot(path: str | None) -> None:
    """ConfigError if the plot cannot be made. Call it before the run."""
    if path is None:
        return
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in .png or .html")
    if Path(path).suffix == ".png":
        require("matplotlib", "plot", "--plot FILE.png (--plot FILE.html needs nothing)")


def percentile_curves(outcomes: Sequence[Outcome]) -> Curves:
    """Name -> milliseconds at 0, 0.5 ... 100 percent."""
    good = [outcome for outcome in outcomes if outcome.is_ok]
    values = {
        "Time to first token": [outcome.ttft_s for outcome in good],
        "Inter-token latency": [itl_s for outcome in good for itl_s in outcome.itls_s],
        "End-to-end latency": [outcome.latency_s for outcome in good],
    }
    return {
        name: np.percentile(np.asarray(found) * 1e3, _PERCENTS)
        for name, found in values.items()
        if found
    }


def write_plot(path: str, outcomes: Sequence[Outcome], heading: str) -> None:
    """Draw percentiles, their course, load and requests to ``path`` (.png or .html). ConfigError
    if it cannot be written."""
    curves = percentile_curves(outcomes)
    try:
        if Path(path).suffix == ".png":
            _write_png(path, curves, heading, outcomes)
        else:
            more = sections(outcomes, _round_up)
            Path(path).write_text(page(curves, heading, more), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error}") from error


def _write_png(path: str, curves: Curves, heading: str, outcomes: Sequence[Outcome]) -> None:
    require("matplotlib", "plot", "--plot FILE.png").use("Agg")
    pyplot: Any = require("matplotlib.pyplot", "plot", "--plot FILE.png")
    figure, grid = pyplot.subplots(2, 4, figsize=(20, 8))
    axes = grid.ravel()
    axes[3].axis("off")
    draw_png(axes[4:], outcomes)
    for axis, (name, ms) in zip(axes, curves.items(), strict=False):
        axis.plot(_PERCENTS, ms)
        axis.set(title=name, xlabel="percentile", ylabel="ms", ylim=(0, None), xlim=(0, 100))
        axis.grid(alpha=0.3)
    figure.suptitle(heading)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def page(curves: Curves, heading: str, more: str = "") -> str:
    """An HTML page with one SVG for each curve, then `more`."""
    style = (
        "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}"
        "svg{margin:8px 16px 8px 0}text{font:12px system-ui,sans-serif;fill:#444}"
    )
    drawings = "\n".join(_drawing(name, ms) for name, ms in curves.items())
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(heading)}'
        f"</title><style>{style}</style>\n<h1>{html.escape(heading)}</h1>\n"
        f"{drawings or '<p>No request succeeded.</p>'}\n{more}\n</html>\n"
    )


def _drawing(name: str, ms: NDArray[np.float64]) -> str:
    """An SVG of milliseconds over percentiles."""
    top = _round_up(float(ms[-1]))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(percent: float, value: float) -> tuple[float, float]:
        return _LEFT + width * percent / 100, _TOP + height * (1 - value / top)

    points = " ".join("{:.1f},{:.1f}".format(*at(p, v)) for p, v in zip(_PERCENTS, ms, strict=True))
    parts = [f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="2"/>']
    for step in range(5):
        _, y = at(0, top * step / 4)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * step / 4:g}</text>'
        )
    for percent in (0, 25, 50, 75, 90, 100):
        x, _ = at(percent, 0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{percent}</text>')
    for mark in _MARKS:
        value = float(ms[mark * 2])
        x, y = at(mark, value)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2563eb"><title>p{mark}: '
            f"{value:.2f} ms</title></circle>"
        )
    marks = ", ".join(f"p{mark} {ms[mark * 2]:.2f} ms" for mark in _MARKS)
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">percentile; {marks}</text>')
    return (
        f"<h2>{html.escape(name)} (ms)</h2>\n"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
    )


def _round_up(value: float) -> float:
    """The next 1, 2, 4, 6, 8 or 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    steps = (1, 2, 4, 6, 8, 10)
    return float(next((s * power for s in steps if s * power >= value), 10 * power))
