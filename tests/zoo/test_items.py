"""The items that `radixlm eval bundled` asks are those that zoo/items.py writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import items
import pytest
import torch
from data import evaluation
from evaluate import direct, forced

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from radixlm.evals.bundled import ITEMS
from radixlm.evals.cli import main
from radixlm.evals.items import read_rows


def test_the_written_items_are_the_held_out_ones() -> None:
    assert read_rows(ITEMS) == list(items.rows(20))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_eval_in_process_agrees_with_plain_torch(tmp_path: Path) -> None:
    """Each item of two tasks, graded by zoo/evaluate.py on its own decoder, and without one."""
    kept = tmp_path / "kept.jsonl"
    args = ["bundled", "--group", "count,sort", "--details", str(kept), "--json"]
    args += ["--output-file", str(tmp_path / "out.jsonl"), "--dtype", "float32"]
    assert main([*args, "--max-total-tokens", "8192", "--cpu-threads", "1"]) == 0
    found = [bool(json.loads(line)["score"]) for line in kept.read_text().splitlines()]
    torch.set_num_threads(1)
    conversations = [evaluation(task, i) for task in ("sort", "count") for i in range(20)]
    want = direct(ASSETS / DEFAULT_MODEL, conversations, False, torch.float32)
    assert 20 < sum(want) < 40
    assert want == found == forced(ASSETS / DEFAULT_MODEL, conversations, dtype=torch.float32)
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert result["accuracy"] == pytest.approx(sum(found) / 40)
    assert math.isclose(result["groups"]["sort"]["accuracy"], sum(found[:20]) / 20)
