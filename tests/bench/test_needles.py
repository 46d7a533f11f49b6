"""The model of two layers that finds needles, with what a cache leaves of them."""

from __future__ import annotations

import pytest
from tests.bench.scripts import bench_module

needles = bench_module("needles")


def shares(line: str) -> list[str]:
    """Of each depth."""
    return [part.split()[0] for part in line.split("%: ")[1:]]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--sparse", "4", "--cache", "int8"], ["1.00"] * 5),
        (["--window", "100"], ["0.33", "0.00", "0.00", "0.00", "1.00"]),
    ],
)
def test_what_is_found(
    options: list[str], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    needles.main(["--lengths", "700", "--seeds", "1", *options])
    assert shares(capsys.readouterr().out) == found
