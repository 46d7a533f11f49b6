"""A record as a short table, and its decode steps as a chart against the roofline."""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_WIDTH, _BAR, _LEFT, _SCALE = 760, 16, 230, 420
_COLOURS = {"stretch": "#15803d", "must": "#2563eb", "missed": "#dc2626", "": "#6b7280"}


def table(record: Mapping[str, Any]) -> str:
    """The results of a run, one line each."""
    lines = [f"{record['device']}  torch {record['versions']['torch']}  {record['date']}"]
    for name, stage in record["stages"].items():
        why = f": {stage['why']}" if "why" in stage else ""
        lines.append(f"{name}: {stage['state']} ({stage.get('seconds', 0)} s){why}")
        lines += [f"  {line}" for row in stage["rows"] if (line := _line(row))]
        good = sum(row.get("ok") is True for row in stage["rows"])
        lines += [f"  {good} checks are good"] if good else []
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    """The row without its long parts; nothing for a row without problems."""
    if "kernels" in row or row.get("ok") is True:
        return ""
    if "gpu_ms" in row:
        place = f"+{row['prefix']}" if "prefix" in row else ""
        size = f"{row['batch']} x {row.get('context', row.get('count'))}{place}"
        return (
            f"{row['model']:8s}{row['weights']:5s}{size:>16s}{row['gpu_ms']:10.3f} ms"
            f"{row['tok_s']:12.0f} tok/s{100 * row['share']:7.1f} %  {row['goal']}"
        )
    parts = [f"{key} {_number(value)}" for key, value in row.items() if value not in ({}, None)]
    return "  ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def points(record: Mapping[str, Any]) -> Iterator[tuple[str, float, str]]:
    """(label, share of the roofline, goal) of every measured step."""
    for name in ("decode", "prefill"):
        for row in record["stages"].get(name, {}).get("rows", ()):
            if "share" in row:
                size = row.get("context", row.get("count"))
                label = f"{row['model']} {row['weights']} {name} {row['batch']} x {size}"
                yield label, row["share"], row["goal"]


def plot(path: Path) -> Path:
    """Draw the record: a PNG if matplotlib is installed, else an SVG."""
    record = json.loads(path.read_text())
    found = list(points(record))
    title = f"Share of the roofline, {record['device']}, {record['date'][:10]}"
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        target = path.with_suffix(".svg")
        target.write_text(svg(found, title))
        return target
    return _png(pyplot, found, title, path.with_suffix(".png"))


def _png(pyplot: Any, found: list[tuple[str, float, str]], title: str, target: Path) -> Path:
    pyplot.switch_backend("Agg")
    figure, axis = pyplot.subplots(figsize=(8, 1 + 0.25 * len(found)))
    labels = [label for label, _, _ in found]
    axis.barh(
        labels, [100 * share for _, share, _ in found], color=[_COLOURS[g] for *_, g in found]
    )
    axis.invert_yaxis()
    axis.set(title=title, xlabel="% of the roofline; green stretch, blue must, red missed")
    axis.axvline(100, color="black", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def svg(found: list[tuple[str, float, str]], title: str) -> str:
    """Bars; 100 % is the roofline."""
    height = 40 + _BAR * 1.4 * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="18" font-size="13">{html.escape(title)}</text>',
        f'<line x1="{_LEFT + _SCALE}" x2="{_LEFT + _SCALE}" y1="26" y2="{height:.0f}" '
        'stroke="black"/>',
    ]
    for index, (label, share, goal) in enumerate(found):
        y = 30 + _BAR * 1.4 * index
        parts.append(f'<text x="8" y="{y + 12:.1f}">{html.escape(label)}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y:.1f}" width="{_SCALE * share:.1f}" height="{_BAR}" '
            f'fill="{_COLOURS[goal]}"/>'
        )
        end = _LEFT + _SCALE * share + 4
        parts.append(f'<text x="{end:.1f}" y="{y + 12:.1f}">{100 * share:.0f} % {goal}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
