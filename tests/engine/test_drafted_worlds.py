"""Drawn requests in drawn engines with real drafters: model, format of the cache, ranks, adapters,
images, tiers, chunks, retractions and aborts together give the answers of a plain engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import radixlm
from radixlm.base.record import Record, field
from radixlm.config.speculate import BLOCK_DRAFTS
from radixlm.engine.model_info import ASSETS, ZOO
from radixlm.speculative.drafter import Proposal
from radixlm.speculative.lengths import DraftLength
from radixlm.step.plan import Int32Array
from tests.engine.test_block_drafts import SECOND
from tests.engine.test_draft_heads import make_heads, make_mlp
from tests.engine.test_draft_models import DEEPSEEK, QWEN_NEXT, with_layers
from tests.engine.test_drafted_engine import facts
from tests.engine.test_drafted_pairs import draw
from tests.engine.test_dspark_layers import with_layers as with_dspark
from tests.engine.test_parallel_drafts import make_head as make_peagle
from tests.fakes.block_drafts import make_head
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny

NAMES = ("radix-tiny-draft", "radix-tiny-eagle3", "radix-tiny-vl", "radix-tiny-lora-upper")
pytestmark = pytest.mark.skipif(
    not all((ZOO / name).is_dir() for name in NAMES) or not (ASSETS / "radix-tiny").is_dir(),
    reason="the bundled models are not built",
)
LORA = [f"{name}={ZOO / f'radix-tiny-lora-{name}'}" for name in ("upper", "spanish")]
SMALL = {"max_total_tokens": 640, "max_running_requests": 5, "page_size": 4}
CHUNKS = {"chunked_prefill_size": 24, "page_size": 16}
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "page_size": 16}
PAGES = {"page_size": 1, "chunked_prefill_size": 8, "max_running_requests": 3}


class World(Record):
    """``numbers``: options of both engines; ``others``: of the one with drafts, which change no
    answer. ``model``: a bundled one, or an architecture's tiny one."""

    name: str
    drafters: tuple[str, ...]
    model: str = "radix-tiny"
    numbers: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


WORLDS = (
    World("int8 cache", ("EAGLE3", "STANDALONE", "NGRAM"), numbers={"kv_cache_dtype": "int8"},
          others=SMALL),
    World("fp8 cache", ("EAGLE", "STANDALONE"), numbers={"kv_cache_dtype": "fp8_e5m2"},
          others=CHUNKS),
    World("4 bits", ("EAGLE3", "NGRAM"), others=PAGES,
          numbers={"quantization": "int4wo-32", "kv_cache_dtype": "int4"}),
    World("8 bits", ("EAGLE3", "STANDALONE"), numbers={"quantization": "w8a8_int8"},
          others={"disable_radix_cache": True}),
    World("adapters", ("EAGLE3", "STANDALONE", "NGRAM"),
          numbers={"enable_lora": True, "lora_paths": LORA}, others=SMALL),
    World("images", ("NGRAM", "STANDALONE"), "radix-tiny-vl", others=CHUNKS),
    World("tiers", ("EAGLE3", "STANDALONE", "NGRAM"),
          others={"enable_hierarchical_cache": True, "max_total_tokens": 700}),
    World("two ranks", ("EAGLE3", "STANDALONE", "NGRAM"), others={"tp_size": 2, **CHUNKS}),
    World("two stages", ("EAGLE3", "STANDALONE"), others={"pp_size": 2, **SMALL}),
    World("two groups", ("EAGLE3", "NGRAM"), others=GROUPS),
    World("windows", ("STANDALONE", "NGRAM"), "Gemma3ForCausalLM", others=SMALL),
    World("latents", ("NEXTN", "NGRAM"), DEEPSEEK[0], others=CHUNKS),
    World("delta nets", ("NEXTN", "NGRAM"), QWEN_NEXT[0], others=CHUNKS),
    World("Mamba", ("NGRAM", "STANDALONE"), "BambaForCausalLM", others=SMALL),
    World("RWKV", ("NGRAM",), "RwkvForCausalLM", others=PAGES),
    World("blocks", ("DFLASH", "DSPARK"), "Qwen3ForCausalLM", others=SMALL),
    World("blocks beside streams", ("DSPARK", "NGRAM"), "DeepseekV4ForCausalLM", others=SMALL),
    World("blocks of two groups", ("DFLASH",), "Qwen3ForCausalLM", others=GROUPS),
    World("heads and masks", ("MEDUSA", "MLP_SPECULATOR", "EAGLE3"), "Qwen3ForCausalLM",
          others=SMALL),
    World("heads and masks of two groups", ("MEDUSA", "EAGLE3"), "Qwen3ForCausalLM", others=GROUPS),
)  # fmt: skip
CASES = [(world, drafter) for world in WORLDS for drafter in world.drafters]


class DrawnLength(DraftLength):
    """Any number of the drafts of each row, whatever they cost."""

    rounds: list[tuple[int, int]] = []  # noqa: RUF012  (of one test)

    def __init__(self, max_drafts: int, *_: Any) -> None:
        super().__init__(max_drafts, always=True)
        self._random = np.random.default_rng(max_drafts)

    def choose(
        self, rids: Sequence[str], proposals: Sequence[Proposal], other_tokens: int = 0
    ) -> Int32Array:
        sizes = super().choose(rids, proposals, other_tokens)
        return np.minimum(sizes, self._random.integers(0, self.max_drafts + 1, len(sizes)))

    def lens(self, rids: Sequence[str], other_tokens: int = 0) -> Int32Array:
        return self._random.integers(0, self.max_drafts + 1, len(rids)).astype(np.int32)

    def observe(self, rid: str, drafted: int, accepted: int) -> None:
        super().observe(rid, drafted, accepted)
        self.rounds.append((drafted, accepted))


