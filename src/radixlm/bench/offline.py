"""`radixlm bench offline`: the engine inside this process, with the prompts of `bench serve`.

Other options are those of the server (`radixlm serve --help`).
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import uvloop

from radixlm.base.errors import ConfigError, RadixError, RequestError
from radixlm.base.log import set_up_logging
from radixlm.bench import metrics, report
from radixlm.bench.backends import NativeMeter, Outcome
from radixlm.bench.datasets import DatasetOptions, Row, check_options, load_rows
from radixlm.bench.load import Traffic, run_load
from radixlm.bench.options import (
    add_dataset_options,
    dataset_options,
    engine_parser,
    json_object,
    refuse,
)
from radixlm.bench.progress import Progress
from radixlm.config.parser import parse
from radixlm.config.server_config import flat
from radixlm.config.verb_parser import VerbParser
from radixlm.entrypoints.offline import Engine

_WARMUP_REQUESTS = 16
_WARMUP_OUTPUT = 16


def build_parser() -> VerbParser:
    """The flags of this verb."""
    parser = engine_parser("offline", "Throughput of the engine without a server.")
    add_dataset_options(parser)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="limit of concurrent requests"
    )
    group.add_argument("--disable-ignore-eos", action="store_true", help="let answers end early")
    group.add_argument("--return-logprob", action="store_true", help="ask for log-probabilities")
    group.add_argument(
        "--extra-request-body", metavar="JSON", help="sampling parameters: '{\"top_p\": 0.9}'"
    )
    group.add_argument("--skip-warmup", action="store_true", help="measure the first steps too")
    group.add_argument("--backend", choices=("engine",), default="engine", help="the only one")
    refuse(
        parser,
        {
            "--profile": "start a server, then `radixlm profile` beside `radixlm bench serve`",
            "--do-not-exit": "the engine ends with the run; `radixlm serve` keeps one",
        },
    )
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output-file", "--result-filename", metavar="FILE", help="append a line of JSON"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--tag", metavar="TEXT", help="a name for this run in the result")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def engine_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Keyword arguments of ``Engine`` for the server options in ``argv``, checked. ``parser``: of
    the verb, which has read the others."""
    config, given = parse(argv, parser.prog, parser._option_string_actions)
    level = config.observe.log_level if "log_level" in given else "warning"
    set_up_logging("bench", level, log_format=config.observe.log_format)
    return {n: v for n, v in flat(config, show_secrets=True).items() if n in given}


def main(argv: Sequence[str]) -> int:
    """0, or 1 if a request failed."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    report.check_writable(args.output_file)
    prompts = dataset_options(args)
    check_options(prompts)
    traffic = Traffic(math.inf, args.max_concurrency, args.seed)
    extra = json_object(args.extra_request_body, "--extra-request-body")
    options = engine_options(rest, parser)
    if options.get("skip_tokenizer_init"):
        raise ConfigError("--skip-tokenizer-init: the prompts are drawn with the tokenizer")
    with Engine(**options) as engine:
        return int(uvloop.run(_run(args, prompts, traffic, extra, engine)))


async def _run(
    args: argparse.Namespace,
    prompts: DatasetOptions,
    traffic: Traffic,
    extra: dict[str, Any],
    engine: Engine,
) -> int:
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "checked before the engine started"
    rows = load_rows(prompts, tokenizer)
    requester = EngineRequester(engine, not args.disable_ignore_eos, args.return_logprob, extra)
    if not args.skip_warmup:
        await asyncio.gather(*(requester.ask(row) for row in _warm_up_rows(rows)))
        engine.flush_cache()
    progress = Progress(len(rows), not args.disable_tqdm)
    try:
        outcomes, duration_s = await run_load(rows, requester.ask, traffic, progress)
    finally:
        progress.close()
    metrics.count_missing(outcomes, rows, tokenizer)
    result = _arguments(args, prompts) | metrics.summarise(outcomes, duration_s)
    for name in [n for n in result if {"ttft", "tpot", "itl"} & set(n.split("_"))]:
        del result[name]  # answers are not streamed
    _report(args, result, outcomes)
    return int(result["failed"] > 0)


def _warm_up_rows(rows: list[Row]) -> list[Row]:
    """The first rows with short outputs."""
    return [
        replace(row, num_output=min(row.num_output, _WARMUP_OUTPUT))
        for row in rows[:_WARMUP_REQUESTS]
    ]


class EngineRequester:
    """Sends rows to the engine. A failed request gives an Outcome, not an exception."""

    def __init__(
        self, engine: Engine, ignore_eos: bool, return_logprob: bool, extra: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._sampling = {"temperature": 0.0, "ignore_eos": ignore_eos, **extra}
        self._fields = {"return_logprob": True} if return_logprob else {}

    async def ask(self, row: Row) -> Outcome:
        """Send one row and wait for its answer."""
        meter = NativeMeter(time.perf_counter())
        fields: dict[str, Any] = dict(self._fields)
        if row.ids is not None:
            fields["input_ids"] = row.ids
        if row.images:
            fields["image_data"] = list(row.images)
        sampling = {"max_new_tokens": row.num_output} | self._sampling
        try:
            meter.whole(
                await self._engine.async_generate(row.shown or row.text, sampling, **fields)
            )
        except RequestError as error:
            meter.out.status, meter.out.error = error.status, str(error)
        except RadixError as error:
            meter.out.error = str(error)
        out = meter.out
        out.latency_s = out.ttft_s = time.perf_counter() - out.start_s
        out.is_ok = not out.error
        return out


def _arguments(args: argparse.Namespace, prompts: DatasetOptions) -> dict[str, Any]:
    return {
        "tag": args.tag,
        "backend": "engine",
        "dataset_name": prompts.dataset_name,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def _report(args: argparse.Namespace, result: dict[str, Any], outcomes: list[Outcome]) -> None:
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(render(result))
    for error in dict.fromkeys(o.error for o in outcomes if not o.is_ok):
        sys.stderr.write(f"a request failed: {error}\n")
    if args.output_file:
        report.append_jsonl(args.output_file, [result])


def render(result: dict[str, Any]) -> str:
    lines = [
        "",
        report.title(" Offline Throughput Benchmark Result "),
        report.line("Backend:", result["backend"]),
        report.line("Dataset:", result["dataset_name"]),
        *report.totals(result),
        *report.latencies(result, ("e2e_latency",)),
        report.title(""),
    ]
    return "\n".join(lines) + "\n"
