"""Results as a table for people and a line of JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError

_WIDTH = 50

# a line of the serving table: label, key of the result; a label alone begins a section
_LATENCIES = (("E2E Latency", "e2e_latency", "End-to-End Latency"),
              ("TTFT", "ttft", "Time to First Token"),
              ("TPOT", "tpot", "Time per Output Token (excl. 1st token)"),
              ("ITL", "itl", "Inter-Token Latency"))  # fmt: skip
_STEPS = (
    ("Mean", "mean"),
    ("Median", "median"),
    ("P90", "p90"),
    ("P95", "p95"),
    ("P99", "p99"),
    ("Max", "max"),
)
TOTALS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total input tokens from the cache:", "total_cached_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Concurrency:", "concurrency"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Share of requests within the limits:", "slo_attainment"),
    ("Accept length:", "accept_length"),
    ("CPU time of this client (s):", "client_cpu_seconds"),
)


def title(text: str, fill: str = "=") -> str:
    """`text` in the middle of a line of `fill`."""
    return f"{text:{fill}^{_WIDTH}}"


def line(label: str, value: Any) -> str:
    """A label and its value in two columns."""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def totals(result: Mapping[str, Any]) -> list[str]:
    """Counts and throughput."""
    return [line(label, result[key]) for label, key in TOTALS if key in result]


def latencies(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A section for each of ``names`` (e2e_latency, ttft, tpot, itl)."""
    lines: list[str] = []
    for label, key, heading in _LATENCIES:
        if key in names:
            lines.append(title(heading, "-"))
            lines += [
                line(f"{word} {label} (ms):", result[f"{step}_{key}_ms"]) for word, step in _STEPS
            ]
    return lines


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in columns: the first aligned left, the others right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
    lines = []
    for row in [list(headings), *cells]:
        first = f"{row[0]:<{widths[0]}}"
        rest = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def append_jsonl(
    path: str, results: Iterable[Mapping[str, Any]], flag: str = "--output-file"
) -> None:
    """Append one line for each result. ConfigError if the file of ``flag`` cannot be written."""
    text = "".join(json.dumps(dict(result), ensure_ascii=False) + "\n" for result in results)
    try:
        with Path(path).expanduser().open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error}") from error


def check_writable(path: str | None, flag: str = "--output-file") -> None:
    """ConfigError before the run if the result file cannot be written."""
    if path is not None:
        append_jsonl(path, (), flag)
