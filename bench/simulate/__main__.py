"""Simulates clusters: real schedulers, KV managers, prefix caches, routing and EPLB; modelled GPUs.

    python bench/simulate run --pool 256:tp=4 --rate 500 --seconds 600
    python bench/simulate run --model deepseek-v3 --rate 40 \\
        --pool 1:tp=32,attn_dp=32,redundant=32,role=prefill --pool 1:tp=64,attn_dp=64,role=decode
    python bench/simulate validate [--traces FOLDER]    published points against simulated ones

    python bench/simulate scale --out docs/images [--trace FILE]    the experiments of docs/scale.md

A pool is REPLICAS:KEY=VALUE,...; keys are those of Layout (tp, pp, attn_dp, redundant) and of Pool
(role, step_tokens, max_running, page_size, kv_tokens). See docs/scale.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# Python puts a script's folder first on the path, where its files would hide packages
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != FOLDER]
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parents[1] / "src")]

import msgspec  # noqa: E402

from radixlm.base.errors import ConfigError  # noqa: E402
from radixlm.bench.cli import run as run_command  # noqa: E402
from radixlm.config.verb_parser import VerbParser  # noqa: E402
from simulate import traffic  # noqa: E402
from simulate.cluster import Cluster, Failures, Pool  # noqa: E402
from simulate.cost import CONFIGS, Cost, model  # noqa: E402
from simulate.experts import skew  # noqa: E402
from simulate.layout import Layout, StepTime  # noqa: E402
from simulate.machine import GPUS, Engine  # noqa: E402
from simulate.result import Slo, render, summarize  # noqa: E402
from simulate.scale import draw_all  # noqa: E402
from simulate.validate import points, table  # noqa: E402

_LAYOUT = ("tp", "pp", "attn_dp", "redundant")
_POOL = ("role", "step_tokens", "max_running", "page_size", "kv_tokens")


def parse_pool(text: str, cost: Cost, gpu: str, engine: Engine, spread: float) -> Pool:
    """A pool from its text; ConfigError names what is wrong with it."""
    number, _, rest = text.partition(":")
    fields = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
    if wrong := set(fields) - {*_LAYOUT, *_POOL}:
        raise ConfigError(
            f"--pool {text}: no key {wrong.pop()}; keys: {', '.join(_LAYOUT + _POOL)}"
        )
    try:
        values = {key: value if key == "role" else int(value) for key, value in fields.items()}
        replicas = int(number)
    except ValueError:
        raise ConfigError(f"--pool {text}: write it like 4:tp=8,role=prefill") from None
    if values.get("role", "both") not in ("both", "prefill", "decode") or replicas < 1:
        raise ConfigError(f"--pool {text}: 1 replica or more, role both, prefill or decode")
    layout = Layout(**{key: values[key] for key in _LAYOUT if key in values})
    load = skew(cost, layout, spread, True) if layout.attn_dp > 1 and cost.experts else None
    time = StepTime(cost, GPUS[gpu], engine, layout, **({"skew": load} if load else {}))
    return Pool(time, replicas, **{key: values[key] for key in _POOL if key in values})


def build_parser() -> VerbParser:
    """All flags."""
    parser = VerbParser("python bench/simulate", "Simulate a cluster of engines.")
    number: dict[str, Any] = {"type": float, "metavar": "N"}
    parser.add_argument("what", choices=("run", "validate", "scale"))
    parser.add_argument("--model", default="llama-70b", help=f"{', '.join(CONFIGS)}, or a folder")
    parser.add_argument("--gpu", default="H100", choices=sorted(GPUS))
    parser.add_argument("--pool", action="append", help="REPLICAS:KEY=VALUE,...; may be repeated")
    parser.add_argument("--mix", default="plain", choices=sorted(traffic.MIXES))
    parser.add_argument("--trace", metavar="FILE", help="Mooncake's format, in place of --mix")
    parser.add_argument("--speed", default=1.0, help="of the trace", **number)
    parser.add_argument("--rate", default=10.0, help="requests a second", **number)
    parser.add_argument("--seconds", default=60.0, help="of arrivals", **number)
    parser.add_argument("--seed", default=0, type=int, metavar="N")
    parser.add_argument("--ttft-ms", default=2000.0, help="limit of the first token", **number)
    parser.add_argument("--tpot-ms", default=50.0, help="limit of later tokens", **number)
    parser.add_argument("--deaths", default=0.0, help="of 1,000 nodes a day", **number)
    parser.add_argument("--restart-s", default=60.0, help="of a replica", **number)
    parser.add_argument("--method", default="shortest_queue", help="--load-balance-method")
    parser.add_argument("--spread", default=0.8, help="sigma of the experts' popularity", **number)
    parser.add_argument("--overlap", default=0.6, help="two-batch overlap, for experts", **number)
    parser.add_argument("--no-cache", action="store_true", help="no prefix cache")
    parser.add_argument("--traces", metavar="FOLDER", help="validate: Mooncake's FAST'25 traces")
    parser.add_argument("--out", metavar="FOLDER", help="scale: where the images go")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def arrivals(args: Any) -> Iterable[traffic.Arrival]:
    """Those of the trace, or drawn ones."""
    if not args.trace:
        return traffic.draw(traffic.MIXES[args.mix], args.rate, args.seconds, args.seed)
    found = traffic.read(Path(args.trace), speed=args.speed)
    return [arrival for arrival in found if arrival.at_s < args.seconds]


def simulate(args: Any) -> str:
    """One run as text."""
    cost = model(args.model)
    engine = Engine(overlap=args.overlap if cost.experts else 0.0)
    pools = [
        parse_pool(text, cost, args.gpu, engine, args.spread) for text in args.pool or ["1:tp=4"]
    ]
    failures = Failures(args.deaths, args.restart_s)
    cluster = Cluster(pools, failures, args.method, args.seed, not args.no_cache)
    cluster.run(arrivals(args))
    if not cluster.trips:
        raise ConfigError("no request arrives: raise --rate or --seconds")
    result = summarize(cluster, args.seconds, Slo(args.ttft_ms / 1e3, args.tpot_ms / 1e3))
    return json.dumps(msgspec.to_builtins(result)) if args.json else render(result)


def main(argv: Sequence[str]) -> int:
    """0, or 1 if a validated point is further off than 20 %."""
    args = build_parser().parse_args(argv)
    if args.what == "run":
        print(simulate(args))
        return 0
    if args.what == "scale":
        if not args.out:
            raise ConfigError("scale needs --out FOLDER")
        draw_all(Path(args.out), Path(args.trace) if args.trace else None)
        return 0
    found = points(Path(args.traces) if args.traces else None)
    print(table(found))
    return int(any(point.is_prediction and not point.is_met for point in found))


if __name__ == "__main__":
    sys.exit(run_command("bench/simulate", main, sys.argv[1:]))
