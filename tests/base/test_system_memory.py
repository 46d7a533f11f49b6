"""The memory of the machine, also where /proc/meminfo is hidden."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import psutil
import pytest

from radixlm.base.system_memory import system_memory


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/meminfo is Linux's")
@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), PermissionError(13, "no"), KeyError("MemTotal")]
)
def test_without_meminfo_the_kernel_is_asked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = system_memory()
    assert known.total == psutil.virtual_memory().total

    def fail(*_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    found = system_memory()
    assert found.total == known.total and 0 < found.available <= found.total
