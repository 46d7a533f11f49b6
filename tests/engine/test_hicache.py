"""--enable-hierarchical-cache: the same answers as without, from RAM and, after a restart, disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.memory import MemoryConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine import hicache
from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.features.page_puts import WriteThrough
from radixlm.tiers.manifest import Manifest
from tests.engine.drafted_engine import drafted_engine

SYSTEM = "You answer in one word, as a careful clerk would, and you never say more than that. "
TEXTS = [SYSTEM + text for text in ("Where is Rome?", "12 + 30 =", "Who wrote the letter?")]
PARAMS = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def _options(folder: Path, **more: Any) -> dict[str, Any]:
    extra = {"directory": str(folder), "max_size_gb": 0.1, "min_free_gb": 0.001}
    return {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    } | more


def _ask(engine: Any) -> tuple[list[str], int]:
    """Texts, and the fewest cached tokens."""
    answers = [engine.generate(text, PARAMS) for text in TEXTS]
    return [a["text"] for a in answers], min(a["meta_info"]["cached_tokens"] for a in answers)


def test_answers_are_the_same_from_ram_and_from_disk(tmp_path: Path) -> None:
    with drafted_engine(None) as engine:
        plain, _ = _ask(engine)
    with drafted_engine(None, **_options(tmp_path)) as engine:
        assert _ask(engine)[0] == plain
        assert engine.flush_cache()
        texts, cached = _ask(engine)
        assert texts == plain and cached >= 16
    with drafted_engine(None, **_options(tmp_path)) as engine:  # the server was restarted
        texts, cached = _ask(engine)
        assert texts == plain and cached >= 16
    with drafted_engine(None, **_options(tmp_path, page_size=32)) as engine:  # other pages
        assert _ask(engine)[0] == plain
    # pages of other weights, however they were asked for
    with drafted_engine(None, **_options(tmp_path, torchao_config="int4wo-32")) as engine:
        assert engine.generate(TEXTS[0], PARAMS)["meta_info"]["cached_tokens"] == 0


def test_write_back_keeps_what_the_cache_gives_up(tmp_path: Path) -> None:
    """Twice as many prompts as the KV cache holds, twice; then once more after a restart."""
    prompts = [[(7 * i + 3 * j) % 900 + 3 for j in range(60)] for i in range(16)]
    params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    more = {"max_total_tokens": 512, "page_size": 16, "kv_cache_dtype": "int8"}

    def ask(engine: Any) -> tuple[list[list[int]], int]:
        answers = [engine.generate(input_ids=ids, sampling_params=params) for ids in prompts]
        cached = sum(one["meta_info"]["cached_tokens"] >= 48 for one in answers)
        return [one["output_ids"] for one in answers], cached

    with drafted_engine(None, **more) as engine:
        plain, _ = ask(engine)
        assert ask(engine) == (plain, 0)
    options = _options(tmp_path, hicache_write_policy="write_back", **more)
    with drafted_engine(None, **options) as engine:
        assert ask(engine) == (plain, 0)
        again, cached = ask(engine)
        assert again == plain and cached >= 8  # most are copied before they are evicted
    with drafted_engine(None, **options) as engine:
        again, cached = ask(engine)
        assert again == plain and cached >= 8


def test_damaged_segments_change_no_answer(tmp_path: Path) -> None:
    with drafted_engine(None, **_options(tmp_path)) as engine:
        plain, _ = _ask(engine)
    for segment in tmp_path.rglob("seg-*.kv"):
        data = bytearray(segment.read_bytes())
        data[600::97] = bytes(255 - byte for byte in data[600::97])
        segment.write_bytes(data)
    with drafted_engine(None, **_options(tmp_path)) as engine:
        assert _ask(engine)[0] == plain


@pytest.mark.parametrize(
    ("policy", "cached", "put", "pages", "first"),
    [
        ("write_through", 0, 0, 4, 0),
        ("write_through", 2, 2, 4, 2),
        ("write_through", 0, 4, 6, 4),
        ("write_through_selective", 0, 0, 4, None),  # the first time, and short
        ("write_through_selective", 2, 2, 4, 0),  # a hit: what was found is kept, too
        ("write_through_selective", 2, 4, 6, 4),
        ("write_through_selective", 0, 0, 64, 0),  # 1,024 tokens
    ],
)
def test_what_a_policy_writes(
    policy: str, cached: int, put: int, pages: int, first: int | None
) -> None:
    made = hicache.write_policy(MemoryConfig(hicache_write_policy=policy), 16)
    assert made.first_page(cached, put, pages) == first
    assert isinstance(made, WriteThrough) == (policy == "write_through")


def test_the_host_tier_leaves_ram_free() -> None:
    room = 10**9, 6 * 10**9, 10**9  # the KV cache, what may be taken, what that takes of it
    assert hicache.host_bytes(MemoryConfig(), *room) == 2 * 10**9
    assert hicache.host_bytes(MemoryConfig(hicache_ratio=9.0), *room) == 5 * 10**9
    assert hicache.host_bytes(MemoryConfig(hicache_size=5), *room) == 5 * 10**9
    with pytest.raises(ConfigError, match="--hicache-size 6 works"):
        hicache.host_bytes(MemoryConfig(hicache_size=7), *room)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 600), (2, 650)])
def test_the_host_tier_stays_within_the_share_of_a_rank_in_a_container(
    monkeypatch: pytest.MonkeyPatch, ranks: int, budget: int
) -> None:
    monkeypatch.setattr(hicache, "total_memory_bytes", lambda total: 1000)
    config = ServerConfig.from_kwargs(
        model_path="m", enable_hierarchical_cache=True, tp_size=ranks, hicache_ratio=9.0
    )
    manifest = Manifest("m", "w", "1", "bf16", 16, page_bytes=(64, 0))
    made = hicache.make_hicache(config, manifest, 100, 800, 100)
    assert made is not None and made.tiers[0].stats()["budget_bytes"] == budget
    made.tiers[0].close()


def test_waiting_is_set_by_flag_and_extra_config() -> None:
    extra = json.dumps({"prefetch_threshold": 256, "prefetch_timeout_base": 0.5})
    memory = MemoryConfig(
        hicache_storage_prefetch_policy="timeout", hicache_storage_backend_extra_config=extra
    )
    made = hicache.arrival_options(memory, ArrivalOptions(16))
    assert (made.policy, made.min_tokens, made.timeout_base_s) == ("timeout", 256, 0.5)
    for value, shown in (('"many"', "'many'"), ("NaN", "nan")):
        text = f'{{"prefetch_threshold": {value}}}'
        bad = MemoryConfig(hicache_storage_backend_extra_config=text)
        with pytest.raises(ConfigError, match=f"prefetch_threshold is {shown}; a number such as 1"):
            hicache.arrival_options(bad, ArrivalOptions(16))


def test_a_running_server_refuses_what_only_its_start_can_set() -> None:
    config = ServerConfig.from_kwargs(model_path="m", enable_hierarchical_cache=True)
    manifest = Manifest("m", "w", "1", "bf16", 16, page_bytes=(64, 0))
    made = hicache.make_hicache(config, manifest, 1 << 20, 1 << 40)
    assert made is not None
    with pytest.raises(ConfigError, match="prefetch_timeout_max: it can be given by flag only"):
        made.attach("file", '{"hicache_storage_pass_prefix_keys": true, "prefetch_timeout_max": 3}')
    made.tiers[0].close()


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"folder": "/x", "hicache_storage_pass_prefix_keys": True},
            "file has no 'folder'; it has directory",
        ),
        ({"max_size_gb": -1}, "max_size_gb is -1; a number"),
        ({"directory": 5}, "directory is 5; "),
        ({"max_size_gb": 1e999}, "max_size_gb is inf; a number"),
        ({"directory": "/proc/nothing"}, "a folder of this user works"),
    ],
)
def test_a_bad_storage_stops_the_start(extra: dict[str, Any], problem: str, tmp_path: Path) -> None:
    more = {"hicache_storage_backend_extra_config": json.dumps(extra)}
    os.environ.pop("RADIXLM_HICACHE_DIR", None)
    with (
        pytest.raises(ConfigError, match=problem),
        drafted_engine(None, **_options(tmp_path, **more)),
    ):
        pass
