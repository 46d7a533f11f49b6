"""Whole engines with tiers: answers are those of the engine without, in tokens, log-probabilities
and hidden states, also when the KV of a prompt comes from the tier of an engine before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine import tiers as engine_tiers
from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.model_info import ZOO
from radixlm.speculative.lengths import DraftLength
from tests.engine.drafted_engine import drafted_engine
from tests.fakes import tiers as fakes
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiers import DictTier
from tests.fakes.tiny_checkpoint import cached_tiny

SYSTEM = "You answer in one word, as a careful clerk would, and you never say more than that. "
TEXTS = [SYSTEM + text for text in ("Where is Rome?", "12 + 30 =", "Who wrote the letter?")]
GREEDY = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "string"}}}'


def tiering(patch: pytest.MonkeyPatch, tiers: list[DictTier]) -> None:
    """Engines that start from now on have these tiers and wait for all that comes."""
    patch.setattr("radixlm.engine.tiers.SOURCES", ["tests.fakes.tiers:shared_tiers"])
    patch.setattr(fakes, "SHARED", tiers)
    waits = partial(ArrivalOptions, policy="wait_complete")
    patch.setattr("radixlm.engine.tiers.ArrivalOptions", waits)


@contextmanager
def tiered_engine(tiers: list[DictTier], **options: Any) -> Iterator[radixlm.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        tiering(patch, tiers)
        with drafted_engine(None, **options) as engine:
            yield engine


def ask(engine: radixlm.Engine, **more: Any) -> list[Any]:
    """Greedy and seeded, with log-probabilities, n of 2, a grammar."""
    params = [
        GREEDY,
        {"max_new_tokens": 9, "temperature": 0.8, "sampling_seed": 3},
        {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 5, "json_schema": SCHEMA},
    ]
    some = engine.generate(TEXTS, params, return_logprob=True, top_logprobs_num=2, **more)
    two = {"n": 2, "max_new_tokens": 7, "temperature": 1.0, "sampling_seed": 6}
    return [*some, *engine.generate(TEXTS[0], two, **more)]


def facts(answer: Any) -> Any:
    meta = answer["meta_info"]
    names = ("finish_reason", "output_token_logprobs", "output_top_logprobs")
    return answer["text"], answer["output_ids"], [meta.get(name) for name in names]


def hits(answers: list[Any]) -> int:
    return sum(one["meta_info"]["cached_tokens_details"]["host"] for one in answers)


def compare(
    tiers: list[DictTier], min_hits: int, make: Any = tiered_engine, **options: Any
) -> None:
    """The plain engine's answers; then those of two engines with the same tiers, in turn."""
    more = options.pop("ask", {})
    with drafted_engine(None, **options) as engine:
        plain = list(map(facts, ask(engine, **more)))
    with make(tiers, **options) as engine:
        assert list(map(facts, ask(engine, **more))) == plain
        assert engine.flush_cache()
        again = ask(engine, **more)
        assert list(map(facts, again)) == plain
        assert hits(again) >= min_hits
        details = again[0]["meta_info"]["cached_tokens_details"]
        assert sum(details.values()) == again[0]["meta_info"]["cached_tokens"]
    with make(tiers, **options) as engine:  # another one, later
        again = ask(engine, **more)
        assert list(map(facts, again)) == plain
        assert hits(again) >= min_hits


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3ForCausalLM", {"page_size": 16}),
        ("Qwen3ForCausalLM", {"page_size": 16, "kv_cache_dtype": "int8"}),
        ("Qwen3ForCausalLM", {"page_size": 16, "kv_cache_dtype": "int4"}),
        ("Gemma3ForCausalLM", {"page_size": 16}),
        ("Gemma3ForCausalLM", {"page_size": 16, "chunked_prefill_size": 32}),
        ("DeepseekV3ForCausalLM", {"page_size": 16}),
        ("Qwen3NextForCausalLM", {"page_size": 16, "chunked_prefill_size": 64}),
        ("FalconH1ForCausalLM", {"page_size": 16}),
    ],
    ids=str,
)
def test_architectures(architecture: str, options: dict[str, Any]) -> None:
    compare([DictTier()], 64, model_path=str(cached_tiny(architecture)), **options)


