"""Several ranks with everything else: each request of a drawn crowd gets the bits that it gets
alone on one rank, without a drafter, a small pool or company.

A world is a model and the flags that change numbers (`numbers`: both engines have them) or must
change none (`ranks`, `others`: only the engine under test)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm import Engine
from radixlm.base.record import Record, field
from radixlm.models.decoder import DecoderModel

ZOO = Path(__file__).parents[2] / "zoo" / "models"
ADAPTERS = [f"{name}={ZOO / f'radix-tiny-lora-{name}'}" for name in ("upper", "spanish")]
BUNDLED = "radix-tiny"
WORDS = ("the", "a list of", "Paris", "one two three", "How do I", "water is", "Hello", "and then")


class World(Record):
    """One engine of several ranks. ``model``: the bundled one, or an architecture's tiny one."""

    name: str
    model: str
    ranks: dict[str, Any]
    numbers: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def path(self) -> str:
        return self.model if self.model == BUNDLED else str(cached_tiny(self.model))


TP2: dict[str, Any] = {"tp_size": 2}
PP2: dict[str, Any] = {"pp_size": 2}
DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
SMALL_POOL: dict[str, Any] = {"max_total_tokens": 448, "chunked_prefill_size": 16}
LORA: dict[str, Any] = {"enable_lora": True, "lora_paths": ADAPTERS}
WORLDS = [
    World("adapters, tp", BUNDLED, TP2, LORA, {**NGRAM, "page_size": 16}),
    World("adapters, stages", BUNDLED, PP2, LORA, {**NGRAM, "page_size": 16}),
    World("adapters, both", BUNDLED, {**TP2, **PP2}, LORA, SMALL_POOL),
    World("adapters, groups", BUNDLED, DP2, LORA, {**NGRAM, "page_size": 16}),
    World("adapters, own head", BUNDLED, {**DP2, "enable_dp_lm_head": True}, LORA, SMALL_POOL),
    World("grammars, groups", BUNDLED, DP2, {}, {**NGRAM, "page_size": 16}),
    World("retractions, tp", "Qwen3ForCausalLM", TP2, {"kv_cache_dtype": "int8"}, SMALL_POOL),
    World("windows, both", "Gemma3ForCausalLM", {**TP2, **PP2}, {}, {"page_size": 4, **SMALL_POOL}),
    World("states, stages", "FalconH1ForCausalLM", PP2, {}, {**NGRAM, "chunked_prefill_size": 16}),
    World("states, groups", "Qwen3NextForCausalLM", DP2, {}, {"chunked_prefill_size": 16}),
    World("experts, stages", "DeepseekV3ForCausalLM", {**TP2, **PP2}, {}, SMALL_POOL),
    World("sinks, both", "GptOssForCausalLM", {**TP2, **PP2}, {}, {**NGRAM, "page_size": 16}),
    World("four ranks", "Qwen3MoeForCausalLM", {**DP2, "tp_size": 4, "ep_size": 2}, {}, SMALL_POOL),
    World("a head that drafts", BUNDLED, TP2, {}, {"speculative_algorithm": "EAGLE3"}),
    World("a head, both", BUNDLED, {**TP2, **PP2}, {}, {"speculative_algorithm": "EAGLE3"}),
    World("experts, ep", "Qwen3MoeForCausalLM", {**TP2, "ep_size": 2}, {}, SMALL_POOL),
]  # fmt: skip


