"""`radixlm bench one-batch-server`: one static batch through a server's /generate.

Without --base-url a server is started with the other options (`radixlm serve --help`) and ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import orjson
import uvloop
from tqdm import tqdm

from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench import report
from radixlm.bench.client import HttpClient
from radixlm.bench.one_batch import Shape
from radixlm.bench.options import add_shape_options, positive, refuse
from radixlm.bench.serve import local_host
from radixlm.config.parser import parse
from radixlm.config.verb_parser import VerbParser

_START_S = 1800.0


def build_parser() -> VerbParser:
    """The flags of this verb."""
    parser = VerbParser(
        "radixlm bench one-batch-server",
        "Latency of one static batch through a server.",
        usage="radixlm bench one-batch-server [--base-url URL] [options] [server options]",
    )
    add_shape_options(parser)
    parser.add_argument("--base-url", default="", metavar="URL", help="of a running server")
    parser.add_argument("--api-key", metavar="KEY", help="of the server")
    parser.add_argument("--run-name", default="default", metavar="TEXT", help="name in the result")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--return-logprob", action="store_true", help="ask for log-probabilities")
    parser.add_argument(
        "--client-stream-interval", type=int, default=1, metavar="N", help="tokens of an event"
    )
    parser.add_argument(
        "--input-len-step-percentage", type=float, default=0.0, metavar="R",
        help="lengths from (1 - R) to (1 + R) times --input-len over the batch",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts")
    parser.add_argument("--skip-warmup", action="store_true", help="measure the first batch too")
    parser.add_argument("--show-report", action="store_true", help="print the table (always done)")
    parser.add_argument(
        "--result-filename", "--output-file", metavar="FILE", help="append a line of JSON a shape"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    profile = "run `radixlm profile --url URL` beside it"
    names = ("--profile", "--profile-steps", "--profile-by-stage")
    refuse(parser, dict.fromkeys(names, profile))
    refuse(parser, {"--dataset-path": "the prompts are drawn ids; `radixlm bench serve` has texts"})
    return parser


@dataclass(frozen=True, slots=True)
class Batch:
    """What is asked of each shape."""

    temperature: float
    return_logprob: bool
    stream_interval: int
    step: float
    seed: int

    def lengths(self, shape: Shape) -> list[int]:
        """Tokens of each prompt."""
        spread = np.linspace(1 - self.step, 1 + self.step, shape.batch_size)
        return [max(1, round(shape.input_len * float(x))) for x in spread]

    def body(self, shape: Shape, ordinary: int) -> dict[str, Any]:
        """The request. `ordinary`: token ids from 0 that may be drawn."""
        draw = np.random.default_rng(self.seed)
        sampling = {
            "temperature": self.temperature,
            "max_new_tokens": shape.output_len,
            "ignore_eos": True,
            "stream_interval": self.stream_interval,
        }
        ids = [draw.integers(0, ordinary, n).tolist() for n in self.lengths(shape)]
        return {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": self.return_logprob,
            "stream": True,
        }


def main(argv: Sequence[str]) -> int:
    """0 after all shapes are measured."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    shapes = [Shape(*s) for s in product(args.batch_size, args.input_len, args.output_len)]
    for name in ("batch_size", "input_len", "output_len"):
        positive(getattr(args, name), f"--{name.replace('_', '-')}")
    positive([args.client_stream_interval], "--client-stream-interval")
    if not 0 <= args.input_len_step_percentage < 1:
        raise ConfigError("--input-len-step-percentage: 0 or more, below 1")
    report.check_writable(args.result_filename, "--result-filename")
    if args.base_url and rest:  # SGLang's own examples name a model beside the URL
        for name in sorted(parse(rest, parser.prog, parser._option_string_actions)[1]):
            flag = name.replace("_", "-")
            sys.stderr.write(f"--{flag} has no effect: the server of --base-url runs already\n")
        rest = []
    if not args.base_url:
        rest += ["--api-key", args.api_key] if args.api_key else []
        args.base_url, rest = started_at(rest, parser)
    results = uvloop.run(_run(args, rest, shapes))
    if args.result_filename:
        report.append_jsonl(args.result_filename, results)
    text = "".join(json.dumps(one) + "\n" for one in results) if args.json else render(results)
    sys.stdout.write(text)
    return 0