@contextmanager
def tiered_ranks(tiers: list[DictTier], **options: Any) -> Iterator[radixlm.Engine]:
    """Two ranks, in threads; each has its own part of every page in a tier of its own."""
    with pytest.MonkeyPatch.context() as patch:
        tiering(patch, tiers)
        sizes = {"cpu_threads": 1, "log_level": "error", "random_seed": 1, "tp_size": 2}
        with thread_engine(patch, shared=True, **sizes, **options) as engine:
            yield engine


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "FalconH1ForCausalLM"])
def test_ranks_keep_their_own_parts(architecture: str) -> None:
    tier = DictTier()
    model = str(cached_tiny(architecture))
    compare([tier], 64, tiered_ranks, model_path=model, max_total_tokens=4096, page_size=16)
    parts = tier.__dict__["parts"]
    assert len(parts) == 2 and len({len(part.pages) for part in parts.values()}) == 1


@contextmanager
def tiered_groups(tiers: list[DictTier], **options: Any) -> Iterator[radixlm.Engine]:
    """Two attention groups of one rank each."""
    with tiered_ranks(tiers, dp_size=2, enable_dp_attention=True, **options) as engine:
        yield engine


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_attention_groups_keep_pages_of_their_own(architecture: str) -> None:
    tier = DictTier()
    model = str(cached_tiny(architecture))
    compare([tier], 48, tiered_groups, model_path=model, max_total_tokens=4096, page_size=16)
    parts = tier.__dict__["parts"]
    assert len(parts) == 2 and all(part.pages for part in parts.values())


def test_adapters_have_keys_of_their_own(tmp_path: Path) -> None:
    base, tier = cached_tiny("Qwen3ForCausalLM"), DictTier()
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(base, tmp_path / name, seed=seed)
    paths = [f"{name}={tmp_path / name}" for name in "ab"]
    options = {"model_path": str(base), "page_size": 16, "enable_lora": True, "lora_paths": paths}
    wanted: dict[str | None, Any] = {}
    with drafted_engine(None, **options) as engine:
        for name in ("a", "b", None):
            wanted[name] = engine.generate(TEXTS[0], GREEDY, lora_path=name)["output_ids"]
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    for life in range(2):
        with tiered_engine([tier], **options) as engine:
            for turn in range(2):
                for name, ids in wanted.items():
                    answer = engine.generate(TEXTS[0], GREEDY, lora_path=name)
                    assert answer["output_ids"] == ids
                    found = answer["meta_info"]["cached_tokens_details"]["host"]
                    assert (found >= 64) == bool(turn or life)
                assert engine.flush_cache()


@pytest.mark.parametrize("impl", ["radixlm", "transformers"])
def test_another_config_has_keys_of_its_own(impl: str) -> None:
    base, tier = str(cached_tiny("Qwen3ForCausalLM")), DictTier()
    rope = '{"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}'
    answers = []
    for overrides in ("{}", rope):
        options = {"model_impl": impl, "json_model_override_args": overrides}
        with tiered_engine([tier], model_path=base, page_size=16, **options) as engine:
            answers.append(engine.generate(TEXTS[0], GREEDY))
    assert hits(answers) == 0 and answers[0]["output_ids"] != answers[1]["output_ids"]
    assert answers[1]["output_ids"] == _native(base, rope)


@lru_cache
def _native(model: str, overrides: str) -> list[int]:
    with drafted_engine(None, model_path=model, json_model_override_args=overrides) as engine:
        return list(engine.generate(TEXTS[0], GREEDY)["output_ids"])


def test_pages_with_drafts_of_other_weights_are_stored_apart(tmp_path: Path) -> None:
    tier, draft, other = DictTier(), ZOO / "radix-tiny-draft", tmp_path / "other"
    shutil.copytree(draft, other)
    (weights,) = other.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    for path in (draft, draft, other):
        options = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(path)}
        with tiered_engine([tier], page_size=16, **options):
            pass
    assert len(tier.__dict__["parts"]) == 2


