"""A profile of a real engine contains the steps of a request."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import radixlm
from radixlm.base.errors import InvalidRequest
from tests.fakes.tiny_checkpoint import cached_tiny


def test_the_steps_of_a_request_are_traced(tmp_path: Path) -> None:
    folder = cached_tiny("LlamaForCausalLM")
    with radixlm.Engine(
        model_path=str(folder), cpu_threads=1, log_level="error", max_total_tokens=256,
        num_continuous_decode_steps=1,
    ) as engine:  # fmt: skip
        params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        started = engine.start_profile(output_dir=str(tmp_path), num_steps=3, with_stack=False)
        assert started == {"output_dir": str(tmp_path)}
        engine.generate(input_ids=[5, 6, 7], sampling_params=params)
        with pytest.raises(InvalidRequest, match="no profile"):
            engine.stop_profile()
        with pytest.raises(InvalidRequest, match="expert"):
            engine.start_expert_distribution_record()
    (file,) = tmp_path.glob("*-TP-0.trace.json.gz")
    with gzip.open(file) as stream:
        names = [event.get("name") for event in json.load(stream)["traceEvents"]]
    # three of six steps: each gathers the pages of its sequences once, and the first
    # also picks the last row of the prompt
    assert 3 <= names.count("aten::index_select") < 6