def model_of(world: World, drafter: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The model of both engines, and the options of the drafter."""
    options: dict[str, Any] = {"speculative_algorithm": drafter, "speculative_num_steps": 4}
    if not world.model.endswith("LM"):
        if drafter == "STANDALONE" and world.model != "radix-tiny":
            options["speculative_draft_model_path"] = str(ZOO / "radix-tiny-draft")
        return world.model, options
    if drafter == "STANDALONE":
        options["speculative_draft_model_path"] = str(cached_tiny("Qwen3ForCausalLM"))
    if drafter == "DSPARK" and world.model.startswith("DeepseekV4"):
        return str(with_dspark(folder / "model")[0]), options
    if drafter in BLOCK_DRAFTS:
        markov = {"markov_rank": 8, "markov_head_type": "rnn"} if drafter == "DSPARK" else {}
        fields = markov | {"architectures": ["DSparkDraftModel"]} if markov else SECOND
        make_head(folder / "head", VOCAB, **fields)
        options["speculative_draft_model_path"] = str(folder / "head")
    if drafter in ("MEDUSA", "MLP_SPECULATOR", "EAGLE3"):
        if drafter == "MEDUSA":
            make_heads(folder, "mapped")
        elif drafter == "MLP_SPECULATOR":
            make_mlp(folder, is_tied=True)
        else:
            make_peagle(folder)
        options["speculative_draft_model_path"] = str(folder)
    if drafter != "NEXTN":
        return str(cached_tiny(world.model)), options
    architecture, old, at, names = DEEPSEEK if world.model == DEEPSEEK[0] else QWEN_NEXT
    return with_layers(architecture, folder / "model", old, at, **names), options


def draw_requests(world: World, rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Some share their beginnings, so that they hit pages that others have computed."""
    heads = ["the a of one two " * 9, "Is a cat on the house? " * 5, ""]
    requests = []
    for _ in range(count):
        one = draw(rng)
        sampling = one["sampling"]
        if "allowed_token_ids" in sampling and world.model.endswith("LM"):
            sampling["allowed_token_ids"] = [t for t in sampling["allowed_token_ids"] if t < VOCAB]
        body = {
            "prompt": rng.choice(heads) + one["prompt"],
            "sampling_params": sampling,
            "return_logprob": one["logprobs"],
            "top_logprobs_num": 2,
            "custom_logit_processor": one["processor"],
        }
        if "lora_paths" in world.numbers:
            body["lora_path"] = rng.choice([None, "upper", "spanish"])
        if world.model == "radix-tiny-vl" and rng.random() < 0.5:
            from tests.end_to_end.test_images import image  # needs PIL

            body["prompt"] = f"<|vision_start|><|image_pad|><|vision_end|>{one['prompt']}"
            body["image_data"] = image(rng.choice(["red", "blue"]))
        requests.append(body)
    return requests


def ask(engine: radixlm.Engine, bodies: list[dict[str, Any]], ends: list[int]) -> list[Any]:
    """All at once; of those with an end above 0 the client leaves after as many parts."""

    async def one(body: dict[str, Any], end: int) -> Any:
        if not end or "n" in body["sampling_params"]:
            found = await engine.async_generate(**body)
            return [facts(each) for each in (found if isinstance(found, list) else [found])]
        ids: list[int] = []
        async for part in await engine.async_generate(**body, stream=True):
            ids, end = part["output_ids"], end - 1
            if not end:
                break
        return ids

    async def every() -> list[Any]:
        return await asyncio.gather(*map(one, bodies, ends))

    found = asyncio.run(every())
    assert engine.get_server_info()["internal_states"][0]["num_breaches"] == 0
    return found


def play(world: World, drafter: str, folder: Path, count: int) -> None:
    """Ask an engine of this world, with drafts, and a plain one."""
    rng = random.Random(f"{world.name} {drafter}")
    model, drafted = model_of(world, drafter, folder)
    bodies = draw_requests(world, rng, count)
    ends = [rng.choice([0, 0, 0, 1, 4]) for _ in bodies]
    options = {"model_path": model, "cpu_threads": 1, "log_level": "error", "random_seed": 1}
    options |= {"max_total_tokens": 8192, **world.numbers}
    with radixlm.Engine(**options) as engine:
        plain = ask(engine, bodies, [0] * count)
    with radixlm.Engine(**options | world.others | drafted) as engine:
        wide = ask(engine, bodies, ends)
    for body, ours, theirs in zip(bodies, wide, plain, strict=True):
        if ours and not isinstance(ours[0], dict):  # the client has left
            theirs = theirs[0]["output_ids"][: len(ours)]
        assert ours == theirs, json.dumps(body)
    assert sum(drafted for drafted, _ in DrawnLength.rounds) > count / 2


@pytest.fixture(autouse=True)
def drawn_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", DrawnLength)
    DrawnLength.rounds.clear()


def name_of(case: Any) -> str:
    return case.name if isinstance(case, World) else str(case)


@pytest.mark.parametrize(("world", "drafter"), CASES[::12], ids=name_of)
def test_drawn_requests(world: World, drafter: str, tmp_path: Path) -> None:
    play(world, drafter, tmp_path, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world", "drafter"), CASES, ids=name_of)
def test_many_drawn_requests(world: World, drafter: str, tmp_path: Path) -> None:
    play(world, drafter, tmp_path, 66)
