"""Samples of a run: medians and ratios to the best peer, as Markdown tables and an SVG chart."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OURS = "radixlm"
START, MEMORY = "start", "memory"
_COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#6b7280")
_BAR, _LEFT, _TOP, _BARS_WIDTH = 12, 250, 34, 520


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. `foreign` and `stolen`: cores that other processes and the host used."""

    engine: str
    bits: int
    case: str
    value: float
    foreign: float = 0.0
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class RowKind:
    """A row of the tables. `goals`: bits -> wanted ratio to the best peer."""

    case: str
    label: str
    unit: str
    is_higher_better: bool
    goals: Mapping[int, float]


ROWS = (
    RowKind("decode", "decode, 1 stream", "tok/s", True, {16: 1.2, 8: 1.5, 4: 1.6}),
    RowKind("prefill512", "prefill 512", "tok/s", True, {16: 1.1, 8: 1.5, 4: 1.8}),
    RowKind("prefill2048", "prefill 2048", "tok/s", True, {16: 1.25, 8: 1.8, 4: 2.0}),
    RowKind("batch16", "16 x (256 in + 64 out)", "tok/s", True, {16: 2.0, 8: 3.0, 4: 3.0}),
    RowKind("shared16", "16 with a fresh prefix of 1,024", "s", False, {16: 5.0, 8: 8.0, 4: 8.0}),
    RowKind("prefill8192", "prefill 8192", "tok/s", True, {}),
    RowKind("prefill32000", "prefill 32000", "tok/s", True, {}),
    RowKind("decode8192", "decode behind 8192", "tok/s", True, {}),
    RowKind("decode32000", "decode behind 32000", "tok/s", True, {}),
    RowKind(START, "start to first token", "s", False, {16: 1.0, 8: 1.0, 4: 1.0}),
    RowKind(MEMORY, "peak memory", "MB", False, {16: 1.0, 8: 1.0, 4: 1.0}),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row at one width: medians of each engine, and ours against the best other.

    `ratio` is above 1 if ours is better, None if one side is missing. `share`: ours as a share of
    the ceilings.
    """

    row: RowKind
    bits: int
    values: Mapping[str, float]
    best_peer: str | None
    ratio: float | None
    predicted: float | None
    share: float | None
    most_foreign: float

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio reaches the goal; None without a ratio."""
        goal = self.row.goals.get(self.bits)
        return None if goal is None or self.ratio is None else self.ratio >= goal


def summarise(
    samples: Sequence[Sample], predicted: Mapping[tuple[str, int], float] | None = None
) -> list[Line]:
    """The lines, wide formats first. `predicted`: (case, bits) -> best value at the ceilings."""
    lines = []
    for bits in sorted({sample.bits for sample in samples}, reverse=True):
        for row in ROWS:
            found = [s for s in samples if s.bits == bits and s.case == row.case]
            if found:
                lines.append(_line(row, bits, found, (predicted or {}).get((row.case, bits))))
    return lines


def _line(row: RowKind, bits: int, found: Sequence[Sample], predicted: float | None) -> Line:
    engines = list(dict.fromkeys(sample.engine for sample in found))
    values = {
        name: statistics.median(s.value for s in found if s.engine == name) for name in engines
    }
    peers = {name: value for name, value in values.items() if name != OURS}
    choose = max if row.is_higher_better else min
    best = choose(peers, key=lambda name: peers[name]) if peers else None
    mine = values.get(OURS)
    ratio = None if mine is None or best is None else better_by(row, mine, peers[best])
    share = None if mine is None or predicted is None else better_by(row, mine, predicted)
    foreign = max(sample.foreign for sample in found)
    return Line(row, bits, values, best, ratio, predicted, share, foreign)


def better_by(row: RowKind, mine: float, other: float) -> float:
    """The factor by which `mine` is better."""
    return mine / other if row.is_higher_better else other / mine


def markdown(lines: Sequence[Line]) -> str:
    """A table for each width of the weights."""
    engines = list(dict.fromkeys(name for line in lines for name in line.values))
    parts = []
    for bits in dict.fromkeys(line.bits for line in lines):
        heads = [f"{bits} bit", *engines, "best peer", "ratio", "goal", "ceiling", "ours of it",
                 "others' cores"]  # fmt: skip
        rows = [_cells(line, engines) for line in lines if line.bits == bits]
        table = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in table))
    return "\n\n".join(parts) + "\n"


def _cells(line: Line, engines: Sequence[str]) -> list[str]:
    goal = line.row.goals.get(line.bits)
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
    if line.is_met is not None:
        ratio = f"**{ratio}**" if line.is_met else ratio
    return [
        f"{line.row.label}, {line.row.unit}",
        *(number(line.values.get(name)) for name in engines),
        line.best_peer or "-",
        ratio,
        "-" if goal is None else f"{goal:g}",
        number(line.predicted),
        "-" if line.share is None else f"{line.share:.0%}",
        f"{line.most_foreign:.2f}",
    ]


def number(value: float | None) -> str:
    """Three digits, or all digits before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def drawing(lines: Sequence[Line]) -> str:
    """An SVG of bars: each engine relative to the best peer of its row (1.0)."""
    engines = list(dict.fromkeys(name for line in lines for name in line.values))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(engines)}
    drawn = [line for line in lines if line.best_peer is not None]
    most = max((_against_best(line, name) for line in drawn for name in line.values), default=1.0)
    scale = _BARS_WIDTH / max(most, 1.0)
    group = _BAR * len(engines) + 14
    height = _TOP + group * len(drawn) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _BARS_WIDTH + 80}" '
        f'height="{height}" font-family="system-ui,sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, (name, colour) in enumerate(colours.items()):
        x = _LEFT + 130 * i
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="17">{html.escape(name)}</text>')
    for at, line in enumerate(drawn):
        parts += _bars(line, colours, _TOP + at * group, scale)
    dash = 'stroke="#444" stroke-dasharray="3 3"'
    parts.append(f'<path d="M{_LEFT + scale:.1f} {_TOP - 6}V{height - 6}" {dash}/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(line: Line, colours: Mapping[str, str], top: int, scale: float) -> list[str]:
    """The label and the bars of one row."""
    label = html.escape(f"{line.row.label}, {line.bits} bit")
    middle = top + _BAR * len(colours) / 2 + 4
    parts = [f'<text x="{_LEFT - 8}" y="{middle:g}" text-anchor="end">{label}</text>']
    for i, (name, colour) in enumerate(colours.items()):
        if name not in line.values:
            continue
        width, y = _against_best(line, name) * scale, top + _BAR * i
        size = f'width="{width:.1f}" height="{_BAR - 2}"'
        parts.append(f'<rect x="{_LEFT}" y="{y}" {size} fill="{colour}"/>')
        value = f"{number(line.values[name])} {line.row.unit}"
        parts.append(f'<text x="{_LEFT + width + 4:.1f}" y="{y + 9}">{value}</text>')
    return parts


def _against_best(line: Line, name: str) -> float:
    assert line.best_peer is not None, "drawn only where there is a peer"
    return better_by(line.row, line.values[name], line.values[line.best_peer])