class Always(DraftLength):
    """Drafts always, whatever steps are measured to take."""

    def __init__(self, max_drafts: int, *_: Any) -> None:
        super().__init__(max_drafts, is_fixed=True, always=True)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3},
        {"speculative_algorithm": "STANDALONE", "speculative_num_steps": 3},
        {"speculative_algorithm": "NGRAM"},
    ],
    ids=lambda options: options["speculative_algorithm"],
)
def test_drafts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages carry the draft model's entries: drafts behind an arrived prefix are as good."""
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", Always)
    tier = DictTier()
    rounds = []
    with drafted_engine(None, page_size=16) as engine:
        plain = engine.generate(TEXTS, GREEDY)
    for _life in range(2):
        with tiered_engine([tier], page_size=16, **options) as engine:
            for _ in range(2):
                answers = engine.generate(TEXTS, GREEDY)
                assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
                rounds.append(sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers))
                found = sum(a["meta_info"]["cached_tokens_details"]["host"] for a in answers)
                assert (found >= 32) == (len(rounds) > 1)
                assert engine.flush_cache()
    if options["speculative_algorithm"] == "STANDALONE":
        (pages,) = (part.pages.values() for part in tier.__dict__["parts"].values())
        assert any(page.payload[-1] == 1 for page in pages)
        assert rounds[0] > 5 and max(rounds) - min(rounds) <= 2


def test_a_small_pool_with_retraction() -> None:
    """Requests that are retracted and evicted come back, maybe from the tier."""
    prompts = [text * n for text in TEXTS for n in (1, 2)]
    params = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    options: dict[str, Any] = {"model_path": str(cached_tiny("Qwen3ForCausalLM")), "page_size": 16}
    with drafted_engine(None, **options) as engine:
        plain = [engine.generate(prompt, params)["output_ids"] for prompt in prompts]
    tier = DictTier()
    with tiered_engine([tier], max_total_tokens=512, schedule_conservativeness=0.1, **options) as e:
        for _ in range(3):
            answers = e.generate(prompts, params)
            assert [answer["output_ids"] for answer in answers] == plain
        state = e.get_server_info()["internal_states"][0]
        assert state["num_breaches"] == 0
        assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0 or tier.num_got > 0


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_images_are_named_by_their_content(tmp_path: Path) -> None:
    families = pytest.importorskip("tests.multimodal.test_families")
    tiny = families.FAMILIES["qwen2_5_vl"]()
    families.save(tiny, tmp_path)
    options = {"model_path": str(tmp_path), "dtype": "float32", "max_total_tokens": 2048}
    images = [families.encoded(image) for image in families.IMAGES[:2]]
    text, tier = f"look {tiny.placeholder} now tell", DictTier()

    def answers(engine: radixlm.Engine) -> list[Any]:
        return [
            engine.generate(text, GREEDY, image_data=[one], return_logprob=True) for one in images
        ]

    with drafted_engine(None, page_size=16, **options) as engine:
        plain = list(map(facts, answers(engine)))
    for life in range(2):
        with tiered_engine([tier], page_size=16, **options) as engine:
            found = answers(engine)
            assert list(map(facts, found)) == plain
            assert [one["meta_info"]["cached_tokens_details"]["host"] > 0 for one in found] == [
                life > 0
            ] * 2


@pytest.mark.parametrize(
    ("options", "word"),
    [({"disable_radix_cache": True}, "--disable-radix-cache")],
    ids=str,
)
def test_what_tiers_do_not_work_with_is_refused(options: dict[str, Any], word: str) -> None:
    pages = SimpleNamespace(nbytes=lambda space: 1)
    with pytest.raises(ConfigError, match=f"^{word}: "):
        engine_tiers._check(ServerConfig.from_kwargs(model_path="m", **options), pages)
