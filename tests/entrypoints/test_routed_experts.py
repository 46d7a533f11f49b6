"""``return_routed_experts``: which experts each token chose, in /generate and OpenAI's answers."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny

import radixlm
from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.entrypoints.answers import MetaInfo
from radixlm.entrypoints.http.openai.protocol import ChatRequest, CompletionRequest
from radixlm.entrypoints.http.openai.usage import extension
from radixlm.entrypoints.sequences import take_rows
from radixlm.intake.records import Output
from radixlm.models.decoder import DecoderModel

PROMPT = list(range(5, 45))
PROMPTS = [PROMPT, [9, 8, 7], [7, 8, 9, 10] * 5, [50]]
LAYERS = 3


def flags(arch: str = "Qwen3MoeForCausalLM", **options: Any) -> dict[str, Any]:
    return {
        "model_path": str(cached_tiny(arch, num_hidden_layers=LAYERS)),
        "skip_tokenizer_init": True, "enable_return_routed_experts": True, "max_total_tokens": 512,
        "max_running_requests": 4, "cpu_threads": 1, "log_level": "warning", **options,
    }  # fmt: skip


def engine(arch: str = "Qwen3MoeForCausalLM", **options: Any) -> radixlm.Engine:
    return radixlm.Engine(**flags(arch, **options))


def ask(engine: radixlm.Engine, ids: list[int], count: int, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    fields = {"return_routed_experts": True, **fields}
    return dict(engine.generate(input_ids=ids, sampling_params=params, **fields))


def rows(meta: dict[str, Any], top_k: int) -> np.ndarray[Any, Any]:
    data = base64.b64decode(meta["routed_experts"])
    return np.frombuffer(data, np.int32).reshape(-1, LAYERS, top_k)


@pytest.mark.parametrize("chunk", [16, 2048])
def test_every_token_but_the_last_has_its_experts(chunk: int) -> None:
    with engine(chunked_prefill_size=chunk, enable_return_hidden_states=True) as made:
        moe = made.info.decoder.blocks[0].ffn
        ask(made, PROMPT, 1, return_routed_experts=False)  # its prefix is cached
        answer = ask(made, PROMPT, 4)
        found = rows(answer["meta_info"], moe.top_k)
        assert len(found) == len(PROMPT) + 3
        assert 0 <= found.min() and found.max() < moe.experts
        assert all(len(set(row)) == moe.top_k for row in found.reshape(-1, moe.top_k).tolist())
        again = rows(ask(made, PROMPT + answer["output_ids"], 1)["meta_info"], moe.top_k)
        assert (again[: len(found)] == found).all()
        later = ask(made, PROMPT, 4, routed_experts_start_len=30, return_hidden_states=True)
        assert (rows(later["meta_info"], moe.top_k) == found[30:]).all()
        states = later["meta_info"]["hidden_states"]
        assert np.shape(states[0]) == (len(PROMPT), made.info.decoder.dim) and len(states) == 4
        params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        *_, last = made.generate(
            input_ids=PROMPT, sampling_params=params, return_routed_experts=True, stream=True
        )
        assert (rows(last["meta_info"], moe.top_k) == found).all()
        assert set(ask(made, PROMPT, 1)["meta_info"]) <= set(MetaInfo.__annotations__)
        with pytest.raises(InvalidRequest, match="routed_experts_start_len: 41"):
            ask(made, PROMPT, 1, routed_experts_start_len=41)


def test_drafts_that_are_refused_have_no_experts() -> None:
    loop = [7, 8, 9, 10] * 10
    with engine() as made:
        plain = ask(made, loop, 12)
    with engine(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4) as made:
        drafted = ask(made, loop, 12)
        top_k = made.info.decoder.blocks[0].ffn.top_k
    assert drafted["output_ids"] == plain["output_ids"]
    first, second = (rows(one["meta_info"], top_k) for one in (plain, drafted))
    assert len(second) == len(loop) + 11 and (first == second).all()


def test_layers_without_experts_have_zeros() -> None:
    with engine("DeepseekV2ForCausalLM") as made:
        blocks = made.info.decoder.blocks
        layers = made.info.expert_layers
        dense = [n for n in range(len(blocks)) if n not in layers]
        found = rows(ask(made, PROMPT, 2)["meta_info"], blocks[layers[0]].ffn.top_k)
    assert dense and not found[:, dense].any() and found[:, list(layers)].any()


RECORDS = {
    "enable_expert_distribution_metrics": True,
    "expert_distribution_recorder_mode": "per_token",
}
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
EPLB = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "eplb_rebalance_num_iterations": 3}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
COMPANY: dict[str, dict[str, Any]] = {
    "a recorder": RECORDS,
    "experts that move": {**EPLB, "ep_num_redundant_experts": 2, **RECORDS},
    "stages": {"pp_size": 2, "chunked_prefill_size": 16, **RECORDS},
    "stages and drafts": {"pp_size": 2, **DRAFTS},
    "groups": {**GROUPS, "chunked_prefill_size": 16, **DRAFTS},
    "stages of groups": {**GROUPS, "pp_size": 2, **RECORDS},
}


def crowd(made: radixlm.Engine) -> list[Any]:
    """What a few requests are told together, of which one does not ask."""

    async def all_of() -> list[Any]:
        params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        asks = [made.async_generate(input_ids=ids, sampling_params=params,
                return_routed_experts=n != 1) for n, ids in enumerate(PROMPTS)]  # fmt: skip
        return await asyncio.gather(*asks)

    answers = asyncio.run(all_of())
    assert "routed_experts" not in answers[1]["meta_info"]
    return [(one["output_ids"], one["meta_info"].get("routed_experts")) for one in answers]


@pytest.mark.parametrize("shared", [False, True], ids=["layers", "program"])
@pytest.mark.parametrize("company", COMPANY)
def test_in_any_company_requests_are_told_the_same(
    company: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's first layer is dense."""
    arch = "DeepseekV3ForCausalLM" if "stages" in company else "Qwen3MoeForCausalLM"
    if not shared:
        monkeypatch.setattr(DecoderModel, "_program_for", lambda self, batch: None)
    with engine(arch) as made:
        wanted = crowd(made)
    with thread_engine(monkeypatch, shared, **flags(arch, **COMPANY[company])) as made:
        if "expert_distribution_recorder_mode" in COMPANY[company]:
            for verb in ("start_expert_record", "stop_expert_record"):  # layers keep on telling
                assert made._wait(made._engine.intake.control(verb)).ok
        assert crowd(made) == wanted


