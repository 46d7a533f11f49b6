"""What is held back for the start of another engine process."""

from __future__ import annotations

import os

import pytest

from radixlm.engine import restart_reserve
from radixlm.engine.restart_reserve import NUM_DESCRIPTORS, RestartReserve


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_holds_descriptors_until_it_is_released() -> None:
    reserve, before = RestartReserve(), _num_open()
    reserve.fill()
    reserve.fill()  # no more than once
    assert _num_open() == before + NUM_DESCRIPTORS
    assert reserve._memory is not None and len(reserve._memory) == restart_reserve.NUM_BYTES
    reserve.release()
    assert _num_open() == before and reserve._memory is None
    reserve.release()


def test_it_takes_what_there_is_and_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, real = RestartReserve(), os.open
    left = [True] * 3

    def scarce(*args: object) -> int:
        if not left:
            raise OSError(24, "Too many open files")
        left.pop()
        return real(os.devnull, os.O_RDONLY)

    with monkeypatch.context() as patch:
        patch.setattr(restart_reserve.os, "open", scarce)
        reserve.fill()
        assert len(reserve._descriptors) == 3
    reserve.fill()
    assert len(reserve._descriptors) == NUM_DESCRIPTORS
    reserve.release()
