"""Engines with data-parallel attention give the bits of one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixlm import Engine
from tests.end_to_end.test_ranks import BODIES, shown
from tests.fakes.tiny_checkpoint import cached_tiny

TWO_GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


def answers(model: str, **options: Any) -> list[Any]:
    """Of each request alone, beside a group without work, then of all at once."""
    sizes = {"max_total_tokens": 4096, "cpu_threads": 1, "log_level": "warning"}
    # the end of the engine ends what the threads wait for
    with ThreadPoolExecutor(8) as threads, Engine(model_path=model, **sizes, **options) as engine:
        alone = [shown(engine.generate(**body)) for body in BODIES[:3]]
        assert engine.flush_cache()
        together = list(threads.map(lambda body: shown(engine.generate(**body)), BODIES))
        info = engine.get_server_info()
        assert info["internal_states"][0]["num_breaches"] == 0
    return [alone, together]


@pytest.mark.parametrize(
    "options",
    [
        # what is exchanged for the head of all comes with stages too
        pytest.param({}, marks=pytest.mark.slow),
        {"enable_dp_lm_head": True},
        {"pp_size": 2},
    ],
)
def test_two_groups_give_the_bits_of_one_rank(options: dict[str, Any]) -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    assert answers(model, **TWO_GROUPS, **options) == answers(model)
