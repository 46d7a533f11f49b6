"""Engines that share a storage: a new one finds the pages of another, with the same answers; a
storage that dies, lies or belongs to another tenant costs hits only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.stores import store_secret
from radixlm.tiers.base import Tier
from radixlm.tiers.manifest import Manifest
from radixlm.tiers.stores import make_store
from radixlm.tiers.stores.tier import StoreTier
from tests.engine.drafted_engine import drafted_engine
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.tiers.stores import servers
from tests.tiers.stores.test_contract import MemoryStore

PROMPT = "A clerk writes letters. He has a pen, some paper and much time. " * 3
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LIMIT_S = 30.0
OPTIONS: dict[str, Any] = {"deadline_s": LIMIT_S, "lookup_deadline_s": LIMIT_S}
CHOSEN: dict[str, Any] = {}
MADE: list[StoreTier] = []


def chosen_tier(config: ServerConfig, manifest: Manifest) -> list[Tier]:
    """For engine.tiers.SOURCES: the store that the test chose."""
    name, extra = CHOSEN["store"]
    MADE.append(make_store(name, OPTIONS | extra, manifest, CHOSEN.get("secret", b"")))
    return [MADE[-1]]


def wait_for_all(patch: pytest.MonkeyPatch) -> None:
    waits = partial(ArrivalOptions, policy="wait_complete")
    patch.setattr("radixlm.engine.tiers.ArrivalOptions", waits)


def choose(patch: pytest.MonkeyPatch, name: str, extra: dict[str, Any]) -> None:
    patch.setattr("radixlm.engine.tiers.SOURCES", [f"{__name__}:chosen_tier"])
    wait_for_all(patch)
    patch.setitem(CHOSEN, "store", (name, extra))
    if name == "dynamic":
        patch.setattr(MemoryStore, "shared", {})


DYNAMIC = {"module_path": "tests.tiers.stores.test_contract", "class_name": "MemoryStore"}


def answer(engine: Any, **more: Any) -> tuple[list[int], int]:
    """(token ids, cached tokens); a new engine has nothing in its own pool."""
    result = engine.generate(PROMPT, PARAMS, **more)
    return result["output_ids"], result["meta_info"]["cached_tokens"]


def write(plain: list[int], **options: Any) -> None:
    """An engine that leaves four pages in the store."""
    with drafted_engine(None, page_size=16, **options) as engine:
        assert answer(engine) == (plain, 0)
        tier = MADE[-1]
        with tier._changed:
            assert tier._changed.wait_for(lambda: tier.stats()["put_pages"] >= 4, LIMIT_S)


def shared(plain: list[int], **options: Any) -> None:
    """One engine writes, another one reads."""
    write(plain, **options)
    with drafted_engine(None, page_size=16, **options) as engine:
        assert answer(engine) == (plain, 64)
        assert MADE[-1].stats()["hit_pages"] == 4


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with drafted_engine(None, page_size=16) as engine:
        return answer(engine)[0]


def test_engines_share_pages_by_a_store(monkeypatch: pytest.MonkeyPatch, plain: list[int]) -> None:
    choose(monkeypatch, "dynamic", DYNAMIC)
    shared(plain)


def test_engines_share_pages_by_redis_until_it_dies(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    with servers.redis_server() as (url, child):
        choose(monkeypatch, "redis", {"url": url})
        shared(plain)
        with drafted_engine(None, page_size=16) as engine:
            child.kill()
            child.wait(10)
            assert answer(engine) == (plain, 0)
            assert MADE[-1].stats()["errors"] >= 1


def test_the_host_tier_stands_above_a_store(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    """As with --enable-lmcache: what the store gave once is then in RAM."""
    choose(monkeypatch, "dynamic", DYNAMIC)
    write(plain)
    options = {"enable_hierarchical_cache": True, "hicache_ratio": 1.0, "page_size": 16}
    waits = {"hicache_storage_prefetch_policy": "wait_complete"}
    with drafted_engine(None, **options, **waits) as engine:
        for _ in range(2):
            tokens, hits = answer(engine)
            assert tokens == plain and hits >= 64
            assert MADE[-1].stats()["hit_pages"] == hits // 16
            assert engine.flush_cache()


def test_a_store_that_changes_a_byte_of_each_page_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    choose(monkeypatch, "dynamic", DYNAMIC)
    write(plain)
    for name, page in MemoryStore.shared.items():
        MemoryStore.shared[name] = page[:-9] + bytes([page[-9] ^ 1]) + page[-8:]
    with drafted_engine(None, page_size=16) as engine:
        assert answer(engine) == (plain, 0)
        assert MADE[-1].stats()["damaged_pages"] >= 1


def test_a_tenant_finds_no_pages_of_another(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    choose(monkeypatch, "dynamic", DYNAMIC)
    write(plain)
    with drafted_engine(None, page_size=16) as engine:
        assert answer(engine, cache_salt="another tenant") == (plain, 0)


def test_one_rank_and_two_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model_path": str(cached_tiny("Qwen3ForCausalLM")), "max_total_tokens": 2048}
    with drafted_engine(None, page_size=16, **options) as engine:
        plain, _ = answer(engine)
    choose(monkeypatch, "dynamic", DYNAMIC | {"head_group": 1, "layer_group": 1})
    write(plain, **options)
    sizes = {"cpu_threads": 1, "log_level": "error", "random_seed": 1, "tp_size": 2}
    with thread_engine(monkeypatch, shared=True, page_size=16, **sizes, **options) as engine:
        tokens, hits = answer(engine)
    assert tokens == plain and hits >= 64
    assert [tier.stats()["hit_pages"] for tier in MADE[-2:]] == [hits // 16] * 2


def test_the_secret_of_a_store_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("shared by the fleet\n")
    config = ServerConfig.from_kwargs(enable_lmcache=True, kv_store_secret_file=str(path))
    with pytest.raises(ConfigError, match="chmod 600"):
        store_secret(config)
    path.chmod(0o600)
    assert store_secret(config) == b"shared by the fleet"
    assert store_secret(ServerConfig.from_kwargs()) == b""


def test_lmcache_is_a_server_and_the_flag_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: list[int]
) -> None:
    wait_for_all(monkeypatch)
    with servers.lmcache_server() as url:
        path = tmp_path / "lmcache.yaml"
        path.write_text(f"remote_url: {url}\n")
        make = partial(_noted, extra={"lookup_deadline_s": LIMIT_S})
        monkeypatch.setattr("radixlm.engine.stores.make_store", make)
        shared(plain, enable_lmcache=True, lmcache_config_file=str(path))


def _noted(
    name: str, given: dict[str, Any], *more: Any, extra: dict[str, Any], **named: Any
) -> StoreTier:
    MADE.append(make_store(name, {**given, **extra}, *more, **named))
    return MADE[-1]


def test_the_storage_of_the_hierarchical_cache_is_chosen_by_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: list[int]
) -> None:
    folder, secret = tmp_path / "pages", tmp_path / "secret"
    secret.write_text("shared by the fleet")
    secret.chmod(0o600)
    extra = OPTIONS | {"directory": str(folder), "min_free_gb": 0}
    options = {
        "enable_hierarchical_cache": True,
        "hicache_size": 1,
        "hicache_storage_backend": "shared_file",
        "hicache_storage_backend_extra_config": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    monkeypatch.setattr("radixlm.engine.hicache.make_store", partial(_noted, extra={}))
    shared(plain, kv_store_secret_file=str(secret), **options)
    with drafted_engine(None, page_size=16, **options) as engine:  # without the secret
        assert answer(engine) == (plain, 0)


def test_lmcache_without_a_server_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="remote_url '' is no server such as lm://"):
        make_store("lmcache", {}, Manifest("m", "w", "1", "bf16", 16, page_bytes=(8, 0)))
