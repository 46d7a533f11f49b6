"""`radixlm bench one-batch`: one static batch through scheduler and executor, without intake.

All prompts are computed in one step (prefill), then each step gives every request one token, or
with --speculative-algorithm some (decode). With --pp-size a step of either kind lasts until every
request has got a token: the stages compute parts of it at the same time. Other options are those of
the server (`radixlm serve --help`).
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from radixlm.base.errors import ConfigError, EngineError
from radixlm.base.log import set_up_logging
from radixlm.base.record import replace
from radixlm.bench import report
from radixlm.bench.options import add_shape_options, engine_parser, positive, refuse
from radixlm.config.parser import parse
from radixlm.config.server_config import ServerConfig
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.affinity import placed
from radixlm.engine.assemble import EngineCore, assemble
from radixlm.engine.model_info import ModelInfo, resolved
from radixlm.engine.rank_processes import RankProcesses, topology_of
from radixlm.engine.ranks import NO_PEERS, Followers, Peers
from radixlm.engine.run_folder import RunFolder
from radixlm.engine.supervisor import startup_of
from radixlm.engine.worker import run_rank
from radixlm.speculative.drafting import Drafting
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.replies import Finish, StepReply
from radixlm.wire.requests import Control, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

_WARMUP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests, tokens of each prompt, tokens of each answer."""

    batch_size: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one shape: latencies in seconds, throughput in tokens a second. Those of decode
    are of one step, and None if the answers have one token. ``accept_length``: tokens of a request
    in a decode step; ``speedup``: of all decode steps over those of a run without drafts. Both are
    None without a drafter."""

    run_name: str
    batch_size: int
    input_len: int
    output_len: int
    prefill_latency: float
    prefill_throughput: float
    median_decode_latency: float | None
    median_decode_throughput: float | None
    best_decode_latency: float | None
    total_latency: float
    overall_throughput: float
    accept_length: float | None = None
    speedup: float | None = None


def build_parser() -> VerbParser:
    """The flags of this verb."""
    parser = engine_parser("one-batch", "Prefill and decode speed of one static batch.")
    add_shape_options(parser)
    parser.add_argument("--run-name", default="default", metavar="TEXT", help="name in the result")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="best of so many runs")
    parser.add_argument(
        "--output-file",
        "--result-filename",
        metavar="FILE",
        help="append a line of JSON for each shape",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    check = "answers are compared with Hugging Face's in the tests, and by `radixlm compare-dumps`"
    profile = "start a server and use `radixlm profile`"
    refuse(
        parser,
        {
            "--correctness-test": check,
            "--correct": check,
            "--cut-len": check,
            "--prompt-filename": "the prompts are drawn ids; `radixlm generate` answers texts",
            "--log-decode-step": "the table has the median step",
            "--profile": profile,
            "--profile-record-shapes": profile,
            "--profile-filename-prefix": profile,
        },
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """0 after all shapes are measured."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        positive(getattr(args, name), f"--{name.replace('_', '-')}")
    positive([args.repeat], "--repeat")
    report.check_writable(args.output_file)
    shapes = [Shape(*s) for s in product(args.batch_size, args.input_len, args.output_len)]
    config, given = parse(rest, parser.prog, parser._option_string_actions)
    if "log_level" not in given:
        config = config.with_values({"log_level": "warning"})
    set_up_logging("bench", config.observe.log_level, log_format=config.observe.log_format)
    check_one_replica(config)
    config, given = with_room(config, given, shapes)
    config, info = resolved(config, given)
    check_shapes(shapes, info)
    results = []
    with contextlib.closing(Batch(config, info, args.seed, given)) as bench:
        gc.freeze()  # as an engine does: no step waits until all modules are looked through
        bench.run(Shape(shapes[0].batch_size, shapes[0].input_len, _WARMUP_OUTPUT))
        for shape in tqdm(shapes, unit="shape", disable=None):
            runs = [bench.measure(shape, args.run_name) for _ in range(args.repeat)]
            results.append(min(runs, key=lambda result: result.total_latency))
    gc.unfreeze()
    _print(results, args)
    return 0


def check_one_replica(config: ServerConfig) -> None:
    """ConfigError for what one replica on one host has not."""
    p = config.parallel
    for flag, is_set in (
        (f"--nnodes {p.nnodes}", p.nnodes > 1),
        (f"--dp-size {p.dp_size} without --enable-dp-attention", p.num_replicas > 1),
        ("--warm-restart", config.memory.warm_restart),
    ):
        if is_set:
            raise ConfigError(
                f"{flag}: one-batch runs one replica on this host, without a server; `radixlm "
                "bench one-batch-server` measures a server"
            )


