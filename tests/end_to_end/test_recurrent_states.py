"""Recurrent layers in an engine: retraction, chunks and prefix hits do not change a request's
tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radixlm
from radixlm.base.errors import ConfigError
from tests.fakes.tiny_checkpoint import cached_tiny

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
LENGTHS = (50, 33, 17, 64, 5, 90)

SETTINGS: dict[str, dict[str, Any]] = {
    "several": {},
    "retracted": {"max_total_tokens": 256, "chunked_prefill_size": 32},
    "unshared": {"disable_radix_cache": True},
    "few states": {"max_mamba_cache_size": 9},
}


def _engine(**options: Any) -> radixlm.Engine:
    options = {"chunked_prefill_size": 2048, "max_total_tokens": 8192, **options}
    folder = str(cached_tiny("Qwen3NextForCausalLM"))
    return radixlm.Engine(
        model_path=folder, cpu_threads=1, random_seed=1, log_level="error", **options
    )


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with _engine() as engine:
        return [
            engine.generate(input_ids=p, sampling_params=GREEDY)["output_ids"] for p in _prompts()
        ]


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_those_of_a_single_request(name: str, alone: list[list[int]]) -> None:
    """All at once; then each again with half of its output as prompt."""
    prompts = _prompts()
    with _engine(**SETTINGS[name]) as engine:
        first = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        longer = [p + ids[:20] for p, ids in zip(prompts, alone, strict=True)]
        second = engine.generate(input_ids=longer, sampling_params={**GREEDY, "max_new_tokens": 20})
    assert [one["output_ids"] for one in first] == alone
    assert [one["output_ids"] for one in second] == [ids[20:] for ids in alone]
    if name == "retracted":
        assert sum(one["meta_info"]["num_retractions"] for one in first) > 0
    if name == "several":  # from the snapshot at the prompt's last full page
        cached = [one["meta_info"]["cached_tokens"] for one in second]
        assert cached == [n // 16 * 16 for n in LENGTHS]


def test_a_chat_continues_from_the_last_snapshot(alone: list[list[int]]) -> None:
    prompt = _prompts()[0]
    with _engine() as engine:
        engine.generate(input_ids=prompt, sampling_params=GREEDY)
        turn = engine.generate(input_ids=prompt + alone[0] + [7, 8, 9], sampling_params=GREEDY)
    assert turn["meta_info"]["cached_tokens"] == (len(prompt) + 39) // 16 * 16


def test_states_that_do_not_fit_are_refused_by_their_flag() -> None:
    with pytest.raises(ConfigError, match="--max-mamba-cache-size"):
        _engine(max_mamba_cache_size=2)
