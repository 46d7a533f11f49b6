"""The memory benchmark at toy size: it runs, and it tells met goals from missed ones."""

import json

import pytest

from radixlm.bench import host_memory
from radixlm.bench.host_memory import (
    Figure,
    Stopwatch,
    evict_half,
    long_prompt,
    main,
    shared_prefix,
)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_each_figure_is_a_duration(page_size, eviction):
    for run, options, num_times in [
        (long_prompt, {"num_tokens": 800}, 1),
        (shared_prefix, {"num_requests": 3, "num_tokens": 82}, 3),
        (evict_half, {"num_tokens": 4000, "num_leaves": 10}, 1),
    ]:
        watch = Stopwatch()
        assert run(watch, page_size, eviction, **options) == num_times
        assert watch.wall_ms > 0 and watch.cpu_ms > 0


def test_table_json_and_exit_status(monkeypatch, capsys):
    figures = [Figure("fast", 1.0, 2.0, 1.0, 5.0), Figure("slow", 6.0, 7.0, 5.5, 5.0)]
    monkeypatch.setattr(host_memory, "measure", lambda *_: figures)
    assert main(["--page-size", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["figures"]
    assert [(row["name"], row["is_met"]) for row in rows] == [("fast", True), ("slow", False)]
    assert main(["--page-size", "1", "--strict"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("met") and lines[2].endswith("MISSED")
