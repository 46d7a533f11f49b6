"""``radixlm profile``: trace some steps of a running server, and join what its processes wrote.

The options are those of SGLang's profiler client. The result opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import time
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from radixlm.base.errors import ConfigError
from radixlm.config.verb_parser import VerbParser

PARENT = "/tmp/sglang-profile"
POLL_S = 0.2
QUIET_S = 1.0  # without an event: all replicas have told their steps
HOST = "steps of the host"
_PHASES = ("plan", "prepare", "model", "sample", "commit", "wait")
_COUNTS = ("decodes", "prefill_tokens", "forced", "accepted", "budget", "free_pages")


def merged(traces: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One Chrome trace of several, (label, trace). Processes and flows of each get numbers of their
    own; times count from the base of the first."""
    events: list[dict[str, Any]] = []
    pids: dict[tuple[int, Any], int] = {}
    base_ns: int | None = None
    for number, (label, trace) in enumerate(traces):
        start_ns = int(trace.get("baseTimeNanoseconds", 0))
        base_ns = start_ns if base_ns is None else base_ns
        shift_us = (start_ns - base_ns) / 1000
        for event in trace["traceEvents"]:
            key = number, event.get("pid", 0)
            if key not in pids:
                pids[key] = len(pids) + 1
                name = {"name": f"{label}: {key[1]}"}
                events.append({"ph": "M", "name": "process_name", "pid": pids[key], "args": name})
            if event.get("ph") == "M" and event.get("name") == "process_name":
                continue
            changed = {**event, "pid": pids[key]}
            if "ts" in event:
                changed["ts"] = float(event["ts"]) + shift_us
            if "id" in event:
                changed["id"] = f"{number}-{event['id']}"
            events.append(changed)
    return {"traceEvents": events, "baseTimeNanoseconds": base_ns or 0, "displayTimeUnit": "ms"}


def timeline(hello: dict[str, Any], steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The Chrome trace of ``steps`` events of /live/events: a slice a step, one a phase below it,
    and counters. ``hello``: the stream's first event, which tells the clock."""
    events: list[dict[str, Any]] = []
    wall = float(hello["unix_s"]) - float(hello["now_s"])
    for part in steps:
        columns, thread = part["columns"], int(part.get("replica", 0))
        for row in range(len(columns["start_s"])):
            values = {name: columns[name][row] for name in columns}
            at_us = (values["start_s"] + wall) * 1e6
            common: dict[str, Any] = {"pid": HOST, "tid": thread, "ph": "X", "cat": "step"}
            durations = {name: values[f"{name}_ms"] * 1e3 for name in _PHASES}
            counts = {name: values[name] for name in _COUNTS if name in values}
            whole = {"ts": at_us, "dur": sum(durations.values()), "args": counts}
            events.append(common | whole | {"name": f"step {part['index'][row]}"})
            for name, us in durations.items():
                events.append(common | {"name": name, "ts": at_us, "dur": us})
                at_us += us
            sizes = {name: counts[name] for name in ("decodes", "prefill_tokens")}
            events.append({"pid": HOST, "ph": "C", "name": f"tokens of {thread}",
                           "ts": whole["ts"], "args": sizes})  # fmt: skip
    return {"traceEvents": events, "baseTimeNanoseconds": 0, "displayTimeUnit": "ms"}


def read_steps(args: argparse.Namespace) -> dict[str, Any] | None:
    """The timeline of the server's last steps; None from a server without /live/events."""
    events: list[tuple[str, dict[str, Any]]] = []
    seen: set[Any] = set()
    name = ""
    with (
        contextlib.suppress(TimeoutError, HTTPError),  # it goes on with what is new
        _ask(args, "/live/events?topics=steps", timeout_s=QUIET_S) as answer,
    ):
        for data in answer:
            line = data.decode().rstrip()
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            if not line.startswith("data: "):
                continue
            events.append((name, json.loads(line.removeprefix("data: "))))
            replica = events[-1][1].get("replica")
            if replica in seen:
                break
            seen.add(replica)
    if not events:
        return None
    return timeline(events[0][1], (data for name, data in events[1:] if name == "steps"))


def write(path: Path, trace: dict[str, Any]) -> None:
    """A trace as gzipped JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


def read(path: Path) -> dict[str, Any]:
    """The same back."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def _parser() -> VerbParser:
    switch = argparse.BooleanOptionalAction
    parser = VerbParser("radixlm profile", __doc__)
    add = parser.add_argument
    add("--url", default="http://localhost:30000", help="the server")
    add("--output-dir", default=PARENT,
        help="of the server's machine, in its RADIXLM_PROFILER_DIR")  # fmt: skip
    add("--profile-name", help="a folder of this name in it")
    add("--num-steps", type=int, default=5, help="steps to trace, of each stage")
    add("--profile-by-stage", action=switch, default=False,
        help="one trace of steps with prompts, one of steps that only decode")  # fmt: skip
    add("--cpu", action=switch, default=True, help="trace operations of the CPU")
    add("--gpu", action=switch, default=True, help="trace the GPU, where there is one")
    add("--mem", action=switch, default=False,
        help="memory: on a GPU its history, on a CPU allocations in the trace")  # fmt: skip
    add("--rpd", action=switch, default=False, help="refused: needs AMD's profiler")
    add("--steps-only", action="store_true", help="only the host's timeline of the last steps")
    add(
        "--merge",
        "--merge-profiles",
        action=switch,
        default=True,
        help="join all files of the run into one",
    )
    add("--api-key", help="admin key of the server")
    add("--timeout", type=float, default=600.0, help="seconds to wait for the steps")
    return parser


def main(argv: list[str]) -> int:
    """Profile; 1 if the steps did not come in time."""
    args = _parser().parse_args(argv)
    if args.rpd:
        raise ConfigError("--rpd: RPD traces are AMD's; leave it out")
    names = [part for part in (args.profile_name, str(time.time())) if part]
    folder = Path(args.output_dir).absolute().joinpath(*names)
    if not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args.url}: use a URL such as http://localhost:30000")
    try:
        return 0 if _run(args, folder) else 1
    except HTTPError as error:
        text = error.read().decode(errors="replace").strip()
        raise ConfigError(f"{urlsplit(error.url).path}: {error.code} {text:.500}") from None
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise ConfigError(f"--url {args.url}: {error or type(error).__name__}") from error


