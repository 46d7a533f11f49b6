"""The memory benchmark at toy size: it runs and compares figures with goals."""

import json

import pytest
from tests.bench.scripts import bench_module

host_memory = bench_module("host_memory")


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_each_figure_is_a_duration(page_size, eviction):
    for run, options, num_times in [
        (host_memory.long_prompt, {"num_tokens": 800}, 1),
        (host_memory.shared_prefix, {"num_requests": 3, "num_tokens": 82}, 3),
        (host_memory.evict_half, {"num_tokens": 4000, "num_leaves": 10}, 1),
    ]:
        watch = host_memory.Stopwatch()
        assert run(watch, page_size, eviction, **options) == num_times
        assert watch.wall_ms > 0 and watch.cpu_ms > 0


def test_table_json_and_exit_status(monkeypatch, capsys):
    rows = [("fast", 1.0, 2.0, 1.0, 5.0), ("slow", 6.0, 7.0, 5.5, 5.0)]
    figures = [host_memory.Figure(*row) for row in rows]
    monkeypatch.setattr(host_memory, "measure", lambda *_: figures)
    assert host_memory.main(["--page-size", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["figures"]
    assert [(row["name"], row["is_met"]) for row in rows] == [("fast", True), ("slow", False)]
    assert host_memory.main(["--page-size", "1", "--strict"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("met") and lines[2].endswith("MISSED")