def with_room(
    config: ServerConfig, given: frozenset[str], shapes: Sequence[Shape]
) -> tuple[ServerConfig, frozenset[str]]:
    """Set the limits that the user left open so that the largest batch fits in one step."""
    prefill = max(shape.batch_size * shape.input_len for shape in shapes)
    topology = topology_of(config)
    parts = topology.attn_dp * topology.pp  # each of which has the same number of requests
    values = {
        "chunked_prefill_size": max(prefill, 2048),
        "max_prefill_tokens": max(prefill, config.schedule.max_prefill_tokens),
        "max_running_requests": max(-(-s.batch_size // parts) * parts for s in shapes),
        "schedule_conservativeness": 0.0,  # no other request will come
        "num_continuous_decode_steps": 1,  # each token is measured
    }
    values = {name: value for name, value in values.items() if name not in given}
    return config.with_values(values), given | frozenset(values)


def check_shapes(shapes: Sequence[Shape], info: ModelInfo) -> None:
    """ConfigError if a shape exceeds the model's context."""
    for shape in shapes:
        if shape.input_len + max(shape.output_len, _WARMUP_OUTPUT) > info.context_len:
            raise ConfigError(
                f"--input-len {shape.input_len} and --output-len {shape.output_len}: the model's "
                f"context has {info.context_len} tokens ({_WARMUP_OUTPUT} go to the warm-up)"
            )


class Batch:
    """A scheduler with its executor, driven step by step. ``close`` ends its other ranks."""

    def __init__(
        self, config: ServerConfig, info: ModelInfo, seed: int, given: frozenset[str] = frozenset()
    ) -> None:
        """``given``: the options that the user has set, which other ranks take as they are."""
        self._mine, theirs = MemoryChannel.pair()
        self._folder = RunFolder()
        self._peers: Peers = NO_PEERS
        startup = startup_of(config, given, self._folder.path)
        config = placed(ServerConfig.from_kwargs(**startup["options"]), given, startup)
        try:
            if startup["local_ranks"] is not None:
                self._peers = Followers(RankProcesses(startup, run_rank), config)
            self.replica: EngineCore = assemble(config, info, theirs, peers=self._peers)
        except BaseException:
            self.close()
            raise
        planner = self.replica.scheduler.planner
        planner.limits = replace(planner.limits, mixed=False)  # no answer begins before all prompts
        self._draw = np.random.default_rng(seed)
        self._vocab = info.decoder.vocab
        self._num_runs = 0
        self.live: set[str] = set()  # requests of this run that have not ended
        self._ahead: set[str] = set()  # those that have got the next step's token already
        self._num_rows = 0  # requests of all its decode steps

    def close(self) -> None:
        """End the other ranks."""
        self._peers.stop()
        self._folder.remove()

    def measure(self, shape: Shape, run_name: str) -> Result:
        """One run of a shape; with a drafter a second one without drafts."""
        drafting = self.replica.scheduler.drafting
        has_drafter, plain_s = False, 0.0
        if isinstance(drafting, Drafting) and drafting.has_drafter:
            has_drafter = True
            drafting.lengths.is_off = True
            plain_s = sum(self.run(shape)[1])
            drafting.lengths.is_off = False
        prefill_s, decodes_s = self.run(shape)
        total_s = prefill_s + sum(decodes_s)
        size, tokens = shape.batch_size, shape.input_len + shape.output_len
        median_s = statistics.median(decodes_s) if decodes_s else None
        accept_len = size * (shape.output_len - 1) / max(1, self._num_rows)
        return Result(
            run_name,
            size,
            shape.input_len,
            shape.output_len,
            prefill_latency=prefill_s,
            prefill_throughput=size * shape.input_len / prefill_s,
            median_decode_latency=median_s,
            median_decode_throughput=size * accept_len / median_s if median_s else None,
            best_decode_latency=min(decodes_s, default=None),
            total_latency=total_s,
            overall_throughput=size * tokens / total_s,
            accept_length=accept_len if has_drafter and decodes_s else None,
            speedup=plain_s / sum(decodes_s) if has_drafter and decodes_s else None,
        )

    def run(self, shape: Shape) -> tuple[float, list[float]]:
        """(seconds of the prefill, seconds of each decode step) with fresh prompts and an empty
        prefix cache. EngineError if requests still run afterwards."""
        self.flush()
        self.send(shape)
        prefill_s, self._num_rows = self.timed_step(shape), 0
        decodes_s: list[float] = []
        while self.live and len(decodes_s) < shape.output_len:
            self._num_rows += len(self.live)
            decodes_s.append(self.timed_step(shape))
        if self.replica.scheduler.planner.running:
            raise EngineError("requests still run after the last step of the batch")
        return prefill_s, decodes_s

    def send(self, shape: Shape) -> None:
        """Send the requests of a shape."""
        self._num_runs += 1
        for index in range(shape.batch_size):
            request = self._request(f"{self._num_runs}-{index}", shape)
            self.live.add(request.rid)
            self._mine.send(request)

    def _request(self, rid: str, shape: Shape) -> TokenizedRequest:
        ids = self._draw.integers(0, self._vocab, shape.input_len, np.int32)
        sampling = SamplingParams(max_new_tokens=shape.output_len, temperature=0.0, ignore_eos=True)
        return TokenizedRequest(rid=rid, input_ids=pack_ids(ids), sampling=sampling)

    def timed_step(self, shape: Shape) -> float:
        """Seconds until every live request has got a token: of one tick, unless steps overlap.
        ConfigError if one waits for others."""
        scheduler = self.replica.scheduler
        waiting, self._ahead = (self.live - self._ahead) or set(self.live), set()
        start_s = end_s = time.perf_counter()
        while waiting:
            scheduler.tick(wait=False)
            end_s = time.perf_counter()
            served = self._take_tokens()
            is_together = not served & self._ahead and (served >= waiting or scheduler.inflight)
            self._ahead |= served - waiting
            waiting -= served
            if not is_together:
                raise ConfigError(
                    f"--batch-size {shape.batch_size} with {shape.input_len} + {shape.output_len} "
                    f"tokens does not run as one batch ({len(waiting)} requests wait for others): "
                    f"the KV cache holds {self.replica.facts['max_total_num_tokens']} tokens; see "
                    "--mem-fraction-static, --max-running-requests and --chunked-prefill-size"
                )
        return end_s - start_s

    def _take_tokens(self) -> set[str]:
        """The requests that have got tokens since the last call."""
        served: set[str] = set()
        for reply in self._mine.receive(0):
            if isinstance(reply, StepReply):
                served.update(reply.rids)
                for delta in reply.deltas:
                    if delta.tokens:
                        served.add(delta.rid)
                    if delta.finish is not None:
                        self.live.discard(delta.rid)
                        _check_finish(delta.finish)
        return served

    def flush(self) -> None:
        """Empty the prefix cache and drop pending replies of the scheduler."""
        self._mine.send(Control("flush", "flush_cache"))
        self.replica.scheduler.tick(wait=False)
        self._mine.receive(0)


def _check_finish(finish: Finish | None) -> None:
    if finish is not None and finish.kind in ("error", "abort"):
        raise EngineError(f"a request failed: {finish.message}")


def _print(results: Sequence[Result], args: argparse.Namespace) -> None:
    rows = [asdict(result) for result in results]
    if args.json:
        sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
    else:
        sys.stdout.write(render(results))
    if args.output_file:
        report.append_jsonl(args.output_file, rows)


def render(results: Sequence[Result]) -> str:
    has_drafter = any(result.speedup is not None for result in results)
    headings = (
        "batch x in + out",
        "prefill ms",
        "prefill tok/s",
        "decode ms",
        "best ms",
        "decode tok/s",
        "total s",
        "tok/s",
        *(("accept len", "speed-up") if has_drafter else ()),
    )
    return report.table(headings, [_row(result, has_drafter) for result in results]) + "\n"


def _row(result: Result, has_drafter: bool) -> tuple[str, ...]:
    drafted = (result.accept_length, result.speedup) if has_drafter else ()
    return (
        f"{result.batch_size} x {result.input_len} + {result.output_len}",
        f"{result.prefill_latency * 1e3:.2f}",
        f"{result.prefill_throughput:.0f}",
        _ms(result.median_decode_latency),
        _ms(result.best_decode_latency),
        "-"
        if result.median_decode_throughput is None
        else f"{result.median_decode_throughput:.1f}",
        f"{result.total_latency:.3f}",
        f"{result.overall_throughput:.1f}",
        *("-" if value is None else f"{value:.2f}" for value in drafted),
    )


def _ms(seconds: Any) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
