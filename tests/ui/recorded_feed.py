"""A feed as /live/events sends it, made up: every number follows from its index."""

from __future__ import annotations

import hashlib
from typing import Any

NOW = 5000.0
STEP_S = 0.012
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "\u202eright to left",
    "zero\u200bwidth\x1b[31mred",
    "${html`<b>`}",
    "<script>window.owned = 1</script>",
]
PHASES = ["queue", "grammar", "prefill", "decode", "retracted", "engine_dead"]

Frame = tuple[str, dict[str, Any]]


def hello(now: float = NOW) -> Frame:
    """The first frame."""
    names = {"version": 1, "phases": PHASES, "step_fields": [], "show_text": False}
    return "hello", names | {"now_s": now, "unix_s": 1.79e9, "model": "tiny/radix"}


def row(index: int, now: float = NOW) -> dict[str, Any]:
    """A request that began ``index`` quarters of a second before ``now``."""
    begun = now - index * 0.27 - 0.4
    first = begun + 0.02 + (index % 5) * 0.05
    cached, prompt = (index % 3) * 300, 900 + index
    spans: list[list[Any]] = [["queue", begun, first, 0]]
    if index % 7 == 3:
        spans = [["grammar", begun, first - 0.01, 0], ["queue", first - 0.01, first, 0]]
    at = first
    for tokens in (512, prompt - cached - 512)[: 1 + (index % 4 > 0)]:
        spans.append(["prefill", at, at + tokens / 2500, tokens])
        at += tokens / 2500
    ended = None if index < 8 else at + 1.5 + (index % 9) * 0.7
    decode = at
    if index % 11 == 5:
        spans += [["decode", at, at + 0.5, 40], ["retracted", at + 0.5, at + 1.1, 0]]
        spans.append(["prefill", at + 1.1, at + 1.3, prompt + 40 - cached])
        decode = at + 1.3
    if index % 13 == 4:
        spans += [["decode", at, at + 0.4, 30], ["engine_dead", at + 0.4, at + 1.4, 0]]
        spans += [["queue", at + 1.4, at + 1.45, 0], ["prefill", at + 1.45, at + 1.6, prompt]]
        decode = at + 1.6
    end = None if ended is None else max(ended, decode + 0.5)
    spans.append(["decode", decode, end, 100])
    if index == 0:
        spans = [["queue", begun, None, 0]]
    why = None if end is None else ("abort" if index % 17 == 9 else ("stop", "length")[index % 2])
    return {
        "id": hashlib.sha256(str(index).encode()).hexdigest()[:12],
        "rid": None,
        "begun_s": begun,
        "ended_s": end,
        "prompt": prompt,
        "cached": cached,
        "out": 100 + index,
        "adapter": HOSTILE[index % 6] if index % 10 == 1 else None,
        "priority": index % 3 or None,
        "tenant": HOSTILE[(index + 3) % 6] if index % 10 == 1 else f"team-{index % 4}",
        "finish": why,
        "route": "/v1/chat/completions",
        "spans": spans,
    }


def requests(count: int = 200, now: float = NOW) -> Frame:
    """Rows of ``count`` requests."""
    return "requests", {"rows": [row(index, now) for index in range(count)]}


