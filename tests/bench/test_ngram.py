"""The benchmark of NGRAM: the answers are the given ones, and drafts of a copy save steps."""

from __future__ import annotations

import numpy as np
import pytest
from tests.bench.scripts import bench_module

from radixlm.bench.cli import run
from radixlm.bench.one_batch import Shape, with_room
from radixlm.config.parser import parse
from radixlm.engine.model_info import resolved

ngram = bench_module("ngram")


def test_a_copied_answer_takes_fewer_steps() -> None:
    config, given = parse(["--speculative-algorithm", "NGRAM", "--cpu-threads", "1"], prog="x")
    bench = ngram.Scripted(*resolved(*with_room(config, given, [Shape(2, 64, 40)])), 1)
    text = np.random.default_rng(3).integers(3, 2000, 40, np.int32)
    bench.replica.scheduler.drafting.lengths.always = True
    assert bench.decode([(text, text), (text[::-1], text[:20])], drafts=False)[1] == 39
    assert bench.decode([(text, text), (text[::-1], text[:20])], drafts=True)[1] < 25


def test_a_run_tells_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kind", "none", "--batch", "2", "--answer", "6", "--rounds", "1"]
    assert run("bench/ngram.py", ngram.main, [*words, "--cpu-threads", "1"]) == 0
    assert "none 2: median " in capsys.readouterr().out
