"""`radixlm bench serve` against the real HTTP server over a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench.backends import BACKENDS, RequestOptions
from radixlm.bench.cli import main
from radixlm.bench.client import HttpClient
from radixlm.bench.datasets import Row
from radixlm.bench.one_batch import Shape
from radixlm.bench.one_batch_server import Batch, measure, started_at
from radixlm.bench.one_batch_server import build_parser as build_one_batch_parser
from radixlm.bench.one_batch_server import render as one_batch_table
from radixlm.bench.serve import Run, build_parser
from radixlm.bench.sweep import Search, _sweep
from radixlm.bench.sweep import build_parser as build_sweep_parser

SMALL = "--num-prompts 6 --random-input-len 12 --random-output-len 4 --random-range-ratio 1".split()


@pytest_asyncio.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with scripted_server(tmp_path, {"forever": "la "}, api_key="secret") as made:
        async for address in serve(made):
            yield address


async def serve(made: ScriptedServer) -> AsyncIterator[str]:
    config = uvicorn.Config(made.app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


async def bench(url: str, *flags: str) -> int:
    key = () if "--api-key" in flags else ("--api-key", "secret")
    args = build_parser().parse_args(["--base-url", url, "--disable-tqdm", *key, *SMALL, *flags])
    return await Run(args).run()


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
@pytest.mark.parametrize("extra", [(), ("--disable-stream",)], ids=["stream", "whole"])
async def test_each_api_counts_the_same(url, backend, extra, tmp_path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    flags = ("--backend", backend, "--output-file", str(out), "--output-details", *extra)
    assert await bench(url, *flags, "--max-concurrency", "2") == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 24)
    assert result["backend"] == backend and result["max_concurrency"] == 2
    assert result["server_info"]["status"] == "ready"
    assert len(result["generated_texts"]) == 6 and all(result["generated_texts"])
    assert 0 < result["median_ttft_ms"] <= result["max_e2e_latency_ms"]
    assert result["concurrency"] <= 2.05
    if not extra:
        assert all(len(itls) <= 3 for itls in result["itls"])
    shown = capsys.readouterr().out
    assert "Successful requests:                     6" in shown
    assert ("Mean TTFT (ms):" in shown) == (not extra)


async def test_ids_warm_up_flush_and_a_plot(url, tmp_path, capsys) -> None:
    plot = tmp_path / "p.html"
    flags = "--dataset-name random-ids --flush-cache --warmup-requests 2 --json --plot".split()
    assert await bench(url, *flags, str(plot)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["total_input_tokens"], result["dataset_name"]) == (72, "random-ids")
    assert "<svg" in plot.read_text()


async def test_headers_sampling_and_the_wait_for_a_server(url, capsys) -> None:
    key = ("--api-key", "wrong", "--header", "Authorization=Bearer secret")
    flags = ("--ready-check-timeout-sec", "5", "--temperature", "0.5", "--top-p", "0.9")
    assert await bench(url, *key, *flags) == 0
    with pytest.raises(TransferError, match=r"http://127\.0\.0\.1:1 is not ready after 0\.01 s"):
        await bench("http://127.0.0.1:1", "--ready-check-timeout-sec", "0.01")
    body = BACKENDS["sglang-oai"].body(Row("a", None, 1, 2), RequestOptions("m", top_p=0.9))
    assert (body["temperature"], body["top_p"]) == (0.0, 0.9)


async def test_failures_are_counted_and_named(url, capsys) -> None:
    body = '{"sampling_params": {"top_p": 7}}'
    flags = ("--warmup-requests", "0", "--extra-request-body", body)
    assert await bench(url, *flags) == 1
    caught = capsys.readouterr()
    assert "Failed requests:                         6" in caught.out
    assert "6 requests failed: status 400" in caught.err and "top_p" in caught.err


async def test_a_warm_up_that_fails_ends_the_run(url) -> None:
    with pytest.raises(TransferError, match=r"warm-up failed.*top_p"):
        await bench(url, "--extra-request-body", '{"sampling_params": {"top_p": 7}}')


async def test_a_wrong_key_is_named(url) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        await bench(url, "--api-key", "wrong")


async def test_a_missing_tokenizer_is_named(url) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        await bench(url, "--tokenizer", "/nowhere/at-all")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--backend other", "--backend"),
        ("--nonsense", "--nonsense"),
        ("--num-prompts many", "--num-prompts"),
        ("--request-rate 0", "--request-rate"),
        ("--extra-request-body [1]", "--extra-request-body"),
        ("--plot p.gif", "--plot"),
        ("--dataset-name sharegpt", "--dataset-path"),
        ("--warmup-requests -1", "--warmup-requests"),
        ("--output-file /nowhere/x", "--output-file"),
        ("--base-url x", "--base-url"),
    ],
)
def test_bad_flags_exit_with_2_and_are_named(flags: str, text: str, capsys) -> None:
    assert main(["serve", *flags.split()]) == 2
    assert text in capsys.readouterr().err


def test_no_server_exits_with_1(capsys) -> None:
    assert main(["serve", "--base-url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


async def test_goodput_a_trace_and_a_ramp(url, tmp_path, capsys) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 20 * i, "hash_ids": [i], "output_length": 3} for i in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--dataset-name", "mooncake", "--dataset-path", str(trace), "--json"]
    assert await bench(url, *flags, "--goodput", "e2el:60000") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 3 and result["total_output_tokens"] == 9
    assert result["slo_attainment"] == 1.0 and result["duration"] >= 0.04
    ramp = (
        "--ramp-up-strategy",
        "linear",
        "--ramp-up-start-rps",
        "500",
        "--ramp-up-end-rps",
        "900",
    )
    assert await bench(url, *ramp) == 0


def test_the_started_server_listens_where_its_options_say() -> None:
    parser = build_one_batch_parser()
    url, options = started_at(["--host", "0.0.0.0", "--port", "31234"], parser)
    assert url == "http://127.0.0.1:31234" and options[-2:] == ["--port", "31234"]
    url, options = started_at(["--host", "::1"], parser)
    assert url == f"http://[::1]:{options[-1]}"
    with pytest.raises(ConfigError, match="--tp-size"):
        started_at(["--tp-sise", "2"], parser)


def test_a_model_beside_the_url_of_a_server_has_no_effect(capsys) -> None:
    words = "one-batch-server --base-url http://127.0.0.1:1 --model None --tp-size 2".split()
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "--model-path has no effect: the server of --base-url runs already" in told
    assert "--tp-size has no effect" in told and "no server answers" in told
    assert main([*words, "--tp-sise", "2"]) == 2


async def test_one_batch_through_the_server(url, tmp_path) -> None:
    client = HttpClient(url, {"Authorization": "Bearer secret"})
    batch = Batch(0.0, False, 1, 0.5, 1)
    assert batch.lengths(Shape(3, 8, 4)) == [4, 8, 12]
    found = await measure(client, batch, Shape(3, 8, 4), 100)
    client.close()
    assert 0 < found["ttft"] <= found["latency"]
    assert found["overall_throughput"] * found["latency"] == pytest.approx(24 + 12)
    assert "out tok/s" in one_batch_table([found])


async def test_the_sweep_measures_each_rate(url, capsys, monkeypatch, tmp_path) -> None:
    flushed: list[bool] = []
    measure = Run.measure

    async def noted(run: Run) -> Any:
        flushed.append(run.args.flush_cache)
        return await measure(run)

    monkeypatch.setattr(Run, "measure", noted)
    flags = [
        "--base-url",
        url,
        "--api-key",
        "secret",
        "--disable-tqdm",
        *SMALL,
        "--start-rate",
        "200",
    ]
    file = tmp_path / "runs.jsonl"
    flags += ["--highest-rate", "400", "--goodput", "e2el:60000", "--output-file", str(file)]
    args = build_sweep_parser().parse_args(flags)
    assert await _sweep(args, Search(200.0, 400.0)) == 0
    told = capsys.readouterr()
    assert "Highest rate within: 400 req/s" in told.out
    rates = [line.partition(":")[0] for line in told.err.splitlines()]
    assert rates == ["200 req/s", "400 req/s"]  # each when it was measured
    kept = [json.loads(line)["request_rate"] for line in file.read_text().splitlines()]
    assert kept == [200.0, 400.0]
    assert flushed == [True, True]  # the runs repeat their prompts