def steps(count: int = 600, first: int = 1000, end: float = NOW) -> Frame:
    """``count`` steps, the last of which ends at ``end``."""
    at = range(count)
    slow = [3.0 if i % 97 > 90 else 1.0 for i in at]
    big = [512 if i % 40 == 7 else 0 for i in at]
    columns = {
        "start_s": [end - (count - i) * STEP_S for i in at],
        "plan_ms": [0.2 + (i % 5) * 0.02 for i in at],
        "prepare_ms": [0.4 + (i % 3) * 0.05 for i in at],
        "model_ms": [(5 + (i % 7) * 0.3 + big[i] / 60) * slow[i] for i in at],
        "sample_ms": [0.5] * count,
        "commit_ms": [0.3 + (i % 4) * 0.05 for i in at],
        "wait_ms": [1.0 if i % 6 == 0 else 0.1 for i in at],
        "decodes": [8 + (i // 60) % 5 for i in at],
        "prefill_tokens": big,
        "forced": [3 if i % 25 == 0 else 0 for i in at],
        "accepted": [0] * count,
        "budget": [2048] * count,
        "free_pages": [4000 - i for i in at],
        "retracted": [0] * count,
        "evicted": [0] * count,
    }
    numbers = list(range(first, first + count))
    return "steps", {"replica": 0, "first": first, "index": numbers, "columns": columns}


def head(at: float = NOW, index: int = 0) -> Frame:
    """The figures of a second."""
    wave = (index * 37) % 23 / 23
    times = {
        name: {w: [s, 2 * s, 3 * s] for w in ("1m", "5m", "60m")}
        for name, s in (("ttft", 0.05 + wave / 20), ("itl", 0.012), ("e2e", 1.8 + wave))
    }
    running = 900 + int(800 * wave)
    return "head", {
        "t": at,
        "state": "ready",
        "uptime_s": 3720.5 + index,
        "running": 8 + index % 5,
        "waiting": index % 3,
        "in_per_s": 1200 + 400 * wave,
        "out_per_s": 640 + 80 * wave,
        "kv_used": 16 * (running + 1500),
        "kv_total": 16 * 8192,
        "hit_rate": 0.55 + 0.2 * wave,
        "percentiles": times | {"e2e": times["e2e"] | {"60m": None}},
        "pages": {"size": 16, "total": 8192, "running": running, "cached_free": 1500}
        | {"cached_locked": 600, "free": 8192 - running - 2100, "window": 20}
        | {"window_total": 64, "states_used": 3, "states_total": 32},
        "retracted": index // 40,
        "evicted": index * 3,
        "deaths": 1,
        "speculation": {
            "drafter": "NGRAM",
            "accept_rate": 0.61,
            "accept_histogram": [40, 30, 22, 12, 5],
        },
        "adapters": [{"name": n, "requests": 3, "pinned": False} for n in ("sql", HOSTILE[0])],
        "replicas": [{"index": 0, "running": 8, "waiting": 1, "kv_used": 900, "out_per_s": 640.5}],
    }


def deaths() -> Frame:
    """One death with three requests, of which two went on."""
    went = [["a1", 0.91], ["b2", 1.4]]
    return "deaths", {
        "t": NOW - 61,
        "why": "killed by SIGKILL",
        "held": 3,
        "went_on": went,
        "dump": "crash-1.json",
    }


def log() -> Frame:
    """Lines of three levels, with hostile text."""
    levels = ["INFO", "WARNING", "ERROR"]
    lines = [
        [NOW - 40 + i, levels[i % 3], "scheduler", HOSTILE[i // 2 % 6] if i % 2 else f"line {i}"]
        for i in range(30)
    ]
    return "log", {"lines": lines}


def tree(second: int = 0, texts: bool = False) -> Frame:
    """A tree of 1 + 4 + 16 + 64 nodes, whose hits grow by ``second``; the last leaf goes at 2."""
    nodes: list[list[Any]] = [[1, 0, 512, 90 + 9 * second, 2, 0.1, False, None]]
    for serial in range(2, 86 - (second >= 2)):
        parent = (serial + 2) // 4
        hits = max(0, 60 - serial) + second * (serial % 5)
        tokens = 64 + (serial * 37) % 300
        node = [serial, parent, tokens, hits, int(serial % 9 == 0), serial / 3, serial % 13 == 0]
        nodes.append([*node, HOSTILE[serial % 6] if texts else None])
    total = sum(node[2] for node in nodes) + 2500
    return "tree", {"total_tokens": total, "nodes": nodes, "rest": {"nodes": 40, "tokens": 2500}}


def short() -> list[Frame]:
    """A little of everything."""
    few = [head(NOW - 3 + i, i) for i in range(4)]
    return [hello(NOW - 3), *few, requests(14), steps(30), deaths(), log(), tree()]


def recorded() -> list[Frame]:
    """All of it: ten minutes of figures, 200 requests, 600 steps."""
    seconds = [head(NOW - 600 + i, i) for i in range(0, 601, 3)]
    return [hello(NOW - 600), *seconds, requests(), steps(), deaths(), log(), tree()]