def draw(rng: random.Random, world: World) -> dict[str, Any]:
    """The fields of a request; prompts share beginnings, kinds of sampling alternate."""
    sampling: dict[str, Any] = {"max_new_tokens": rng.choice([1, 5, 20, 40]), "temperature": 0.0}
    kind = rng.randrange(5)
    if kind == 1:
        sampling |= {"temperature": 0.9, "sampling_seed": rng.randrange(99)}
        sampling |= {"frequency_penalty": 0.4, "presence_penalty": 0.2}
    elif kind == 2:
        sampling |= {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02}
        sampling |= {"sampling_seed": rng.randrange(99), "n": rng.choice([1, 2])}
    elif kind == 3:
        sampling |= {"repetition_penalty": 1.3, "logit_bias": {"7": 2.0}}
    else:
        sampling["ignore_eos"] = rng.random() < 0.5
    if world.model == BUNDLED:
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        body: dict[str, Any] = {"prompt": "Tell me: " * rng.randint(0, 6) + prompt}
        extra = rng.randrange(4)
        if extra == 0:
            sampling["regex"] = rng.choice(["(yes|no|maybe)+", r"\d{3,9}", "[a-z ]{5,30}"])
        elif extra == 1:
            sampling["stop"] = rng.sample([" the", "e", ".", "an"], 2)
        if "lora_paths" in world.numbers:
            body["lora_path"] = rng.choice([None, "upper", "spanish"])
    else:
        shared = random.Random(world.seed).choices(range(3, 250), k=60)
        own = rng.choices(range(3, 250), k=rng.randint(1, 9))
        body = {"input_ids": shared[: rng.randint(0, 60)] + own}
    if rng.random() < 0.4:
        body |= {"return_logprob": True, "logprob_start_len": rng.choice([-1, 0, 3])}
        body["top_logprobs_num"] = rng.choice([0, 2])
    return body | {"sampling_params": sampling}


def shown(answer: Any) -> Any:
    """All of an answer that must not change."""
    if isinstance(answer, list):
        return [shown(one) for one in answer]
    names = ("token_logprobs", "top_logprobs")
    probs = [answer["meta_info"].get(f"{k}_{n}") for k in ("input", "output") for n in names]
    return answer["text"], answer["output_ids"], probs, answer["meta_info"]["finish_reason"]


SIZES: dict[str, Any] = {"cpu_threads": 1, "max_total_tokens": 4096, "log_level": "warning"}


def alone(world: World, bodies: list[dict[str, Any]]) -> list[Any]:
    with Engine(model_path=world.path, **SIZES | world.numbers) as engine:
        return [shown(engine.generate(**body)) for body in bodies]


def together(engine: Engine, bodies: list[dict[str, Any]]) -> list[Any]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(engine.async_generate(**body) for body in bodies))

    found = [shown(answer) for answer in asyncio.run(ask())]
    assert engine.get_server_info()["internal_states"][0]["num_breaches"] == 0
    return found


def compare(world: World, shared: bool, monkeypatch: pytest.MonkeyPatch, count: int = 8) -> None:
    """Assert that a crowd of ``count`` requests gets what each gets alone on one rank."""
    rng = random.Random(f"{world.name} {world.seed}")
    bodies = [draw(rng, world) for _ in range(count)]
    wanted = alone(world, bodies)
    flags = SIZES | world.numbers | world.ranks | world.others
    with thread_engine(monkeypatch, shared, model_path=world.path, **flags) as engine:
        got = together(engine, bodies)
    for body, ours, single in zip(bodies, got, wanted, strict=True):
        assert ours == single, body


# layer by layer: each way to cut ranks once, and adapters, states, experts and drafts among them
BY_LAYERS = ("adapters, groups", "states, stages", "experts, ep", "a head, both", "four ranks")


@pytest.mark.parametrize(
    ("world", "shared"),
    [
        pytest.param(
            world,
            shared,
            id=f"{world.name}-{'program' if shared else 'layers'}",
            marks=() if shared or world.name in BY_LAYERS else pytest.mark.slow,
        )
        for world in WORLDS
        for shared in (False, True)
    ],
)
def test_a_crowd_on_ranks_gets_the_bits_of_each_alone(
    world: World, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are threads, which run layer by layer, or by step programs that exchange through shared
    memory; these round otherwise."""
    if not shared:
        monkeypatch.setattr(DecoderModel, "_program_for", lambda self, batch: None)
    compare(world, shared, monkeypatch)


def test_groups_of_a_model_that_runs_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the whole model, and runs it on the tokens of its group."""
    numbers = {"model_impl": "transformers"}
    world = World("transformers", "Qwen3ForCausalLM", DP2, numbers, {**NGRAM, **SMALL_POOL})
    compare(world, True, monkeypatch, count=4)
