"""Data-parallel attention in a replica of threads: the bits of one rank, layer by layer and by step
programs, which exchange through shared memory."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_draft_models import Rounds
from tests.fakes.cut_model import CutModel
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.models.test_mtp_families import with_block

from radixlm.base.errors import ConfigError
from radixlm.distributed.topology import Topology
from radixlm.models.decoder import DecoderModel
from radixlm.step.batch import ForwardBatch

SIZES = {"max_total_tokens": 4096, "cpu_threads": 1, "log_level": "warning"}
TWO_GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


def body(seed: int) -> dict[str, Any]:
    """Greedy or seeded, with penalties, some with the log-probabilities of the prompt."""
    rng = random.Random(seed)
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))]
    sampling: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 0.9, "sampling_seed": seed, "frequency_penalty": 0.3}
    fields = {"return_logprob": True, "logprob_start_len": 0} if seed % 3 == 0 else {}
    if seed == 4:
        fields = {"return_hidden_states": True}
    return {"input_ids": ids, "sampling_params": sampling, **fields}


BODIES = [body(seed) for seed in range(7)]


def shown(answer: dict[str, Any]) -> Any:
    names = ("input_token_logprobs", "output_token_logprobs", "hidden_states")
    return answer["output_ids"], [answer["meta_info"].get(name) for name in names]


def answers(monkeypatch: pytest.MonkeyPatch, shared: bool = False, **options: Any) -> list[Any]:
    """Of requests alone, beside a group without work, then of all at once. ``shared``: by step
    programs, which round experts and states otherwise than layers."""
    find, programs = DecoderModel._program_for, set[bool]()

    def found(self: DecoderModel, batch: ForwardBatch) -> Any:
        program = find(self, batch) if shared else None
        programs.add(program is not None)
        return program

    monkeypatch.setattr(DecoderModel, "_program_for", found)
    options |= {"enable_return_hidden_states": True, **SIZES}
    with (
        ThreadPoolExecutor(len(BODIES)) as threads,
        thread_engine(monkeypatch, shared, **options) as engine,
    ):
        alone = [shown(engine.generate(**one)) for one in BODIES[:3]]
        assert engine.flush_cache()
        together = list(threads.map(lambda one: shown(engine.generate(**one)), BODIES))
        info = engine.get_server_info()["internal_states"][0]
        assert info["num_breaches"] == 0
        assert len(info["memory_usage"].get("ranks", [0])) == options.get("tp_size", 1)
    assert programs == {shared}
    return [alone, together]


OWN_HEAD: dict[str, Any] = {"enable_dp_lm_head": True}


# a head of its own comes after all layers, however these run: half of the four always
@pytest.mark.parametrize(
    ("head", "shared"),
    [
        pytest.param({}, False, id="head of all-layers"),
        pytest.param({}, True, id="head of all-program", marks=pytest.mark.slow),
        pytest.param(OWN_HEAD, False, id="own head-layers", marks=pytest.mark.slow),
        pytest.param(OWN_HEAD, True, id="own head-program"),
    ],
)
@pytest.mark.parametrize(
    ("arch", "tp"),
    [
        ("Qwen3ForCausalLM", 2),
        ("Qwen3ForCausalLM", 4),  # a group shares its heads, all share the feed-forward layers
        ("Gemma3ForCausalLM", 2),
        ("Qwen3MoeForCausalLM", 2),
        ("DeepseekV3ForCausalLM", 2),
        ("Qwen3NextForCausalLM", 2),
    ],
)
def test_two_groups_give_the_bits_of_one_rank(
    arch: str, tp: int, head: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"model_path": str(cached_tiny(arch))}
    alone = answers(monkeypatch, shared, **model)
    options = {**model, **TWO_GROUPS, "tp_size": tp, **head}
    assert answers(monkeypatch, shared, **options) == alone


def test_drafts_of_the_groups_are_verified_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"model_path": "radix-tiny", "speculative_algorithm": "NGRAM"}
    assert answers(monkeypatch, **model, **TWO_GROUPS) == answers(monkeypatch, **model)


@pytest.mark.parametrize(
    ("algorithm", "shared"),
    [
        ("EAGLE3", True),
        pytest.param("STANDALONE", False, marks=pytest.mark.slow),
        pytest.param("NEXTN", True, marks=pytest.mark.slow),
        pytest.param("NEXTN", False, marks=pytest.mark.slow),
    ],
)
def test_one_drafter_drafts_for_all_groups(
    algorithm: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, and about as many drafts are accepted as on one rank: which steps chunks
    share depends on the time of arrival."""
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", Rounds)
    model = "radix-tiny"
    if algorithm == "NEXTN":
        model = str(with_block("MiMoV2FlashForCausalLM", tmp_path / "model")[0])
    options = {"model_path": model, "speculative_algorithm": algorithm, "speculative_num_steps": 3}
    found, accepted = [], []
    for more in ({}, TWO_GROUPS):
        Rounds.seen.clear()
        found.append(answers(monkeypatch, shared, **options | more))
        accepted.append(sum(count for _, count in Rounds.seen))
    assert found[0] == found[1]
    assert accepted[1] > 0.6 * accepted[0] or algorithm == "NEXTN"
    assert accepted[0] > 0 or algorithm == "NEXTN"


def test_models_without_groups_are_refused() -> None:
    """An encoder: no rank knows the others' tokens there."""
    with pytest.raises(ConfigError, match=r"an encoder has no KV cache .* --dp-size alone works"):
        CutModel(cached_tiny("BertModel"), Topology(tp=2, attn_dp=2))
