"""`radixlm bench serve`: sends requests to a running server, measures latency and throughput.

Flags and result names are those of SGLang's serving benchmark.
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

import numpy as np
import uvloop

from radixlm.base.addresses import url_host
from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench import metrics, report
from radixlm.bench.backends import BACKENDS, REFUSED, Outcome, RequestOptions
from radixlm.bench.client import HttpClient
from radixlm.bench.datasets import Row, check_options, load_rows
from radixlm.bench.load import Traffic, run_load
from radixlm.bench.options import add_dataset_options, dataset_options, json_object, refuse
from radixlm.bench.plot import check_plot, write_plot
from radixlm.bench.progress import Progress
from radixlm.bench.reference import (
    REFUSED_FLAGS,
    add_profile_options,
    headers_of,
    profile_body,
    wait_ready,
)
from radixlm.bench.requester import Requester
from radixlm.bench.slo import goodput, limits_ms
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.model_info import local_tokenizer
from radixlm.text.tokenizer import Tokenizer, load_tokenizer

_WARMUP_OUTPUT = 32  # max output tokens of a warm-up request
_FLUSH_TRIES = 20  # a server flushes only while no request runs


class _Backend(argparse.Action):
    """A known backend. ConfigError for others; for those of the reference with the reason."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values not in BACKENDS:
            why = f": {REFUSED[values]}" if values in REFUSED else f"; one of {', '.join(BACKENDS)}"
            raise ConfigError(f"--backend {values} is not served{why}")
        setattr(namespace, self.dest, values)