def test_choices_of_a_step_before_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that nobody asks about runs by layers, the next as a program."""
    with engine() as made:
        wanted = ask(made, PROMPT, 3)["meta_info"]["routed_experts"]
    with engine() as made:
        with monkeypatch.context() as patch:
            patch.setattr(DecoderModel, "_program_for", lambda self, batch: None)
            ask(made, PROMPT[::-1], 1, return_routed_experts=False)
        assert ask(made, PROMPT, 3)["meta_info"]["routed_experts"] == wanted


def test_models_without_experts_and_servers_without_the_flag_say_so() -> None:
    with pytest.raises(ConfigError, match="no experts that can be told"):
        engine("Qwen3ForCausalLM")
    with (
        radixlm.Engine(log_level="error") as made,
        pytest.raises(InvalidRequest, match="needs --enable-return-routed-experts"),
    ):
        ask(made, [1, 2], 1)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_openai_answers_have_them_in_sglext(kind: Any) -> None:
    def body(**fields: Any) -> Any:
        return kind(messages=[], prompt="", **fields)

    first, last = Output(routed_experts=[b"ab", b"c"]), Output(routed_experts=[b"d"])
    take_rows(last, first)
    later = Output()
    take_rows(later, last)
    wanted = base64.b64encode(b"abcd").decode()
    shown = extension(body(return_routed_experts=True), [later, Output()])
    assert shown == {"sglext": {"routed_experts": wanted}}
    assert extension(body(), [later]) == {}
