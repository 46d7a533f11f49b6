"""`radixlm bench compare A.json B.json`: two results side by side.

With the requests of both runs (`--output-details`) it says which medians really differ: the 95 %
interval of their ratio, by resampling requests, does not hold 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.bench import report
from radixlm.config.verb_parser import VerbParser

_DRAWS = 1000
_SPREAD = ("mean", "median", "p90", "p95", "p99")
# key -> whether more is better
KEYS = {
    **dict.fromkeys(
        "completed request_throughput input_throughput output_throughput total_throughput "
        "request_goodput slo_attainment accept_length prefill_throughput "
        "median_decode_throughput overall_throughput accuracy".split(),
        True,
    ),
    **dict.fromkeys(("failed", "duration", "latency", "ttft", "prefill_latency"), False),
    **{f"{s}_{n}_ms": False for n in ("e2e_latency", "ttft", "tpot", "itl") for s in _SPREAD},
}
_DETAILS = {"median_e2e_latency_ms": "latencies", "median_ttft_ms": "ttfts"}


def main(argv: Sequence[str]) -> int:
    """0 once both were read."""
    parser = VerbParser("radixlm bench compare", "Two results of benchmarks side by side.")
    parser.add_argument("files", nargs=2, metavar="FILE", help="JSON lines; the last line counts")
    parser.add_argument("--tag", metavar="TEXT", help="the last line with this tag, instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args(argv)
    first, second = (read_result(path, args.tag) for path in args.files)
    rows = compared(first, second)
    if not rows:
        raise ConfigError(f"{args.files[0]} and {args.files[1]}: no figure is in both")
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if args.json else render(rows, args.files))
    return 0


def read_result(path: str, tag: str | None) -> dict[str, Any]:
    """The last result of a file (with this tag). ConfigError if there is none."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        try:
            found = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a result of a benchmark ({error})") from error
    found = [one for one in found if isinstance(one, dict) and tag in (None, one.get("tag"))]
    if not found:
        raise ConfigError(f"{path}: holds no result" + (f" of tag {tag!r}" if tag else ""))
    return dict(found[-1])


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure of both: `ratio` is the second over the first; `low`, `high`: its 95 %
    interval where the requests are known; `verdict`: better, worse, same, or empty if unknown."""
    rows = []
    for key, more_is_better in KEYS.items():
        a, b = first.get(key), second.get(key)
        if not isinstance(a, int | float) or not isinstance(b, int | float):
            continue
        row: dict[str, Any] = {"figure": key, "first": a, "second": b, "verdict": ""}
        row["ratio"] = b / a if a else None
        values = [one.get(_DETAILS.get(key, "")) for one in (first, second)]
        if all(values):
            low, high = _interval(*(_good(one, _DETAILS[key]) for one in (first, second)))
            row |= {"low": low, "high": high}
            is_better = (low > 1) == more_is_better
            row["verdict"] = "same" if low <= 1 <= high else "better" if is_better else "worse"
        rows.append(row)
    return rows


def _good(result: Mapping[str, Any], name: str) -> list[float]:
    """The values of the requests that succeeded."""
    errors = result.get("errors") or [""] * len(result[name])
    return [value for value, error in zip(result[name], errors, strict=True) if not error]


def _interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of medians."""
    draw = np.random.default_rng(0)

    def medians(values: Sequence[float]) -> Any:
        sample = np.asarray(values, np.float64)
        return np.median(sample[draw.integers(0, len(sample), (_DRAWS, len(sample)))], axis=1)

    if not first or not second:
        return 0.0, float("inf")
    ratios = medians(second) / np.maximum(medians(first), 1e-12)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def render(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    lines = []
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        ranged = f"{row['low']:.3f} to {row['high']:.3f}" if "low" in row else ""
        cells = (row["figure"], f"{row['first']:.2f}", f"{row['second']:.2f}", ratio, ranged)
        lines.append((*cells, row["verdict"]))
    return report.table(("", *names, "ratio", "95%", ""), lines) + "\n"
