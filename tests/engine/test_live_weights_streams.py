"""Streams that run while the weights change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from radixlm import Engine
from tests.engine.test_live_weights import OPTIONS, answers
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

NEW = 60
LIMIT_S = 60.0
SAMPLING = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
PROMPTS = [[7 + 3 * i + j for j in range(20 + i)] for i in range(4)]


class Folders:
    """Two checkpoints, and the answers of fresh engines with each."""

    def __init__(self, target: Path) -> None:
        self.old = cached_tiny("Qwen3ForCausalLM")
        self.new = perturbed(self.old, target / "new")
        self.engines = {
            version: Engine(model_path=str(folder), **OPTIONS)
            for version, folder in (("old", self.old), ("new", self.new))
        }

    def tokens(self, version: str, prompt: list[int], count: int = NEW) -> list[int]:
        sampling = SAMPLING | {"max_new_tokens": count}
        found = self.engines[version].generate(input_ids=prompt, sampling_params=sampling)
        ids: list[int] = found["output_ids"]
        return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    made = Folders(tmp_path_factory.mktemp("weights"))
    yield made
    for engine in made.engines.values():
        engine.shutdown()


class Streams:
    """One stream a prompt; ``begun`` is set when each has some tokens. ``counts``: of each, how
    many tokens were computed by each version."""

    def __init__(self, engine: Engine) -> None:
        self.begun = threading.Event()
        self.tokens: dict[int, list[int]] = {}
        self.counts: list[dict[str, int]] = [{} for _ in PROMPTS]
        self.finishes: dict[int, Any] = {}
        fields: list[dict[str, Any]] = [
            {"input_ids": prompt, "sampling_params": SAMPLING} for prompt in PROMPTS
        ]
        self.futures: list[Future[Any]] = [
            engine.submit(one, lambda event, i=i: self._take(i, event))
            for i, one in enumerate(fields)
        ]

    def _take(self, index: int, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        self.tokens[index] = ids = list(event["output_ids"])
        self.counts[index][meta["weight_version"]] = len(ids)
        self.finishes[index] = meta["finish_reason"]
        if len(self.tokens) == len(PROMPTS) and min(map(len, self.tokens.values())) > 3:
            self.begun.set()

    def wait(self) -> None:
        for future in self.futures:
            future.result(LIMIT_S)


@pytest.fixture
def engine(folders: Folders) -> Iterator[Engine]:
    options = {**OPTIONS, "weight_version": "old"}
    with Engine(model_path=str(folders.old), **options) as engine:
        engine._wait(engine._engine.intake.control("slow_down", forward_sleep_time=0.01))
        yield engine


def update(engine: Engine, folders: Folders, mode: str) -> tuple[bool, str, int]:
    return engine.update_weights_from_disk(str(folders.new), weight_version="new", mode=mode)


def test_streams_end_on_the_old_weights(engine: Engine, folders: Folders) -> None:
    streams = Streams(engine)
    assert streams.begun.wait(LIMIT_S)
    assert update(engine, folders, "wait")[0::2] == (True, 0)
    streams.wait()
    assert [streams.tokens[i] for i in range(len(PROMPTS))] == [
        folders.tokens("old", prompt) for prompt in PROMPTS
    ]
    assert all(count.keys() == {"old"} for count in streams.counts)
    assert answers(engine) == answers(folders.engines["new"])


def test_streams_are_aborted(engine: Engine, folders: Folders) -> None:
    streams = Streams(engine)
    assert streams.begun.wait(LIMIT_S)
    assert update(engine, folders, "abort")[0]
    streams.wait()
    assert {finish["type"] for finish in streams.finishes.values()} == {"abort"}
    assert answers(engine) == answers(folders.engines["new"])


def begun_on_old(streams: Streams, folders: Folders) -> Iterator[tuple[list[int], list[int], int]]:
    """(prompt, tokens, how many were computed before the update) of each stream, all of them ended
    on the new weights and begun as on the old."""
    for index, prompt in enumerate(PROMPTS):
        ids, kept = streams.tokens[index], streams.counts[index]["old"]
        assert streams.counts[index]["new"] == NEW == len(ids) and kept < NEW
        assert ids[:kept] == folders.tokens("old", prompt)[:kept]
        yield prompt, ids, kept


@pytest.mark.parametrize("is_paused", [False, True])
def test_streams_are_computed_again(engine: Engine, folders: Folders, is_paused: bool) -> None:
    """What they have stays; the rest is what a fresh engine makes of prompt and that."""
    streams, intake = Streams(engine), engine._engine.intake
    assert streams.begun.wait(LIMIT_S)
    if is_paused:
        assert engine._wait(intake.control("pause", mode="retract")).ok
    assert update(engine, folders, "retract")[::2] == (True, len(PROMPTS))
    if is_paused:
        engine._wait(intake.control("continue"))
    streams.wait()
    for prompt, ids, kept in begun_on_old(streams, folders):
        assert ids[kept:] == folders.tokens("new", prompt + ids[:kept], NEW - kept)
    assert answers(engine) == answers(folders.engines["new"])


def test_streams_do_not_find_pages_of_the_old_weights(folders: Folders) -> None:
    """The tiers have the pages that they computed before."""
    tiers = {"enable_hierarchical_cache": True, "hicache_size": 1, "page_size": 16}
    options = {**OPTIONS, "weight_version": "old", **tiers}
    options["hicache_storage_prefetch_policy"] = "wait_complete"
    options["hicache_storage_backend_extra_config"] = json.dumps({"prefetch_threshold": 4})
    with Engine(model_path=str(folders.old), **options) as engine:
        engine._wait(engine._engine.intake.control("slow_down", forward_sleep_time=0.01))
        streams = Streams(engine)
        assert streams.begun.wait(LIMIT_S)
        assert update(engine, folders, "retract")[0]
        streams.wait()
    for index, prompt in enumerate(PROMPTS):
        ids, kept = streams.tokens[index], streams.counts[index]["old"]
        assert ids[kept:] == folders.tokens("new", prompt + ids[:kept], NEW - kept)


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("is_retracted", [False, True])
def test_streams_keep_their_cache(
    engine: Engine, folders: Folders, is_paused: bool, is_retracted: bool
) -> None:
    """Pages that both weights have made are of no use to other requests, also when the first
    weights come back; nor are those of a request that was retracted after the change."""
    streams, intake = Streams(engine), engine._engine.intake
    assert streams.begun.wait(LIMIT_S)
    if is_paused:
        assert engine._wait(intake.control("pause", mode="in_place")).ok
    mode = "wait" if is_paused else "in_place"
    assert update(engine, folders, mode)[::2] == (True, len(PROMPTS))
    if is_retracted:
        assert engine._wait(intake.control("pause", mode="retract")).ok
        scheduler = engine._engine._serving.scheduler  # type: ignore[attr-defined]
        versions = {request.namespace.weights_version for request in scheduler.queue}
        assert versions == {scheduler.limits.weights_version}
    if is_paused or is_retracted:
        engine._wait(intake.control("continue"))
    streams.wait()
    assert len(list(begun_on_old(streams, folders))) == len(PROMPTS)
    own = [prompt + streams.tokens[i] for i, prompt in enumerate(PROMPTS)]
    one_more = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    for version in ("new", "old"):
        wanted = folders.engines[version].generate(input_ids=own, sampling_params=one_more)
        found = engine.generate(input_ids=own, sampling_params=one_more)
        assert [one["output_ids"] for one in found] == [one["output_ids"] for one in wanted]
        assert engine.update_weights_from_disk(str(folders.old), weight_version="old")[0]
