"""What a real engine records of its experts, against the routers' own choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.config.parallel import ParallelConfig
from radixlm.distributed.topology import Topology
from radixlm.engine.experts import ExpertPlaces
from tests.fakes.thread_groups import thread_ranks
from tests.fakes.tiny_checkpoint import cached_tiny

PROMPT = [5, 6, 7, 8, 9, 10, 11]
PARAMS = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADIXLM_EXPERT_RECORDER_DIR", str(tmp_path / "records"))
    return tmp_path / "records"


def record(
    folder: Path, mode: str | None, prompts: list[Any] = PROMPT, **options: Any
) -> Iterator[Any]:
    """The answer of each command around one request or several, then the file."""
    options |= {"max_total_tokens": 256, "expert_distribution_recorder_mode": mode}
    model = str(cached_tiny("Qwen3MoeForCausalLM"))
    with radixlm.Engine(model_path=model, cpu_threads=1, log_level="error", **options) as engine:
        ask = engine._engine.intake.control
        engine.generate(input_ids=[3, 4], sampling_params=PARAMS)  # before the record
        yield engine._wait(ask("start_expert_record"))
        engine.generate(input_ids=prompts, sampling_params=PARAMS)
        yield engine._wait(ask("stop_expert_record"))
        engine.generate(input_ids=[3, 4, 5], sampling_params=PARAMS)  # after it
        yield engine._wait(ask("expert_balance"))
        dumped = engine._wait(ask("dump_expert_record"))
        yield dumped
        assert dumped.ok, dumped
    (file,) = folder.glob("expert_distribution_recorder_*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    yield json.loads(file.read_text())


def test_modes_agree_and_count_every_token(folder: Path) -> None:
    *replies, detail = record(folder, "per_token")
    assert all(reply.ok for reply in replies)
    steps = detail["records"]
    assert [step["forward_mode"] for step in steps] == ["EXTEND", *["DECODE"] * 3]
    assert steps[0]["input_ids"] == PROMPT and steps[0]["extend_seq_lens"] == [len(PROMPT)]
    assert [step["positions"] for step in steps[1:]] == [[7], [8], [9]]
    experts = len(detail["last_physical_to_logical_map"][0])
    chosen = [np.array(step["topk_ids_of_layer"]) for step in steps]
    assert all(len(set(ids)) == len(ids) for step in chosen for layer in step for ids in layer)
    counts = [[np.bincount(layer.ravel(), minlength=experts) for layer in step] for step in chosen]
    for file in folder.iterdir():
        file.unlink()
    *_, stat = record(folder, "stat")
    found = np.array(stat["logical_count"])
    assert found.shape == np.array(counts).shape
    assert (found[:, :-1] == np.array(counts)[:, :-1]).all()
    # the last layer computes only the tokens whose logits are wanted
    assert (found[1:] == np.array(counts)[1:]).all() and found[0, -1].sum() < found[0, 0].sum()
    assert stat["average_utilization_rate_over_window"] == 1.0  # one rank


def test_stages_tell_what_their_layers_chose(folder: Path) -> None:
    *_, alone = record(folder, "per_token")
    for file in folder.iterdir():
        file.unlink()
    *_, staged = record(folder, "per_token", pp_size=2)
    assert staged == alone


@pytest.mark.parametrize("stages", [1, 2])
def test_attention_groups_tell_what_each_token_chose(folder: Path, stages: int) -> None:
    def chosen(**options: Any) -> list[Any]:
        """Token, position and the experts of each layer, of each token."""
        *_, detail = record(folder, "per_token", [PROMPT, [20, 21, 22], [30]], **options)
        for file in folder.iterdir():
            file.unlink()
        steps = detail["records"]
        assert all(sum(s["extend_seq_lens"]) == len(s["input_ids"]) for s in steps)
        assert all(len(s["input_ids"]) == len(ids) for s in steps for ids in s["topk_ids_of_layer"])
        return sorted(
            row
            for s in steps
            for row in zip(s["input_ids"], s["positions"], *s["topk_ids_of_layer"], strict=True)
        )

    groups = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "pp_size": stages}
    assert chosen(**groups) == chosen()


def test_a_pass_has_the_sum_of_its_tokens(folder: Path) -> None:
    *_, detail = record(folder, "per_pass", expert_distribution_recorder_buffer_size=2)
    assert [step["forward_pass_id"] for step in detail["records"]] == [3, 4]  # the last two
    top_k = 2
    assert all(sum(layer) == top_k for step in detail["records"] for layer in step["logical_count"])


def test_without_a_mode_the_routes_are_refused(folder: Path) -> None:
    replies = record(folder, None, enable_expert_distribution_metrics=True)
    started = next(replies)
    assert not started.ok and "--expert-distribution-recorder-mode; stat works" in started.message
    assert not next(replies).ok
    assert next(replies).data == {"10": 1.0, "100": 1.0, "1000": 1.0}


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="--expert-distribution-recorder-mode: the model has no"):
        radixlm.Engine(
            model_path=str(cached_tiny("LlamaForCausalLM")),
            log_level="error",
            expert_distribution_recorder_mode="stat",
        )


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--ep-num-redundant-experts", {"ep_num_redundant_experts": 2}),
        ("--init-expert-location", {"init_expert_location": "places.json"}),
    ],
)
def test_a_placement_for_a_model_without_experts_is_refused(
    flag: str, options: dict[str, Any]
) -> None:
    ranks = thread_ranks(Topology(tp=2))[0]
    with pytest.raises(ConfigError, match=f"{flag}: the model has no experts to place"):
        ExpertPlaces(ParallelConfig(tp_size=2, **options), ranks).place([], ranks)
    ExpertPlaces(ParallelConfig(tp_size=2), ranks).place([], ranks)


def test_flags_without_an_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    options = ParallelConfig(tp_size=2, ep_size=2, moe_dense_tp_size=1)
    for ranks in thread_ranks(Topology(tp=2, ep=2)):
        ExpertPlaces(options, ranks).place([], ranks)
    assert [record.getMessage() for record in caplog.records] == [
        "--ep-size 2 changes nothing: the model has no experts",
        "--moe-dense-tp-size 1 changes nothing: the model has no experts",
    ]


def test_groups_that_do_not_divide_among_nodes_are_refused_at_the_start() -> None:
    ranks = thread_ranks(Topology(tp=2))[0]
    options: dict[str, Any] = {
        "enable_eplb": True,
        "eplb_algorithm": "deepseek_hierarchical",
        "nnodes": 2,
    }
    layer: Any = SimpleNamespace(spec=SimpleNamespace(experts=4, groups=(1, 1)))
    with pytest.raises(ConfigError, match=r"1 groups .* auto works"):
        ExpertPlaces(ParallelConfig(tp_size=2, **options), ranks).place([layer], ranks)
