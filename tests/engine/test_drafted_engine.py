"""Whole engines with drafters of every quality: answers are those of the engine without one, in
text, token ids, log-probabilities, hidden states and reasons to end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import radixlm
from radixlm.base.errors import RadixError
from tests.engine.drafted_engine import SAMPLING, drafted_engine, follower
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny

TEXTS = ("The capital of France is", "Q: 12 + 30 = ?\nA:", "Once upon a time, in a small house")
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "string"}}}'
FIELDS = ("text", "output_ids", "hidden_states")
META = ("finish_reason", "output_token_logprobs", "output_top_logprobs", "completion_tokens")


def ask(engine: radixlm.Engine, prompts: list[list[int]]) -> list[Any]:
    """Every kind of sampling at once, each with another prompt, then a grammar and samples."""
    ids = [prompts[i % len(prompts)] for i in range(len(SAMPLING))]
    new = [{"max_new_tokens": 9 + 3 * i, **one} for i, one in enumerate(SAMPLING)]
    first = engine.generate(input_ids=ids, sampling_params=new)
    some = [{"max_new_tokens": n, "temperature": 0.8, "sampling_seed": n} for n in (1, 2, 4, 5)]
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_hidden_states": True}
    second = engine.generate(input_ids=ids[:4], sampling_params=some, **wanted)
    json = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 5, "json_schema": SCHEMA}
    several = {"n": 2, "max_new_tokens": 11, "temperature": 1.0, "sampling_seed": 6}
    third = engine.generate(input_ids=ids[0], sampling_params=json)
    return [*first, *second, third, *engine.generate(input_ids=ids[1], sampling_params=several)]


def facts(answer: Any) -> dict[str, Any]:
    meta = answer["meta_info"]
    found = {name: answer.get(name) for name in FIELDS}
    found["hidden_states"] = meta.get("hidden_states", found["hidden_states"])
    return found | {name: meta.get(name) for name in META}


def compare(kind: str, most: int, **options: Any) -> ForcedDrafts:
    """Ask an engine with the drafter and one without; the drafter."""
    options["enable_return_hidden_states"] = True
    with drafted_engine(None, **options) as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode(text) for text in TEXTS]
        plain = ask(engine, prompts)
    sequences = [[*prompt, *answer["output_ids"]] for answer in plain for prompt in prompts]
    drafts = ForcedDrafts(follower(sequences), kind, most=most, varies=kind == "mixed")
    with drafted_engine(drafts, **options) as engine:
        wide = ask(engine, prompts)
    for ours, theirs in zip(wide, plain, strict=True):
        assert facts(ours) == facts(theirs)
    assert any(facts(answer)["hidden_states"] for answer in plain)
    return drafts


@pytest.mark.parametrize("kind", ["oracle", "mixed", "adversary"])
def test_answers_of_the_bundled_model(kind: str) -> None:
    drafts = compare(kind, 5, model_path="radix-tiny")
    assert drafts.rounds
    accepted = sum(got for rounds in drafts.rounds.values() for _, got in rounds)
    assert (accepted > 0) == (kind != "adversary")


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 8},
        {"page_size": 64, "kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "w8a8_int8", "max_running_requests": 3},
        {"quantization": "int4wo-64", "disable_radix_cache": True},
        {"max_total_tokens": 320, "page_size": 4},
    ],
    ids=str,
)
def test_answers_with_options(options: dict[str, Any]) -> None:
    assert compare("mixed", 7, model_path="radix-tiny", **options).rounds


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_answers_of_other_models(architecture: str) -> None:
    """Windows and latent attention."""
    options = {"model_path": str(cached_tiny(architecture)), "page_size": 4}
    assert compare("mixed", 4, **options).rounds


class Evens:
    """Even tokens only; {"raise": n} fails where the output has n tokens."""

    def __call__(self, logits: torch.Tensor, params: Any, rows: Any) -> torch.Tensor:
        for row, given, info in zip(logits, params, rows, strict=True):
            if (given or {}).get("raise") == len(info.output_ids):
                raise RuntimeError("broken")
            row[1::2] = float("-inf")
        return logits


def test_a_processor_sees_each_place_and_fails_where_it_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("drafted_processors")
    module.Evens = Evens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drafted_processors", module)
    options = {"model_path": "radix-tiny", "logit_processor": ("evens=drafted_processors:Evens",)}

    def answers(drafts: ForcedDrafts | None) -> list[list[int]]:
        with drafted_engine(drafts, **options) as engine:
            got = []
            for place in (None, 1, 2, 5, 6, 9):
                sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
                fields = {"custom_logit_processor": "evens", "stream": True}
                if place is not None:
                    sampling["custom_params"] = {"raise": place}
                ids: list[int] = []
                try:
                    for part in engine.generate(
                        input_ids=[398, 626, 325], sampling_params=sampling, **fields
                    ):
                        ids = part["output_ids"]
                except RadixError as error:
                    assert "broken" in str(error)
                got.append(ids)
            return got

    plain = answers(None)
    assert [len(ids) for ids in plain] == [12, 1, 2, 5, 6, 9]
    drafts = ForcedDrafts(follower([[398, 626, 325, *plain[0]]]), "oracle", most=3)
    assert answers(drafts) == plain
    assert max(got for rounds in drafts.rounds.values() for _, got in rounds) == 3


def test_rows_of_several_adapters(tmp_path: Path) -> None:
    base = cached_tiny("Qwen3ForCausalLM")
    folders = [write_adapter(base, tmp_path / f"a{i}", 2 + 3 * i, seed=i) for i in range(2)]
    options = {"model_path": str(base), "enable_lora": True, "random_seed": 0}
    options["lora_paths"] = [f"a{i}={folder}" for i, folder in enumerate(folders)]
    ids = [[5 + (seed * 11 + i * 7) % 300 for i in range(9 + seed)] for seed in range(3)]
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}

    def answers(drafts: ForcedDrafts | None) -> list[list[int]]:
        with drafted_engine(drafts, **options) as engine:
            names = ["a0", None, "a1"]
            found = engine.generate(input_ids=ids, sampling_params=sampling, lora_path=names)
        return [one["output_ids"] for one in found]

    plain = answers(None)
    sequences = [[*prompt, *output] for prompt, output in zip(ids, plain, strict=True)]
    drafts = ForcedDrafts(follower(sequences), "mixed", most=4, varies=True)
    assert answers(drafts) == plain and len(drafts.rounds) == 3
    assert sum(got for rounds in drafts.rounds.values() for _, got in rounds)


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_output_behind_an_image(tmp_path: Path) -> None:
    """Positions of the tokens behind an image are not their places (M-RoPE)."""
    families = pytest.importorskip("tests.multimodal.test_families")
    tiny = families.FAMILIES["qwen2_5_vl"]()
    families.save(tiny, tmp_path)
    options = {"model_path": str(tmp_path), "dtype": "float32", "max_total_tokens": 2048}
    sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True}

    def answer(drafts: ForcedDrafts | None) -> Any:
        with drafted_engine(drafts, **options) as engine:
            image = families.encoded(families.IMAGES[0])
            text = f"look {tiny.placeholder} now tell"
            return engine.generate(text, sampling, image_data=[image], return_logprob=True)

    plain = answer(None)
    output, prompt_len = plain["output_ids"], plain["meta_info"]["prompt_tokens"]

    def oracle(rid: str, ids: Sequence[int], count: int) -> list[int]:
        done = len(ids) - prompt_len
        found: list[int] = output[done : done + count]
        return found

    drafts = ForcedDrafts(oracle, "oracle", most=4)
    assert facts(answer(drafts)) == facts(plain)
    assert sum(got for rounds in drafts.rounds.values() for _, got in rounds) >= 14
