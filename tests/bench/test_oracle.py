"""The benchmark of a head whose drafts an oracle makes right."""

from __future__ import annotations

import numpy as np
from tests.bench.scripts import bench_module

from radixlm.bench.one_batch import Shape, with_room
from radixlm.config.parser import parse
from radixlm.engine.model_info import resolved

oracle = bench_module("oracle")


def test_as_many_drafts_are_right_as_asked() -> None:
    words = ["--speculative-algorithm", "EAGLE3", "--cpu-threads", "1"]
    bench = oracle.Oracle(*resolved(*with_room(*parse(words, prog="x"), [Shape(2, 64, 40)])), 1)
    ids = np.random.default_rng(3).integers(3, 2000, (2, 80), np.int32)
    pairs, drafting = [(one[:40], one[40:]) for one in ids], bench.replica.scheduler.drafting
    drafting.lengths.always = True
    assert bench.decode(pairs, drafts=False)[1] == 39
    for alpha, most in ((1.0, 8), (0.5, 36), (0.0, 39)):
        bench.alpha = alpha
        assert most / 2 < bench.decode(pairs, drafts=True)[1] <= most
