"""The C++ kernels are optional; without the extension these tests are skipped."""

import pytest

from radixlm.kernels.cpu import available, reason

collect_ignore_glob: list[str] = [] if available else ["test_*.py"]


def pytest_report_header() -> str:
    return "cpu kernels: on" if available else f"cpu kernels: off ({reason})"


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One thread; tests pass num_threads if it matters."""
