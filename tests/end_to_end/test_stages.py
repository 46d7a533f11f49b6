"""Real servers of two pipeline stages: the bits of one rank, and the death of a stage."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from radixlm import Engine
from tests.end_to_end.server import RunningServer
from tests.end_to_end.test_ranks import BODIES, FLAGS, MODEL, ask, rank_process, shown
from tests.fakes.tiny_checkpoint import cached_tiny

STATES = str(cached_tiny("NemotronHForCausalLM"))


def answers(model: str, **options: Any) -> list[Any]:
    """One request after another, then all at once."""
    with Engine(model_path=model, cpu_threads=1, max_total_tokens=4096, **options) as engine:
        alone = [shown(engine.generate(**one)) for one in BODIES]

        async def together() -> list[Any]:
            return await asyncio.gather(*(engine.async_generate(**one) for one in BODIES))

        return alone + [shown(answer) for answer in asyncio.run(together())]


@pytest.mark.parametrize(
    ("model", "options", "same"),
    [
        # stages alone run in the test below too, states in threads in distributed/test_pairs.py
        pytest.param(MODEL, {"pp_size": 2}, {}, marks=pytest.mark.slow),
        (MODEL, {"pp_size": 2, "tp_size": 2}, {}),
        (
            MODEL,
            {"pp_size": 2, "max_micro_batch_size": 1, "speculative_algorithm": "NGRAM"},
            {"chunked_prefill_size": 16, "kv_cache_dtype": "int8"},
        ),
        pytest.param(STATES, {"pp_size": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=["stages", "stages of two ranks", "micro batches, drafts, 8 bits", "recurrent"],
)
def test_stages_give_the_bits_of_one_rank(
    model: str, options: dict[str, Any], same: dict[str, Any]
) -> None:
    """Tokens and log-probabilities, of prompts too."""
    assert answers(model, **options, **same) == answers(model, **same)


async def test_streams_outlive_the_death_of_a_stage() -> None:
    wanted = (await asyncio.to_thread(answers, MODEL))[: len(BODIES)]
    with RunningServer("--pp-size", "2", *FLAGS, model=MODEL) as server:
        before = server.engines()
        assert len(before) == 2
        server.post("/slow_down", forward_sleep_time=0.1)
        running = asyncio.create_task(ask(server, BODIES))
        await server.until_running(1)
        os.kill(rank_process(server, 1).pid, signal.SIGKILL)
        assert await running == wanted
        assert not psutil.wait_procs(before, 5)[1], "a rank has outlived its replica"