async def _run(
    args: argparse.Namespace, rest: Sequence[str], shapes: Sequence[Shape]
) -> list[dict[str, Any]]:
    """A result for each shape."""
    batch = Batch(
        args.temperature,
        args.return_logprob,
        args.client_stream_interval,
        args.input_len_step_percentage,
        args.seed,
    )
    async with _server(args.base_url, args.api_key, rest) as client:
        info = (await client.ask("GET", "/get_model_info")).json() or {}
        ordinary = max(2, int(info.get("vocab_size") or 1024) // 2)
        if not args.skip_warmup:
            await measure(client, batch, Shape(shapes[0].batch_size, 16, 4), ordinary)
        return [
            {"run_name": args.run_name, **await measure(client, batch, shape, ordinary)}
            for shape in tqdm(shapes, unit="shape", disable=None)
        ]


def started_at(rest: Sequence[str], parser: VerbParser) -> tuple[str, list[str]]:
    """(URL, options) of the server to start: at --host, and at a free port unless --port says
    which. ConfigError for wrong options."""
    config, given = parse(rest, parser.prog, parser._option_string_actions)
    port = config.serve.port if "port" in given else 0
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    return f"http://{local_host(config.serve.host)}:{port}", [*rest, "--port", str(port)]


@contextlib.asynccontextmanager
async def _server(
    url: str, api_key: str | None, options: Sequence[str]
) -> AsyncIterator[HttpClient]:
    """A client of the server at `url`: a running one, or with `options` one that is started and
    ended here."""
    process = None
    if options:
        command = [sys.executable, "-m", "radixlm", "serve", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = HttpClient(url, {"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        until_s = time.monotonic() + _START_S
        while process is not None and not await _is_ready(client):
            if process.poll() is not None:
                raise ConfigError("the server ended before it was ready (see its messages above)")
            if time.monotonic() > until_s:
                raise TransferError(f"the server was not ready within {_START_S:.0f} s")
        yield client
    finally:
        client.close()
        if process is not None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


async def _is_ready(client: HttpClient) -> bool:
    try:
        if (await client.ask("GET", "/health")).status == 200:
            return True
    except TransferError:
        pass
    time.sleep(0.2)  # nothing else runs in this loop
    return False


async def measure(client: HttpClient, batch: Batch, shape: Shape, ordinary: int) -> dict[str, Any]:
    """Figures of one batch, its prefix cache empty: seconds and tokens a second. `ttft`: until the
    last request of the batch has its first token."""
    await client.ask("POST", "/flush_cache")
    body = batch.body(shape, ordinary)
    seen: dict[int, int] = {}
    first_s = 0.0
    errors: list[str] = []
    start_s = time.perf_counter()

    def on_event(data: bytes, now_s: float) -> None:
        nonlocal first_s
        if data == b"[DONE]":
            return
        answer = orjson.loads(data)
        if "error" in answer:
            errors.append(str(answer["error"]))
            return
        index = int(answer.get("index") or 0)
        if index not in seen:
            first_s = now_s - start_s
        seen[index] = answer["meta_info"]["completion_tokens"]

    response = await client.ask("POST", "/generate", body, on_event)
    latency_s = time.perf_counter() - start_s
    if response.status != 200 or errors or len(seen) != shape.batch_size:
        text = errors[0] if errors else response.body[:300].decode("utf-8", "replace")
        raise TransferError(f"/generate answers {response.status}: {text}")
    num_input, num_output = sum(batch.lengths(shape)), sum(seen.values())
    info = (await client.ask("GET", "/get_server_info")).json() or {}
    state = (info.get("internal_states") or [{}])[0]
    decode_s = latency_s - first_s
    return {
        "batch_size": shape.batch_size,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "latency": latency_s,
        "ttft": first_s,
        "input_throughput": num_input / first_s,
        "output_throughput": num_output / decode_s if shape.output_len > 1 else None,
        "overall_throughput": (num_input + num_output) / latency_s,
        "last_gen_throughput": state.get("last_gen_throughput"),
        "acc_length": state.get("avg_spec_accept_length") or None,
    }


def render(results: Sequence[dict[str, Any]]) -> str:
    names: tuple[str, ...] = ("batch_size", "input_len", "output_len", "latency", "ttft")
    names += ("input_throughput", "output_throughput", "overall_throughput", "acc_length")
    heads = ("batch", "input", "output", "latency s", "ttft s", "in tok/s", "out tok/s", "tok/s")
    rows = [
        [f"{v:.3g}" if isinstance(v := one[n], float) and n in ("latency", "ttft") else
         f"{v:.1f}" if isinstance(v, float) else "-" if v is None else v for n in names]
        for one in results
    ]  # fmt: skip
    return report.table((*heads, "accepted"), rows) + "\n"
