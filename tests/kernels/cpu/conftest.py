"""The C++ kernels are optional; without the extension these tests are skipped."""

from collections.abc import Iterator

import pytest

from radixlm.kernels.cpu import available, reason
from radixlm.kernels.cpu.extension import native

collect_ignore_glob: list[str] = [] if available else ["test_*.py"]


def pytest_report_header() -> str:
    return "cpu kernels: on" if available else f"cpu kernels: off ({reason})"


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One thread; tests pass num_threads if it matters."""


@pytest.fixture(params=native().supported_isas() if available else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this processor has."""
    before = native().isa()
    native().select_isa(request.param)
    yield request.param
    native().select_isa(before)
