"""The comparison with other engines: values, ratios, tables and ceilings; its driver against a
scripted server and a scripted worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.conftest import Scripted
from tests.bench.scripts import bench_module

from radixlm.base.errors import ConfigError, TransferError

workload, results, model, engines, drive, machine = (
    bench_module(f"peers.{name}")
    for name in ("workload", "results", "model", "engines", "drive", "machine")
)
growth, script = bench_module("growth"), bench_module("cpu_peers")

SIZE = model.ModelSize(440_401_920, 32_768_000, 28, 16, 8, 128)
CEILINGS = machine.Ceilings(23.5, {32: 302.0, 16: 302.0, 8: 1210.0})


def test_prompts_share_the_prefix_of_the_case_and_are_otherwise_new() -> None:
    prompts, case = workload.Prompts(3), workload.CASES["shared16"]
    first, second = prompts.of(case), prompts.of(case)
    assert [len(ids) for ids in first] == [1056] * 16
    assert len({tuple(ids[:1024]) for ids in first}) == 1
    assert len({tuple(ids[1024:]) for ids in first}) == 16
    assert first[0][:1024] != second[0][:1024]
    assert workload.Prompts(3).of(case) == first


def test_the_value_of_each_kind_of_case() -> None:
    figure, cases = workload.value_of, workload.CASES
    assert figure(cases["decode"], workload.Timed(0, 1, 3, 128)) == 127 / 2
    assert figure(cases["prefill512"], workload.Timed(1, 3, 9, 1)) == 256
    assert figure(cases["batch16"], workload.Timed(1, 2, 5, 1024)) == 256
    assert figure(cases["shared16"], workload.Timed(1, 2, 5, 512)) == 4
    with pytest.raises(ValueError, match="127 tokens came instead of 128"):
        figure(cases["decode"], workload.Timed(0, 1, 3, 127))


def test_predictions_for_a_known_machine() -> None:
    predict, cases = model.predict, workload.CASES
    for bits, weights_alone in ((16, 24.8), (8, 49.7), (4, 96.3)):
        assert 23.5e9 / model.step_bytes(SIZE, bits, 0) == pytest.approx(weights_alone, rel=0.01)
        tok_s = predict(cases["decode"], SIZE, bits, CEILINGS)
        assert 0.88 * weights_alone < tok_s < weights_alone  # plus the KV of 192 tokens
    assert predict(cases["prefill512"], SIZE, 16, CEILINGS) == pytest.approx(323, rel=0.03)
    assert predict(cases["prefill512"], SIZE, 8, CEILINGS) > 3 * 323
    shared_s = predict(cases["shared16"], SIZE, 16, CEILINGS)
    assert 4 < shared_s < 9  # the prefix once, then 31 steps
    apart = workload.Case("apart", 16, 1056, 32, "total")
    assert predict(apart, SIZE, 16, CEILINGS) > 5 * shared_s


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 4000), st.integers(0, 4000))
def test_a_prompt_in_two_parts_costs_the_same(first: int, second: int) -> None:
    whole = sum(model.prefill_ops(SIZE, first + second))
    parts = sum(model.prefill_ops(SIZE, first)) + sum(model.prefill_ops(SIZE, second, first))
    assert parts == pytest.approx(whole)


def test_the_size_is_read_from_a_config(tmp_path: Path) -> None:
    config = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
              "vocab_size": 32000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model.read_size(tmp_path) == SIZE
    assert SIZE.kv_bytes == 28 * 2 * 8 * 128 * 2


def samples(**values: list[float]) -> list[Any]:
    return [
        results.Sample(name.replace("_", "."), 16, "decode", value, foreign=0.01 * at)
        for name, found in values.items()
        for at, value in enumerate(found)
    ]


def test_medians_against_the_best_peer() -> None:
    [line] = results.summarise(
        samples(radixlm=[30, 10, 20], llama_cpp=[16, 18], openvino=[9]), {("decode", 16): 25.0}
    )
    assert line.values == {"radixlm": 20, "llama.cpp": 17, "openvino": 9}
    assert line.best_peer == "llama.cpp"
    assert line.ratio == pytest.approx(20 / 17)
    assert line.is_met is False  # the goal is 1.2
    assert line.share == pytest.approx(0.8)
    assert line.most_foreign == pytest.approx(0.02)


def test_the_best_peer_has_the_smallest_duration() -> None:
    found = [
        results.Sample(name, 8, case, value)
        for case, values in ((results.START, (2, 4, 3)), ("shared16", (2, 80, 16)))
        for name, value in zip(("radixlm", "a", "b"), values, strict=True)
    ]
    shared, start = results.summarise(found)
    assert (shared.best_peer, shared.ratio, shared.is_met) == ("b", 8, True)
    assert (start.best_peer, start.ratio, start.is_met) == ("b", 1.5, True)


def test_one_side_alone_has_no_ratio() -> None:
    [ours] = results.summarise(samples(radixlm=[5]))
    [theirs] = results.summarise(samples(openvino=[5]))
    assert ours.ratio is theirs.ratio is ours.is_met is None
    assert theirs.best_peer == "openvino"
    assert "| 5 | - | - | 1.2 |" in results.markdown([ours])


def test_every_cell_of_the_table() -> None:
    lines = results.summarise(
        [*samples(radixlm=[30], llama_cpp=[20]), results.Sample("radixlm", 8, "decode", 41.04)]
    )
    wide, narrow = results.markdown(lines).split("\n\n")
    assert "| decode, 1 stream, tok/s | 30 | 20 | llama.cpp | **1.50** | 1.2 |" in wide
    assert "| decode, 1 stream, tok/s | 41 | - | - | - | 1.5 |" in narrow
    widths = {row.count("|") for row in wide.splitlines()}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (1234.5, "1,234"), (99.96, "100"), (2.345, "2.35")]
)
def test_numbers(value: float | None, shown: str) -> None:
    assert results.number(value) == shown


def test_the_svg_has_a_bar_for_each_value() -> None:
    lines = results.summarise(samples(radixlm=[30], llama_cpp=[20], **{"a<b": [10]}))
    tree = ElementTree.fromstring(results.drawing(lines))
    texts = ["".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"30 tok/s", "20 tok/s", "10 tok/s", "a<b", "decode, 1 stream, 16 bit"} <= set(texts)
    widths = [float(rect.get("width", "")) for rect in list(tree)[-7:-1] if rect.get("y")
              and rect.tag.endswith("rect")]  # fmt: skip
    assert widths == pytest.approx([520, 520 * 2 / 3, 520 / 3], abs=0.1)
    assert ElementTree.fromstring(results.drawing([])) is not None


def test_missing_engines_are_reported_and_skipped(tmp_path: Path) -> None:
    setup = engines.Setup(tmp_path / "model", tmp_path, 2)
    one = engines.parse_given("mine:16:serve --port {port} 'a b'")
    found, missing = engines.find(["radixlm", "llama.cpp", "openvino"], [one], setup, 16)
    assert [engine.name for engine in found] == ["radixlm", "mine"]
    assert found[1].command == ("serve", "--port", "{port}", "a b")
    assert ["llama-cpp-python" in missing[0], "openvino-genai" in missing[1]] == [True, True]
    for name in ("src/lcpp-build/bin/llama-server", "models/q3-Q4_0.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    [server], missing = engines.find(["llama.cpp"], [], setup, 4)
    assert server.command[2].endswith("q3-Q4_0.gguf") and not missing
    assert "llama-quantize" in engines.find(["llama.cpp"], [], setup, 8)[1][0]
    for bad in ("mine", "mine:16", "mine:16:serve", "mine:5:serve {port}", ":16:serve {port}"):
        with pytest.raises(ConfigError, match="NAME:16"):
            engines.parse_given(bad)


def test_every_other_round_is_reversed(tmp_path: Path) -> None:
    a, b = (engines.Engine(name, ("x",)) for name in "ab")
    cases = workload.chosen(["decode", "batch16"])
    plan = script.Plan({16: [a, b], 8: [a]}, cases, 2, 1, 2, 2, 0.0, 0.1, 1.0, 1, tmp_path)
    order = [(number, bits, engine.name) for number, bits, engine in plan.visits()]
    assert order == [(0, 16, "a"), (0, 16, "b"), (0, 8, "a"), (1, 16, "b"), (1, 16, "a"),
                     (1, 8, "a")]  # fmt: skip
    assert [case.name for case in plan.cases_of(0)] == ["decode", "decode", "batch16"]
    assert [case.name for case in plan.cases_of(1)] == ["decode", "decode"]


def test_cpu_use_of_other_processes() -> None:
    before, after = machine.CpuUse(100, 10, 1, 50), machine.CpuUse(118, 20, 2, 60)
    assert machine.disturbance(before, after) == machine.Disturbance(0.8, 0.1)
    assert machine.disturbance(before, machine.CpuUse(105, 20, 1, 60)).foreign == 0
    assert machine.status_kb("VmPeak:\t 9 kB\nVmHWM:\t  1234 kB\n", "VmHWM") == 1234
    assert machine.peak_rss_mb(2**22 + 1) == 0


EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":""}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
WORKER = """
import json, sys, time
print("loading")
for line in sys.stdin:
    job = json.loads(line)
    now = time.perf_counter()
    count = len(job["prompts"]) * job["num_output"]
    print(json.dumps({"first_s": now, "end_s": now + 1, "num_tokens": count}), flush=True)
