"""Bars and lines as SVG, without a library."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, LEFT, SPAN, BAR = 720, 250, 360, 18
COLOURS = ("#2563eb", "#dc2626", "#15803d", "#9333ea", "#ea580c")


def _page(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="8" y="20" font-size="14">{html.escape(title)}</text>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """One bar a row of (label, value, what is written behind it)."""
    most = max(value for _, value, _ in rows) or 1.0
    parts = []
    for index, (label, value, text) in enumerate(rows):
        y, width = 34 + 26 * index, SPAN * value / most
        parts += [
            f'<text x="8" y="{y + 13}">{html.escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[0]}"/>',
            f'<text x="{LEFT + width + 5:.1f}" y="{y + 13}">{html.escape(text)}</text>',
        ]
    return _page(title, 44 + 26 * len(rows), parts)


def lines(
    title: str,
    across: str,
    ticks: Sequence[str],
    curves: Mapping[str, Sequence[float | None]],
    most: float,
) -> str:
    """Curves over evenly spaced ``ticks``; ``across`` names them. None: no point."""
    top, height, left, span = 44, 220, 60, 560
    step = span / max(len(ticks) - 1, 1)
    parts = [f'<text x="{left}" y="{top + height + 36}">{html.escape(across)}</text>']
    for index, tick in enumerate(ticks):
        x = left + step * index
        parts.append(f'<text x="{x - 10:.0f}" y="{top + height + 18}">{html.escape(tick)}</text>')
    for part in range(5):
        y = top + height - height * part / 4
        parts.append(f'<line x1="{left}" x2="{left + span}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="4" y="{y + 4}">{most * part / 4:g}</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [
            (left + step * i, top + height - height * min(value / most, 1.0))
            for i, value in enumerate(values)
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(
            f'<text x="{left + 150 * number}" y="36" fill="{colour}">{html.escape(name)}</text>'
        )
    return _page(title, top + height + 48, parts)
