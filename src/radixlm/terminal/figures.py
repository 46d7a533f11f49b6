"""Snapshots as text: rows with a label for one server, a line for each of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from radixlm.base.units import format_bytes, format_seconds
from radixlm.terminal.snapshot import Part, Percentiles, Snapshot

_BARS = " ▁▂▃▄▅▆▇█"
_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E", "queue": "queue"}
_MAX_NAME, _MAX_PARTS = 60, 12


def rows(got: Snapshot, rates: Sequence[float] = (), width: int = 80) -> list[tuple[str, str]]:
    """(label, text) of what is known. ``rates``: tokens/s out so far, for a graph. Texts of the
    server are printable."""
    found = [("server", _head(got))]
    if got.state != "down":
        over = "since its start" if got.is_first else "of the last minute"
        found += [
            ("requests", _requests(got)),
            ("tokens/s", _tokens(got) + (f"  {graph(rates, width - 50)}" if any(rates) else "")),
            *_latencies(got.latency, over),
            ("KV cache", _cache(got, width)),
            (
                "memory",
                ", ".join(
                    f"{n.replace('_', ' ')} {format_bytes(b)}" for n, b in got.memory.items()
                ),
            ),
            ("spec", _drafts(got)),
            ("adapters", _adapters(got)),
            *_parts(got),
        ]
    found.append(("restarts", _restarts(got)))
    found += [("" if number else "events", clean(text)) for number, text in enumerate(got.events)]
    found.append(("note", clean(got.hint, 200)))
    return [(label, text) for label, text in found if text]


def line(got: Snapshot) -> str:
    """The same in one line, as far as it goes."""
    if got.state == "down":
        return f"{_name(got)}  {_state(got)}"
    ttft = got.latency.get("ttft")
    itl = got.latency.get("itl")
    parts = [
        f"{_name(got)}  {_state(got)}",
        f"run {_count(got.running)}, wait {_count(got.waiting)}",
        f"tokens/s {_tokens(got)}",
        f"TTFT p50 {_time(ttft, 'p50')}, p95 {_time(ttft, 'p95')}",
        f"ITL p50 {_time(itl, 'p50')}",
        f"KV {_share(got.kv_usage)}",
    ]
    return "  ".join(parts)


def clean(text: str, most: int = 120) -> str:
    """What a server sent, without what would move the cursor."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:most])
    return shown + ("..." if len(text) > most else "")


def graph(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars, the highest of them full."""
    shown = list(values)[-width:] if width > 0 else []
    top = max(shown, default=0.0)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * max(0.0, one) / top)] for one in shown) if top > 0 else ""


def _name(got: Snapshot) -> str:
    return clean(got.url, _MAX_NAME)


def _state(got: Snapshot) -> str:
    return clean(f"{got.state}: {got.reason}" if got.reason else got.state, 200)


def _head(got: Snapshot) -> str:
    model = f"{clean(got.model, _MAX_NAME)} at " if got.model else ""
    up = "" if got.uptime_s is None else f", up {format_seconds(got.uptime_s)}"
    version = f", version {clean(got.version, 20)}" if got.version else ""
    kind = "gateway, " if got.kind == "gateway" else ""
    return f"{model}{_name(got)}  {kind}{_state(got)}{up}{version}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _time(of: Percentiles | None, share: str) -> str:
    seconds = None if of is None else getattr(of, share)
    if of is None or seconds is None:
        return "-"
    return f"{'> ' if seconds >= of.top else ''}{format_seconds(seconds)}"


def _requests(got: Snapshot) -> str:
    held = "".join(f", {count:,.0f} {name}" for name, count in got.held.items())
    ended = "" if got.requests_per_s is None else f", {_rate(got.requests_per_s)} end a second"
    return f"{_count(got.running)} running, {_count(got.waiting)} waiting{held}{ended}"


def _tokens(got: Snapshot) -> str:
    return f"in {_rate(got.tokens_in_per_s)}, out {_rate(got.tokens_out_per_s)}"


def _latencies(latency: Mapping[str, Percentiles], over: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, label in _LATENCIES.items():
        one = latency.get(name)
        if one is None or one.p50 is None:
            continue
        text = "  ".join(f"{share} {_time(one, share):<10}" for share in ("p50", "p95", "p99"))
        found.append((label, text.rstrip() if found else f"{text}{over}"))
    return found


def _cache(got: Snapshot, width: int) -> str:
    found = []
    if got.kv_usage is not None:
        size = max(4, min(24, width - 60))
        full = round(size * min(1.0, max(0.0, got.kv_usage)))
        found.append(f"[{'#' * full}{'.' * (size - full)}] {_share(got.kv_usage)}")
    if got.kv_used_tokens is not None:
        of = f" of {got.kv_total_tokens:,.0f}" if got.kv_total_tokens else ""
        found.append(f"{got.kv_used_tokens:,.0f}{of} tokens")
    if got.cached_share is not None:
        found.append(f"{_share(got.cached_share)} of prompts cached")
    return ", ".join(found)


def _drafts(got: Snapshot) -> str:
    length = f"accept length {got.accept_length:.2f}" if got.accept_length else ""
    rate = (
        f"accept rate {_share(got.accept_rate)}" if got.accept_rate is not None and length else ""
    )
    return ", ".join(text for text in (length, rate) if text)


def _adapters(got: Snapshot) -> str:
    of = f" of {got.adapters['slots']:,.0f}" if got.adapters.get("slots") else ""
    found = [f"{count:,.0f}{of if name == 'loaded' else ''} {name}"
             for name, count in got.adapters.items() if name != "slots"]  # fmt: skip
    busiest = sorted(got.adapter_requests.items(), key=lambda pair: -pair[1])[:4]
    found += [f"{clean(name, 24)}: {count:,.0f} requests" for name, count in busiest]
    return ", ".join(found)


def _parts(got: Snapshot) -> list[tuple[str, str]]:
    """Workers of a gateway; replicas where there are several, or one restarts."""
    parts = got.parts
    if got.kind == "server" and len(parts) < 2 and all(part.state == "ready" for part in parts):
        return []
    first = "workers" if got.kind == "gateway" else "replicas"
    found = [("" if i else first, _part(part)) for i, part in enumerate(parts[:_MAX_PARTS])]
    if len(parts) > _MAX_PARTS:
        found.append(("", f"and {len(parts) - _MAX_PARTS} more"))
    return found


def _part(part: Part) -> str:
    counts = "" if part.running is None else f", {part.running:,.0f} running"
    counts += "" if part.waiting is None else f", {part.waiting:,.0f} waiting"
    usage = "" if part.usage is None else f", KV {_share(part.usage)}"
    return f"{clean(part.name, _MAX_NAME)}: {clean(part.state, 20)}{counts}{usage}"


def _restarts(got: Snapshot) -> str:
    counts = {"of engines": got.engine_restarts, "of the server": got.server_restarts}
    found = [f"{count} {whose}" for whose, count in counts.items() if count]
    if got.streams_moved:
        found.append(f"{got.streams_moved:,.0f} streams went on at another worker")
    return ", ".join(found)