"""


async def test_a_server_is_timed_by_its_events(scripted: Scripted, tmp_path: Path) -> None:
    scripted.script = lambda head, body: [STREAM, *EVENTS, None]
    engine = engines.Engine("x", (sys.executable, "-c", "import time; time.sleep(60)"))
    running = drive.Running(engine, 1, tmp_path / "log", 60.0)
    running._client = drive.HttpClient(scripted.url)
    async with running:
        timed = await running.generate([[5, 6], [7, 8]], 3)
        assert running.start_s > 0
    assert timed.num_tokens == 6
    assert timed.start_s < timed.first_s <= timed.end_s
    bodies = [json.loads(body) for _, body in scripted.seen[-2:]]
    assert [body["prompt"] for body in bodies] == [[5, 6], [7, 8]]
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in bodies)


async def test_a_refusal_ends_the_start_at_once(scripted: Scripted, tmp_path: Path) -> None:
    answer = b'{"error":{"message":"no such model"}}'
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(answer)
    scripted.script = lambda _, body: [head + answer]
    engine = engines.Engine("x", (sys.executable, "-c", "import time; time.sleep(60)"))
    running = drive.Running(engine, 1, tmp_path / "log", 60.0)
    running._client = drive.HttpClient(scripted.url)
    with pytest.raises(TransferError, match=r"x did not start: status 404: no such model"):
        async with running:
            pass


async def test_a_worker_is_timed_by_its_own_clock(tmp_path: Path) -> None:
    engine = engines.Engine("w", (sys.executable, "-c", WORKER), is_http=False)
    async with drive.Running(engine, 1, tmp_path / "log", 60.0) as running:
        timed = await running.generate([[1, 2], [3]], 5)
    assert timed.num_tokens == 10
    assert timed.end_s == pytest.approx(timed.first_s + 1)
    gone = engines.Engine("w", (sys.executable, "-c", "raise SystemExit('bad folder')"), False)
    with pytest.raises(TransferError, match="bad folder"):
        async with drive.Running(gone, 1, tmp_path / "log", 60.0):
            pass


def test_growth_reads_results_of_one_batch() -> None:
    lines = [
        {"batch_size": batch, "input_len": 128, "output_len": 9, "prefill_latency": 0.5,
         "median_decode_latency": 0.05} for batch in (1, 64)
    ]  # fmt: skip
    text = "noise\n" + "".join(json.dumps(line) + "\n" for line in lines)
    sweep = growth.Sweep(16, 2, (1, 64), (128,))
    one, many = growth.points(text, SIZE, sweep, CEILINGS)
    assert (one.prefill_ms, one.decode_ms) == (500, 50)
    assert one.decode_allowed_ms == pytest.approx(40.9, rel=0.02)
    # limited by arithmetic, not by reading
    assert many.decode_allowed_ms > 4 * one.decode_allowed_ms
    assert many.prefill_allowed_ms == pytest.approx(64 * one.prefill_allowed_ms)
    table = growth.markdown([one, many])
    assert table.startswith("16 bit, 2 threads, 28 layers\n") and "| 64 x 128 | 500 |" in table


def test_growth_sweeps_cover_threads_widths_and_sizes(tmp_path: Path) -> None:
    sweeps = growth.full([8], [1, 2], [1, 4], [128, 512], None)
    assert [(s.threads, s.batches, s.contexts) for s in sweeps] == [
        (1, (1,), (128, 512)), (1, (4,), (64,)), (2, (1,), (128, 512)), (2, (4,), (64,)),
    ]  # fmt: skip
    few = growth.quick(2)
    assert {sweep.bits for sweep in few} == {16, 8, 4} and {s.threads for s in few} == {1, 2}
    long = [sweep for sweep in few if max(sweep.contexts) > 4096]
    assert long and all(sweep.layers for sweep in long)
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 9, "layer_types": ["a", "b", "a"], "max_position_embeddings": 50}'
    )
    cut = json.loads((growth.described(tmp_path, 70, 2, tmp_path) / "config.json").read_text())
    assert cut["num_hidden_layers"] == 2 and cut["max_position_embeddings"] == 70
    assert cut["layer_types"] == ["a", "b"]


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    for options, word in (
        ([*home, "--bits", "3"], "--bits '3'"),
        ([*home, "--cases", "nope"], "--cases 'nope'"),
        ([*home, "--peers", "nope"], "--peers 'nope'"),
        ([*home, "--peers", "llama.cpp"], "no engine to run"),
    ):
        assert script.main([*options, "--out", str(tmp_path / "out")]) == 2
        assert word in capsys.readouterr().err
