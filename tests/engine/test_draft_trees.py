"""Trees of drafts in whole engines: from oracles of drawn shape, and from the bundled model's own
drafts, answers are those of the engine without a drafter."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import radixlm
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine import drafting as engine_drafting
from radixlm.engine.drafting import max_paths, tree_shape
from radixlm.speculative.lengths import DraftLength
from tests.engine.test_draft_models import (
    DEEPSEEK,
    NEEDS_MODELS,
    prompts,  # noqa: F401  (a fixture)
)
from tests.engine.test_drafted_pairs import compare, draw
from tests.engine.test_drafted_worlds import (
    CHUNKS,
    GROUPS,
    PAGES,
    SMALL,
    DrawnLength,
    World,
    name_of,
    play,
)
from tests.fakes.drafts import ForcedDrafts


def compare_trees(
    count: int, seed: int, most: int, paths: int, options: dict[str, Any]
) -> ForcedDrafts:
    """Ask ``count`` drawn requests of an engine with oracle trees, and of one without drafts."""
    rng = random.Random(seed)
    requests = [draw(rng) for _ in range(count)]
    for one in requests:
        one["logprobs"] = rng.random() < 0.5
    options = {"enable_return_hidden_states": True, **options}
    return compare(requests, "mixed", options, most=most, seed=seed, paths=paths)


SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (3, 2, {"max_running_requests": 16}),
    (5, 6, {"chunked_prefill_size": 32, "max_running_requests": 6, "page_size": 16}),
    (4, 4, {"max_total_tokens": 700, "page_size": 4, "disable_jump_forward": True}),
    (7, 3, {"page_size": 1, "kv_cache_dtype": "int8"}),
    (2, 8, {"page_size": 64, "quantization": "w8a8_int8", "disable_radix_cache": True}),
]


@pytest.mark.parametrize(("most", "paths", "options"), SHAPES[1:2], ids=str)
def test_trees_of_oracles(most: int, paths: int, options: dict[str, Any]) -> None:
    assert compare_trees(24, most, most, paths, options).num_gained > 5


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("most", "paths", "options"), SHAPES, ids=str)
def test_many_trees_of_oracles(most: int, paths: int, options: dict[str, Any]) -> None:
    assert compare_trees(220, 1000 + most, most, paths, options).num_gained > 50


WORLDS = (
    World("small", ("EAGLE3", "STANDALONE"), others=SMALL),
    World("chunks", ("EAGLE", "STANDALONE"), numbers={"kv_cache_dtype": "fp8_e5m2"}, others=CHUNKS),
    World("pages of 1", ("EAGLE3",), others=PAGES),
    World("two ranks", ("EAGLE3",), others={"tp_size": 2}),
    World("two groups", ("EAGLE3",), others=GROUPS),
    World("windows", ("STANDALONE",), "Gemma3ForCausalLM", others=SMALL),
    World("latents", ("NEXTN",), DEEPSEEK[0], others={"page_size": 16}),
)
CASES = [(world, one, k) for world in WORLDS for one in world.drafters for k in (2, 4, 8)]
TREES = {2: 6, 4: 12, 8: 20}  # tokens of a tree by branches


class DrawnTrees(DrawnLength):
    """Any number of the further paths, too."""

    num_gained = 0

    def choose_paths(self, proposals: Any, lens: Any) -> Any:
        counts = super().choose_paths(proposals, lens)
        return self._random.integers(counts // 2, counts + 1)

    def gained(self, count: int) -> None:
        super().gained(count)
        DrawnTrees.num_gained += count


def with_trees(world: World, branches: int) -> World:
    options = {"speculative_eagle_topk": branches, "speculative_num_draft_tokens": TREES[branches]}
    return replace(world, others={**world.others, **options})


@pytest.fixture(autouse=True)
def drawn_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.engine.drafting.DraftLength", DrawnTrees)
    DrawnTrees.rounds.clear()
    DrawnTrees.num_gained = 0


@NEEDS_MODELS
@pytest.mark.parametrize(("world", "drafter", "branches"), CASES[1:2], ids=name_of)
def test_trees_of_draft_models(world: World, drafter: str, branches: int, tmp_path: Any) -> None:
    play(with_trees(world, branches), drafter, tmp_path, 10)
    assert DrawnTrees.num_gained


@NEEDS_MODELS
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("world", "drafter", "branches"), CASES, ids=name_of)
def test_many_trees_of_draft_models(
    world: World, drafter: str, branches: int, tmp_path: Any
) -> None:
    play(with_trees(world, branches), drafter, tmp_path, 50)


@NEEDS_MODELS
def test_trees_accept_more_than_chains(
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    """With as many steps; and all that is reported counts the path that was right."""

    def always(most: int, *_: Any) -> DraftLength:
        return DraftLength(most, is_fixed=True, always=True)

    monkeypatch.setattr(engine_drafting, "DraftLength", always)
    sampling = {"temperature": 0, "max_new_tokens": 48}
    means = {}
    for branches, tokens in ((1, 4), (4, 8)):
        drafted = {"speculative_num_steps": 3, "speculative_num_draft_tokens": tokens}
        with radixlm.Engine(
            speculative_algorithm="EAGLE3", speculative_eagle_topk=branches, cpu_threads=1,
            max_total_tokens=8192, **drafted,
        ) as engine:  # fmt: skip
            answers = engine.generate(input_ids=prompts[:8], sampling_params=sampling)
            state = engine.get_server_info()["internal_states"][0]
        metas = [answer["meta_info"] for answer in answers]
        for meta in metas:
            rounds = meta["spec_verify_ct"]
            assert meta["spec_num_proposed_drafts"] <= rounds * (tokens - 1)
            accepted = sum(n * c for n, c in enumerate(meta["spec_correct_drafts_histogram"]))
            assert accepted == meta["spec_num_correct_drafts"]
            assert rounds + accepted >= meta["completion_tokens"] - 2
        total = sum(meta["spec_verify_ct"] for meta in metas)
        correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
        assert state["avg_spec_accept_length"] == pytest.approx(1 + correct / total, abs=0.01)
        means[branches] = 1 + correct / total
    assert means[4] > means[1]


def test_where_trees_are_read_as_chains() -> None:
    def shape(
        modules: int = 1, has_states: bool = False, algorithm: str = "EAGLE3", **options: Any
    ) -> Any:
        config = ServerConfig.from_kwargs(
            speculative_algorithm=algorithm, speculative_eagle_topk=4, speculative_num_steps=3,
            speculative_num_draft_tokens=8, **options,
        )  # fmt: skip
        block = SimpleNamespace(state=object() if has_states else None)
        return tree_shape(config, SimpleNamespace(blocks=[block]), modules)  # type: ignore[arg-type]

    found = shape()
    assert (found.branches, found.size, found.depth) == (4, 7, 3)
    assert max_paths(found, 4) == 24 and max_paths(None, 4) == 0
    assert shape(pp_size=2) is None and shape(2) is None and shape(has_states=True) is None
    assert shape(algorithm="NGRAM") is None