def _ask(
    args: argparse.Namespace, path: str, body: Any = None, timeout_s: float = 60.0
) -> HTTPResponse:
    """What the server answers to a GET, or to a POST of ``body``."""
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(args.url.rstrip("/") + path, data, headers)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    return answer


def _run(args: argparse.Namespace, folder: Path) -> bool:
    files: list[Path] = []
    if not args.steps_only:
        found = _traced(args, folder)
        if found is None:
            return False
        files = found
    traces = [(path.name.removesuffix(".trace.json.gz"), read(path)) for path in files]
    steps = read_steps(args)
    if steps is not None:
        traces.append((HOST, steps))
        write(folder / "steps.trace.json.gz", steps)
        files.append(folder / "steps.trace.json.gz")
    if args.merge and len(traces) > 1:
        files.append(folder / "merged.trace.json.gz")
        write(files[-1], merged(traces))
    for path in files:
        print(path)
    return bool(files)


def _traced(args: argparse.Namespace, folder: Path) -> list[Path] | None:
    """Trace the steps; the files once all ranks have written theirs, None if they do not come."""
    with _ask(args, "/get_server_info") as answer:
        info = json.load(answer)
    kinds = {"CPU": args.cpu, "GPU": args.gpu, "MEM": args.mem}
    body = {
        "output_dir": str(folder), "num_steps": args.num_steps,
        "activities": [name for name, is_on in kinds.items() if is_on],
        "profile_by_stage": args.profile_by_stage,
    }  # fmt: skip
    _ask(args, "/start_profile", body).close()
    waits = f"waiting for {args.num_steps} steps, which come with requests"
    print(f"traces go to {folder}; {waits}", flush=True)
    count = int(info.get("tp_size") or 1) * int(info.get("dp_size") or 1)
    count *= 2 if args.profile_by_stage else 1
    if not folder.is_dir():
        print(f"the server runs on another machine: the traces are in its {folder}")
        return []
    (folder / "server_args.json").write_text(json.dumps(info))
    deadline_s = time.monotonic() + args.timeout
    while len(files := sorted(folder.glob("*.trace.json.gz"))) < count:
        if time.monotonic() > deadline_s:
            with contextlib.suppress(HTTPError):
                _ask(args, "/stop_profile", {}).close()
            print(f"only {len(files)} of {count} traces came within {args.timeout:g} s: "
                  "send requests meanwhile")  # fmt: skip
            return None
        time.sleep(POLL_S)
    return files
