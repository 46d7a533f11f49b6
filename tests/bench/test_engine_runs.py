"""`radixlm bench offline` and `one-batch` on the bundled model."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.base.errors import ConfigError
from radixlm.bench.cli import main
from radixlm.bench.one_batch import Batch, Shape, with_room
from radixlm.config.parser import parse
from radixlm.config.server_config import ServerConfig
from radixlm.engine.assemble import assemble
from radixlm.engine.model_info import resolved
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.replies import StepReply


@pytest.fixture
def server_flags() -> list[str]:
    return ["--max-total-tokens", "2048", "--cpu-threads", "1"]


def test_offline_counts_requests_and_tokens(server_flags, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    lengths = "--num-prompts 5 --random-input-len 20 --random-output-len 6 --random-range-ratio 1"
    flags = [*lengths.split(), "--max-concurrency", "2", "--result-filename", str(out)]
    assert main(["offline", *flags, "--dataset-name", "random-ids", *server_flags]) == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (5, 0, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (100, 30)
    assert result["total_cached_tokens"] == 0  # the warm-up's prefix cache was flushed
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert not any("ttft" in key or "itl" in key for key in result)
    assert "Output token throughput" in capsys.readouterr().out


def test_offline_reports_failed_requests(server_flags, capsys) -> None:
    flags = "--num-prompts 2 --random-input-len 9 --random-output-len 4 --skip-warmup".split()
    extra = ["--extra-request-body", '{"top_p": 7}']
    assert main(["offline", *flags, *extra, "--json", *server_flags]) == 1
    caught = capsys.readouterr()
    assert json.loads(caught.out)["failed"] == 2 and "top_p" in caught.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--nonsense 1", "--nonsense"),
        ("--page-size -1", "--page-size"),
        ("--model-path /nowhere", "/nowhere"),
        ("--skip-tokenizer-init", "--skip-tokenizer-init"),
        ("--num-prompts 0", "--num-prompts"),
        ("--dataset-name sharegpt", "--dataset-path"),
    ],
)
def test_offline_refuses_before_a_model_is_loaded(flags: str, text: str, capsys) -> None:
    assert main(["offline", *flags.split()]) == 2
    assert text in capsys.readouterr().err


def test_one_batch_measures_every_shape(server_flags, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    flags = "--batch-size 1 4 --input-len 8 40 --output-len 1 5 --repeat 2 --result-filename"
    assert main(["one-batch", *flags.split(), str(out), *server_flags]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shapes = [(row["batch_size"], row["input_len"], row["output_len"]) for row in rows]
    assert shapes == [(b, i, o) for b in (1, 4) for i in (8, 40) for o in (1, 5)]
    for row in rows:
        tokens = row["batch_size"] * (row["input_len"] + row["output_len"])
        assert row["overall_throughput"] == pytest.approx(tokens / row["total_latency"])
        assert (row["median_decode_latency"] is None) == (row["output_len"] == 1)
    assert "4 x 40 + 5" in capsys.readouterr().out


def test_one_batch_compares_a_drafter_with_none(server_flags, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    flags = "--batch-size 1 2 --input-len 16 --output-len 40 --speculative-algorithm NGRAM".split()
    assert main(["one-batch", *flags, *server_flags, "--output-file", str(out)]) == 0
    for row in map(json.loads, out.read_text().splitlines()):
        assert row["accept_length"] >= 1
        assert row["speedup"] > 0
        expected = row["batch_size"] * row["accept_length"] / row["median_decode_latency"]
        assert row["median_decode_throughput"] == pytest.approx(expected)
    assert "accept len  speed-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--batch-size 0", "--batch-size 0"),
        ("--input-len 9000", "context"),
        ("--batch-size 8 --input-len 200 --output-len 60 --max-total-tokens 512", "one batch"),
        ("--batch-size 4 --input-len 8 --max-running-requests 2", "one batch"),
        ("--dp-size 2", "--dp-size 2"),
        ("--warm-restart", "--warm-restart"),
    ],
)
def test_one_batch_refuses_shapes_that_do_not_fit(server_flags, flags, text, capsys) -> None:
    own = server_flags[2:] if "--max-total-tokens" in flags else server_flags
    assert main(["one-batch", *flags.split(), *own]) == 2
    assert text in capsys.readouterr().err


def tokens_of_a_batch(flags: str, shape: Shape) -> tuple[int, dict[str, list[int]]]:
    """How many other ranks compute a batch, and its tokens."""
    model = f"--model-path {cached_tiny('Qwen3MoeForCausalLM')} --cpu-threads 1"
    words = [*model.split(), "--max-total-tokens", "2048", "--skip-tokenizer-init", *flags.split()]
    config, given = with_room(*parse(words, "test"), [shape])
    found: dict[str, list[int]] = defaultdict(list)
    before = set(psutil.Process().children())
    with contextlib.closing(Batch(*resolved(config, given), 1, given)) as bench:
        receive = bench._mine.receive

        def kept(timeout_s: float) -> list[object]:
            replies = receive(timeout_s)
            for reply in [one for one in replies if isinstance(one, StepReply)]:
                for rid, token in zip(reply.rids, reply.tokens, strict=True):
                    found[rid].append(token)
                for delta in reply.deltas:
                    found[delta.rid] += delta.tokens
            return replies

        bench._mine.receive = kept  # type: ignore[method-assign]
        prefill_s, decodes_s = bench.run(shape)
        others = set(psutil.Process().children()) - before
    assert prefill_s > 0 and len(decodes_s) == shape.output_len - 1
    assert not any(other.is_running() for other in others)
    return len(others), found


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--pp-size 2", 1),
        ("--tp-size 2 --ep-size 2 --dp-size 2 --enable-dp-attention", 1),
    ],
)
def test_one_batch_on_several_ranks_has_the_tokens_of_one(flags: str, count: int) -> None:
    shape = Shape(5, 150, 6)
    assert tokens_of_a_batch(flags, shape) == (count, tokens_of_a_batch("", shape)[1])


def test_an_engine_without_its_ranks_is_refused() -> None:
    config, info = resolved(*parse(["--tp-size", "2"], "test"))
    with pytest.raises(ConfigError, match="--tp-size"):
        assemble(config, info, MemoryChannel.pair()[1])


def test_limits_of_the_user_are_kept() -> None:
    shapes = [Shape(4, 100, 8), Shape(2, 3000, 8)]
    config, given = with_room(ServerConfig(), frozenset(), shapes)
    assert config.schedule.chunked_prefill_size == 6000
    assert config.schedule.max_running_requests == 4 and "max_running_requests" in given
    mine = ServerConfig().with_values({"chunked_prefill_size": 64})
    config, _ = with_room(mine, frozenset({"chunked_prefill_size"}), shapes)
    assert config.schedule.chunked_prefill_size == 64
