"""Hidden states in answers: the rows of the whole prompt are the first entry, and every decode step
is a row of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fakes.tiny_checkpoint import cached_tiny

import radixlm
from radixlm.entrypoints.native.response import hidden_rows, last_hidden
from radixlm.intake.records import Output

DIM = 64
PROMPT = list(range(5, 45))


def states_of(meta: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(entry) for entry in meta["hidden_states"]]


@pytest.mark.parametrize("chunk", [16, 2048])
def test_the_prompt_is_one_entry_and_each_step_another(chunk: int) -> None:
    with radixlm.Engine(
        model_path=str(cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)),
        skip_tokenizer_init=True, enable_return_hidden_states=True, chunked_prefill_size=chunk,
        max_total_tokens=512, max_running_requests=4, cpu_threads=1, log_level="warning",
    ) as engine:  # fmt: skip

        def ask(ids: list[int], count: int) -> dict[str, Any]:
            params = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
            made = engine.generate(input_ids=ids, sampling_params=params, return_hidden_states=True)
            return dict(made)

        made = ask(PROMPT, 4)
        states = states_of(made["meta_info"])
        assert [s.shape for s in states] == [(len(PROMPT), DIM), *[(DIM,)] * 3]
        again = states_of(ask(PROMPT + made["output_ids"], 1)["meta_info"])
        assert [s.shape for s in again] == [(len(PROMPT) + 4, DIM)]
        rows = np.concatenate([s.reshape(-1, DIM) for s in states])
        np.testing.assert_allclose(rows, again[0][: len(rows)], atol=2e-3)
        params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        *_, last = engine.generate(
            input_ids=PROMPT, sampling_params=params, return_hidden_states=True, stream=True
        )
        assert [s.shape for s in states_of(last["meta_info"])] == [s.shape for s in states]
        short = engine.generate(
            input_ids=[PROMPT, PROMPT],
            sampling_params=params,
            return_hidden_states=["last", False],
        )
        assert short[0]["meta_info"]["hidden_states"] == states[-1].tolist()
        assert "hidden_states" not in short[1]["meta_info"]


def test_only_the_newest_rows() -> None:
    """For streams of deltas, and for OpenAI's routes."""
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    parts = [rows[:3].tobytes(), rows[3:].tobytes()]
    first = Output(hidden_states=parts, prompt_tokens=5, completion_tokens=2)
    assert hidden_rows(first, 2) == [rows[:5].tolist(), rows[5].tolist()]
    later = Output(hidden_states=parts, prompt_tokens=5, completion_tokens=8)
    assert hidden_rows(later, 2) == rows.tolist()
    only_prompt = Output(hidden_states=parts[:1], prompt_tokens=3)
    assert hidden_rows(only_prompt, 2) == [rows[:3].tolist()]
    assert last_hidden(first, 2) == [10.0, 11.0]
