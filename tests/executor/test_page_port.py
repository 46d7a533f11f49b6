"""What the tiers hold in memory is looked up without the worker's threads."""

from __future__ import annotations

import numpy as np
import pytest

from radixlm.executor.page_port import PagePort
from radixlm.tiers.base import Found, Lookup, PageRecord
from radixlm.tiers.codec import Codec
from radixlm.tiers.host import HostTier
from radixlm.tiers.worker import PageWorker
from tests.fakes.tiers import DictTier

KEYS = [bytes([i]) * 32 for i in range(3)]


class _Pages:
    """Pools of pages of 8 bytes that nobody reads."""

    def nbytes(self, space: int) -> int:
        return 8 * (space == 0)

    def fence(self) -> None:
        return None

    read = write = None


def _host() -> HostTier:
    host = HostTier(1 << 10, Codec())
    row, tokens = np.zeros(8, np.uint8), np.zeros(4, np.int32)
    host.put([PageRecord(key, bytes(32), tokens, row.copy()) for key in KEYS[:2]])
    return host


@pytest.mark.parametrize("below", [[], [DictTier("storage")]], ids=["index", "store"])
def test_an_index_answers_at_once_and_a_store_later(below: list[DictTier]) -> None:
    worker = PageWorker([_host(), *below], _Pages(), 4)  # type: ignore[arg-type]
    port = PagePort(worker)
    port.send(Lookup(1, KEYS))
    reports = port.settle(20.0) if below else port.poll()
    assert bool(worker._threads) == bool(below)
    (found,) = reports
    assert isinstance(found, Found) and found.ends == [1, 2] and found.tiers[0] == ("host", 2)
    worker.close()