def build_parser(
    prog: str = "radixlm bench serve",
    text: str = "Send requests to a running server; print latency and throughput.",
) -> VerbParser:
    parser = VerbParser(prog, text)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend", action=_Backend, default="sglang", help=f"API: {', '.join(BACKENDS)}"
    )
    server.add_argument("--host", default="127.0.0.1", help="address of the server")
    server.add_argument("--port", type=int, metavar="N", help="30000, or the backend's usual port")
    server.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    server.add_argument(
        "--header", nargs="+", metavar="NAME=VALUE", help="headers of every request"
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0,
        metavar="S",
        help="wait so long until the server is ready",
    )
    server.add_argument("--model", metavar="NAME", help="asked from the server when unset")
    server.add_argument("--served-model-name", metavar="NAME", help="model of the requests")
    server.add_argument(
        "--tokenizer", metavar="FOLDER", help="counts tokens; --model or the server's when unset"
    )
    add_dataset_options(parser)
    _add_traffic(parser)
    _add_results(parser)
    refuse(parser, REFUSED_FLAGS)
    return parser


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="X",
        help="requests a second (Poisson); inf sends all at once",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="limit of concurrent requests"
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="rates that grow or fall"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="X", help="rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="rate at the end")
    group.add_argument(
        "--use-trace-timestamps", action="store_true", help="mooncake does so in any case"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="limits of a request, such as ttft:500 tpot:50 e2el:10000",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: all tokens")
    group.add_argument("--disable-stream", action="store_true", help="ask for whole answers")
    group.add_argument("--disable-ignore-eos", action="store_true", help="let answers end early")
    group.add_argument("--return-logprob", action="store_true", help="ask for log-probabilities")
    group.add_argument(
        "--extra-request-body", metavar="JSON", help="fields for every body: '{\"top_p\": 0.9}'"
    )
    group.add_argument("--lora-name", nargs="*", metavar="NAME", help="adapters to ask for")
    group.add_argument(
        "--lora-request-distribution",
        choices=("uniform", "distinct", "skewed"),
        default="uniform",
        help="which adapter a request takes: any, each in turn, or by Zipf's law",
    )
    group.add_argument("--lora-zipf-alpha", type=float, default=1.5, help="of skewed; above 1")
    group.add_argument("--warmup-requests", type=int, default=1, metavar="N", help="sent before")
    group.add_argument("--flush-cache", action="store_true", help="empty the prefix cache first")
    group.add_argument("--profile", action="store_true", help="profile the server meanwhile")
    add_profile_options(group)
    group.add_argument(
        "--pd-separated", action="store_true", help="the server is a router: take its workers' info"
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--output-file", metavar="FILE", help="append a line of JSON")
    group.add_argument("--output-details", action="store_true", help="with every request in it")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--plot", metavar="FILE", help="latencies, load, requests: .png or .html")
    group.add_argument("--cache-report", action="store_true", help="cached tokens (always shown)")
    group.add_argument("--tag", metavar="TEXT", help="a name for this run in the result")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def main(argv: Sequence[str]) -> int:
    """0, or 1 if a request failed."""
    args = build_parser().parse_args(argv)
    report.check_writable(args.output_file)
    check_plot(args.plot)
    if args.warmup_requests < 0:
        raise ConfigError(f"--warmup-requests {args.warmup_requests}: 0 or more")
    return int(uvloop.run(Run(args).run()))


class Run:
    """One benchmark, from its flags to its table."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.backend = BACKENDS[args.backend]
        port = args.port if args.port is not None else self.backend.port
        url = args.base_url or f"http://{local_host(args.host)}:{port}"
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        headers |= headers_of(args.header or ())
        self.client = HttpClient(url, headers)
        ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
        self.traffic = Traffic(args.request_rate, args.max_concurrency, args.seed, *ramp)
        self.options = dataset_options(args)
        if args.use_trace_timestamps and self.options.dataset_name != "mooncake":
            raise ConfigError("--use-trace-timestamps: only --dataset-name mooncake has times")
        self.limits = limits_ms(args.goodput)
        self.rows: list[Row] = []
        check_options(self.options, self.backend.takes_ids)
        self.extra = json_object(args.extra_request_body, "--extra-request-body")

    async def run(self) -> int:
        """The exit status."""
        try:
            return await self._run()
        finally:
            self.client.close()

    async def _run(self) -> int:
        await self.prepare()
        result, outcomes = await self.measure()
        self._report(result, outcomes)
        return int(result["failed"] > 0)

    async def prepare(self) -> None:
        """Ask the server's model, draw the prompts, send the warm-up."""
        await wait_ready(self.client, self.args.ready_check_timeout_sec)
        model = await self._model()
        self.tokenizer = await self._tokenizer(model)
        rows = load_rows(self.options, self.tokenizer, self.backend.takes_ids)
        self.rows = with_adapters(rows, self.args)
        self.requester = Requester(self.client, self.backend, self._request_options(model))
        await self._warm_up(self.requester, self.rows[0])

    async def measure(self) -> tuple[dict[str, Any], list[Outcome]]:
        """Send all prompts by the traffic's times: (figures, outcomes)."""
        args, rows, requester = self.args, self.rows, self.requester
        if args.flush_cache:
            await self._flush()
        if args.profile:
            await self._post("/start_profile", profile_body(args))
        progress = Progress(len(rows), not args.disable_tqdm)
        cpu_s = time.process_time()
        try:
            outcomes, duration_s = await run_load(rows, requester.ask, self.traffic, progress)
        finally:
            progress.close()
        cpu_s = time.process_time() - cpu_s
        if args.profile and not args.profile_num_steps:  # else it has ended by itself
            await self._post("/stop_profile", {})
        metrics.count_missing(outcomes, rows, self.tokenizer)
        result = self._arguments() | metrics.summarise(outcomes, duration_s)
        if self.limits:
            result |= goodput(outcomes, self.limits, duration_s)
        result |= metrics.retokenized(outcomes, self.tokenizer, duration_s)
        result["client_cpu_seconds"] = cpu_s  # if near the duration, the client is the bottleneck
        result["server_info"] = info = await self._server_info()
        states = info.get("internal_states") if isinstance(info, dict) else None
        if accept_len := states and states[0].get("avg_spec_accept_length"):
            result["accept_length"] = accept_len
        return result, outcomes

    def _request_options(self, model: str) -> RequestOptions:
        args = self.args
        return RequestOptions(
            model=args.served_model_name or model,
            is_stream=not args.disable_stream,
            ignore_eos=not args.disable_ignore_eos,
            return_logprob=args.return_logprob,
            temperature=args.temperature,
            top_p=args.top_p,
            extra=self.extra,
        )

    async def _model(self) -> str:
        """--model, or the first model that the server lists."""
        if self.args.model:
            return str(self.args.model)
        response = await self.client.ask("GET", "/v1/models")
        if response.status in (401, 403):
            raise ConfigError(f"the server answers {response.status}: give the right --api-key")
        models = (response.json() or {}).get("data") or []
        if not models:
            raise ConfigError(f"{self.client.base_url}/v1/models names no model; give --model")
        return str(models[0]["id"])

    async def _tokenizer(self, model: str) -> Tokenizer:
        """From --tokenizer, else from the model's name, else from the server's folder."""
        wanted = [self.args.tokenizer] if self.args.tokenizer else [model]
        if not self.args.tokenizer:
            info = (await self.client.ask("GET", "/get_model_info")).json()
            info = info if isinstance(info, dict) else {}
            wanted += [info.get("tokenizer_path"), info.get("model_path")]
        for name in wanted:
            if name:
                try:
                    return load_tokenizer(local_tokenizer(name, "--tokenizer"))
                except (ConfigError, TransferError):
                    continue
        raise ConfigError(f"no tokenizer of {wanted[0]!r} on this machine; give --tokenizer FOLDER")

    async def _warm_up(self, requester: Requester, row: Row) -> None:
        count = self.args.warmup_requests
        short = replace(row, num_output=min(row.num_output, _WARMUP_OUTPUT))
        outcomes = await asyncio.gather(*(requester.ask(short) for _ in range(count)))
        if outcomes and not any(outcome.is_ok for outcome in outcomes):
            raise TransferError(f"the warm-up failed: {outcomes[0].error}")

    async def _flush(self) -> None:
        for attempt in range(_FLUSH_TRIES):
            response = await self.client.ask("POST", "/flush_cache")
            if response.status == 200:
                return
            await asyncio.sleep(0.05 * (attempt + 1))
        raise TransferError(f"/flush_cache answers {response.status}: {_text(response.body)}")

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        response = await self.client.ask("POST", path, body)
        if response.status != 200:
            raise TransferError(f"{path} answers {response.status}: {_text(response.body)}")

    async def _server_info(self) -> Any:
        """/get_server_info, or None if the server has no such route. Behind a router
        (--pd-separated) that of its first decode worker."""
        try:
            response = await self.client.ask("GET", "/get_server_info")
        except TransferError:
            return None
        info = response.json() if response.status == 200 else None
        if self.args.pd_separated and isinstance(info, dict):
            return (info.get("decode") or [info])[0]
        return info

    def _arguments(self) -> dict[str, Any]:
        args, options = self.args, self.options
        rate = args.request_rate
        return {
            "tag": args.tag,
            "backend": args.backend,
            "dataset_name": options.dataset_name,
            "request_rate": rate if math.isfinite(rate) else "inf",
            "ramp_up_strategy": args.ramp_up_strategy,
            "max_concurrency": args.max_concurrency,
            "sharegpt_output_len": options.sharegpt_output_len,
            "random_input_len": options.random_input_len,
            "random_output_len": options.random_output_len,
            "random_range_ratio": options.random_range_ratio,
            "seed": options.seed,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }

    def _report(self, result: dict[str, Any], outcomes: list[Outcome]) -> None:
        args = self.args
        sys.stdout.write(
            json.dumps(result, indent=2) + "\n"
            if args.json
            else render(result, not args.disable_stream)
        )
        for error, count in _errors(outcomes):
            sys.stderr.write(f"{count} requests failed: {error}\n")
        if args.output_file:
            extra = metrics.details(outcomes) if args.output_details else {}
            report.append_jsonl(args.output_file, [result | extra])
        if args.plot:
            write_plot(args.plot, outcomes, f"{args.backend}, {result['dataset_name']}")


def with_adapters(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """The rows, each with an adapter of --lora-name (name, or name=path as a server takes it)."""
    names = [name.partition("=")[0] for name in args.lora_name or ()]
    if not names:
        return rows
    if args.lora_zipf_alpha <= 1:
        raise ConfigError(f"--lora-zipf-alpha {args.lora_zipf_alpha}: more than 1")
    draw = np.random.default_rng([args.seed, 1])
    kind = args.lora_request_distribution
    if kind == "distinct":
        chosen = [i % len(names) for i in range(len(rows))]
    else:
        weights = np.array([args.lora_zipf_alpha**-i for i in range(len(names))])
        share = weights / weights.sum() if kind == "skewed" else None
        chosen = draw.choice(len(names), len(rows), p=share).tolist()
    return [replace(row, adapter=names[i]) for row, i in zip(rows, chosen, strict=True)]


def render(result: dict[str, Any], is_stream: bool) -> str:
    limit = result["max_concurrency"]
    lines = [
        "",
        report.title(" Serving Benchmark Result "),
        report.line("Backend:", result["backend"]),
        report.line("Traffic request rate:", result["request_rate"]),
        report.line("Max request concurrency:", limit if limit is not None else "not set"),
        *report.totals(result),
    ]
    names = ("e2e_latency", "ttft", "tpot", "itl") if is_stream else ("e2e_latency",)
    lines += report.latencies(result, names)
    return "\n".join([*lines, report.title("")]) + "\n"


def local_host(host: str) -> str:
    """An address to connect to: 127.0.0.1 for 0.0.0.0, and IPv6 in brackets."""
    return "127.0.0.1" if host == "0.0.0.0" else url_host(host)


def _text(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")


def _errors(outcomes: list[Outcome]) -> list[tuple[str, int]]:
    """The five most frequent errors and their counts."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.is_ok:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:5]
