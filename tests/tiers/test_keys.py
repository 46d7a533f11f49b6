"""Page keys: published vectors, chains, and everything that must change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.record import replace
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.tiers.keys import (
    NO_KEY,
    dynamo_hash,
    event_hash,
    extend_keys,
    namespace_seed,
    page_keys,
    parents,
    reference_chain,
    window_key,
)

IDS = np.arange(1, 101, dtype=np.int32)


def test_the_reference_chain() -> None:
    """Vectors of SGLang 0.5.23."""
    ids = np.array([1, 2, 3, 4, 5], np.int32)
    chain = reference_chain(ids, 2)
    assert [key.hex() for key in chain] == [
        "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
        "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c",
    ]
    assert [event_hash(key) for key in chain] == [3817746824117602890, -4216701448867210342]
    assert reference_chain(ids, 2, extra_key="a")[0].hex() == (
        "61ff8cc45f935b4640cf3bd73bdf4761a0db8b5f2bd16e2d1732d05a3c339ae7"
    )
    assert dynamo_hash(chain[0], None, None) == event_hash(chain[0])
    assert dynamo_hash(chain[0], "a", None) != dynamo_hash(chain[0], None, "a")


def test_own_vectors() -> None:
    """Keys outlive the process: these must never change while the manifest's format is 1."""
    seed = namespace_seed(bytes(32), CacheNamespace("v1", "bf16", "ad", "t", "s", "x"), b"secret")
    assert seed.hex() == "7fab92570e809753a5e354ddf1ce24936e1d1c5a18cba133532033ac1ab71b15"
    assert (
        page_keys(IDS[:4], 2, seed)[1].hex()
        == "dcadc6be422bdf692c6dc7a43cbd2b80aa4066e179024644611a63aeb5f08f99"
    )
    assert (
        window_key(NO_KEY).hex()
        == "af342f14bb68680236e61c01e75a48c4edb9efe94ec95be56694877fecd1c536"
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=60),
    st.sampled_from([1, 4, 16]),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_keys_grow_page_by_page(ids: list[int], page_size: int, cuts: list[int]) -> None:
    whole, seed = np.array(ids, np.int32), b"s" * 32
    keys: list[bytes] = []
    for cut in sorted(cuts):
        extend_keys(keys, whole[:cut], page_size, seed)
    extend_keys(keys, whole, page_size, seed)
    assert keys == page_keys(whole, page_size, seed)
    assert len(keys) == len(ids) // page_size == len(set(keys))
    assert parents(keys) == [NO_KEY, *keys][: len(keys)]
    for end in range(0, len(ids), page_size):
        other = whole.copy()
        other[end] ^= 1
        changed = page_keys(other, page_size, seed)
        assert changed[: end // page_size] == keys[: end // page_size]
        assert not set(changed[end // page_size :]) & set(keys)


@pytest.mark.parametrize(
    "change",
    [
        {"weights_version": "2"},
        {"kv_layout": "int8"},
        {"adapter": "digest"},
        {"tenant": "t"},
        {"cache_salt": "t"},
        {"extra_key": "t"},
        {"rope_variant": "rope+"},
        {"earlier_media": (b"m",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_namespace_changes_all_keys(change: dict[str, Any]) -> None:
    plain = namespace_seed(b"m" * 32, CacheNamespace())
    other = namespace_seed(b"m" * 32, replace(CacheNamespace(), **change))
    assert not set(page_keys(IDS, 4, plain)) & set(page_keys(IDS, 4, other))


def test_tenants_need_the_secret() -> None:
    tenant = CacheNamespace(tenant="t", cache_salt="s")
    seeds = {namespace_seed(b"", tenant, secret) for secret in (b"", b"1", b"2")}
    assert len(seeds) == 3
    assert namespace_seed(b"", CacheNamespace(), b"1") == namespace_seed(b"", CacheNamespace())
    swapped = CacheNamespace(tenant="s", cache_salt="t")
    assert namespace_seed(b"", tenant) != namespace_seed(b"", swapped)
