"""Engines of two ranks that share the experts: copies, placements and moves change no token."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from radixlm import Engine
from radixlm.base.errors import ConfigError
from tests.end_to_end.server import RunningServer
from tests.end_to_end.test_ranks import BODIES, FLAGS, outlive, shown
from tests.fakes.tiny_checkpoint import cached_tiny

MODEL = str(cached_tiny("Qwen3MoeForCausalLM"))
LAYERS, EXPERTS = 3, 8
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [20] * 30]
PARAMS = [
    {"temperature": temperature, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1}
    for temperature in (0.0, 0.8, 0.0)
]


def start(**options: Any) -> Engine:
    options = {"max_total_tokens": 1024, "log_level": "error", "cpu_threads": 1} | options
    return Engine(model_path=MODEL, **options)


def answers(engine: Engine) -> list[Any]:
    """Twice, the second time from the prefix cache."""
    got = [
        one
        for _ in range(2)
        for one in engine.generate(
            input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True, logprob_start_len=0
        )
    ]
    return [
        (one["output_ids"], *(one["meta_info"][f"{kind}_token_logprobs"] for kind in KINDS))
        for one in got
    ]


KINDS = ("input", "output")


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    with start() as engine:
        return answers(engine)


@pytest.mark.parametrize("stages", [1, 2])
def test_rebalancing_while_serving_changes_no_bit(
    wanted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.setenv("RADIXLM_EXPERT_RECORDER_DIR", str(tmp_path))
    with start(
        tp_size=2,
        pp_size=stages,
        ep_size=2,
        enable_eplb=True,
        ep_num_redundant_experts=2,
        ep_dispatch_algorithm="dynamic",
        eplb_rebalance_num_iterations=3,
        eplb_rebalance_layers_per_chunk=1,
        expert_distribution_recorder_mode="per_pass",
    ) as engine:
        engine.start_expert_distribution_record()
        assert answers(engine) == wanted
        engine.stop_expert_distribution_record()
        engine.dump_expert_distribution_record()
        assert answers(engine) == wanted
    (file,) = tmp_path.iterdir()
    placement = json.loads(file.read_text())["last_physical_to_logical_map"]
    assert [len(row) for row in placement] == [EXPERTS + 2] * LAYERS
    assert [*range(8), 0, 1] not in placement, "experts of all layers have moved"


def test_a_given_placement_changes_no_bit(wanted: list[Any]) -> None:
    rows = [[7, 0, 3, 2, 1, 3, 4, 5, 6, 3], [1, 1, 0, 2, 3, 0, 7, 6, 5, 4], [*range(8), 2, 2]]
    location = json.dumps({"physical_to_logical_map": rows})
    with start(tp_size=2, ep_num_redundant_experts=2, init_expert_location=location) as engine:
        assert answers(engine) == wanted


def test_fake_dispatch_draws_the_experts(wanted: list[Any]) -> None:
    with start(tp_size=2, ep_dispatch_algorithm="fake") as engine:
        assert answers(engine) != wanted


def test_places_of_experts_change_nothing_on_one_rank(wanted: list[Any]) -> None:
    location = json.dumps({"physical_to_logical_map": [[*range(8), 3]] * LAYERS})
    options = {"ep_num_redundant_experts": 1, "init_expert_location": location}
    with start(**options, ep_dispatch_algorithm="dynamic") as engine:
        assert answers(engine) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 2, "ep_num_redundant_experts": 1}, "9 experts do not divide among 2 ranks; 2"),
        ({"tp_size": 2, "init_expert_location": "{}"}, "expected a key 'physical_to_logical_map'"),
        ({"enable_eplb": True}, "--enable-eplb needs ranks to move experts between: --tp-size 2"),
        ({"tp_size": 2, "ep_size": 3}, "--ep-size 3 "),
        (
            {
                "tp_size": 2,
                "enable_eplb": True,
                "eplb_rebalance_num_iterations": 5,
                "expert_distribution_recorder_buffer_size": 6,
            },
            "must not exceed --eplb-rebalance-num-iterations 5",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


async def test_a_rank_may_die_while_experts_move() -> None:
    """Every step rebalances; the streams go on with the same tokens."""
    with start() as engine:
        wanted = [shown(engine.generate(**one)) for one in BODIES]
    eplb = ("--enable-eplb", "--ep-num-redundant-experts", "2")
    flags = (*eplb, "--eplb-rebalance-num-iterations", "1", "--tp-size", "2", *FLAGS)
    with RunningServer(*flags, model=MODEL) as server:
        for rank in (1, 0):
            await outlive(server, rank, signal.SIGKILL, wanted)
        assert server.terminate() == 0
