"""The host tier: what was put comes back, within its budget, by second chance."""

from __future__ import annotations

import numpy as np
import pytest

from radixlm.tiers.codec import RAW, Codec
from radixlm.tiers.host import HostTier, Packed

from .faulty_files import chain, payload, records

NBYTES = 2048


class _Below:
    def __init__(self) -> None:
        self.pages: list[Packed] = []

    def put_packed(self, pages: list[Packed]) -> None:
        self.pages += pages


def _got(tier: HostTier, keys: list[bytes]) -> int:
    out = [np.zeros(NBYTES, np.uint8) for _ in keys]
    count = tier.get(keys, out)
    for number in range(count):
        assert np.array_equal(out[number], payload(number)), number
    return count


def test_pages_come_back_up_to_the_first_that_is_missing() -> None:
    keys = chain(6)
    tier = HostTier(1 << 20, Codec())
    tier.put(records(keys)[:3] + records(keys)[4:])
    assert tier.contains(keys) == 3 and tier.contains(keys[4:]) == 2
    assert _got(tier, keys) == 3
    assert tier.get(keys[:1], [np.zeros(NBYTES - 1, np.uint8)]) == 0  # of another length
    tier.clear()
    assert tier.contains(keys) == 0 and tier.stats()["bytes"] == 0


def test_the_budget_holds_and_read_pages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, below = chain(64), _Below()
    tier = HostTier(8 * NBYTES, Codec(), below)
    for number, record in enumerate(records(keys)):
        tier.put([record])
        assert tier.stats()["bytes"] <= 8 * NBYTES
        assert _got(tier, keys[:1]) == 1, number  # read each time: it has a second chance
    assert tier.contains(keys[-1:]) == 1
    kept = int(tier.stats()["pages"])
    assert kept + len(below.pages) == 64 and tier.stats()["evicted_pages"] == len(below.pages)
    for page in below.pages:
        out = np.zeros(NBYTES, np.uint8)
        assert Codec().decode(page.flags, page.blob, out)
        assert np.array_equal(out, payload(keys.index(page.key)))
    tier.close()


def test_old_pages_are_compressed_when_half_of_it_is_used() -> None:
    pytest.importorskip("zstandard")
    keys = chain(12)
    tier = HostTier(10 * NBYTES, Codec())
    tier.put(records(keys[:5]))
    assert tier.stats()["bytes"] == 5 * NBYTES
    for record in records(keys)[5:]:
        tier.put([record])
        assert tier._packer.drain(10)
    assert tier.stats()["pages"] == 12  # 12 of 2,048 bytes in room for 10
    assert _got(tier, keys) == 12
    tier.close()


def test_a_page_that_others_compressed_is_taken_over_once() -> None:
    keys = chain(1)
    tier = HostTier(10 * NBYTES, Codec())
    tier.put(records(keys))
    flags, blob = Codec().encode(payload(0))
    tier.adopt(keys[0], flags, blob)
    tier.adopt(keys[0], RAW, payload(1))  # too late
    assert tier.stats()["bytes"] == len(blob) and _got(tier, keys) == 1


def test_pages_stay_as_they_came_while_there_is_room_and_are_lent() -> None:
    pytest.importorskip("zstandard")
    keys = chain(6)
    tier = HostTier(10 * NBYTES, Codec())
    tier.put(records(keys[:3]))
    tier.offer(keys[1], *Codec().encode(payload(1)))
    assert [row.tobytes() for row in tier.lend(keys)] == [payload(i).tobytes() for i in range(3)]
    tier.adopt(keys[1], *Codec().encode(payload(1)))
    assert len(tier.lend(keys)) == 1 and tier.lend(keys[1:]) == []
    tier.close()


def test_a_row_of_a_larger_array_is_copied_and_too_large_pages_dropped() -> None:
    table = np.stack([payload(0), payload(1)])
    keys = chain(2)
    made = [type(r)(r.key, r.parent, r.tokens, table[i]) for i, r in enumerate(records(keys))]
    tier = HostTier(3 * NBYTES, Codec())
    tier.put(made)
    table[:] = 0
    assert _got(tier, keys) == 2
    small = HostTier(NBYTES - 1, Codec())
    small.put(made)
    assert small.stats() == {
        "pages": 0,
        "bytes": 0,
        "budget_bytes": NBYTES - 1,
        "evicted_pages": 0,
        "dropped_pages": 2,
    }


def test_a_damaged_page_ends_what_comes_whoever_expands_it() -> None:
    pytest.importorskip("zstandard")
    keys = chain(6)
    tier = HostTier(1 << 20, Codec())
    tier.put(records(keys))
    for number in (1, 2, 4):  # beside pages that are kept as they came
        tier.adopt(keys[number], *Codec().encode(payload(number)))
    assert _got(tier, keys) == 6
    tier._pages[keys[4]].blob = b"garbage"
    assert _got(tier, keys) == 4
    tier.close()
