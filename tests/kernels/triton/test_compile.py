"""Every configuration of every kernel compiles for sm_90 and sm_80 without spills; see
README.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.kernels.triton.compiler import MAX_SHARED_BYTES, MAX_SHARED_BYTES_SM80
from tests.kernels.triton.gate import ENVIRONMENT, read_record, table

SAMPLE = 12  # of the variants without a record
RECORDED_SAMPLE = 6
SHARED = {90: MAX_SHARED_BYTES, 80: MAX_SHARED_BYTES_SM80}


def compile_in_process(*flags: str) -> list[dict]:
    program = Path(__file__).with_name("gate.py")
    run = subprocess.run(
        [sys.executable, str(program), *flags], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def is_good(row: dict) -> bool:
    return (
        "error" not in row
        and row["spills"] == 0
        and row["shared_bytes"] <= SHARED[row["arch"]]
        and (row["has_wgmma"] or not row["wants_wgmma"])
    )


def test_the_record_is_what_compiles() -> None:
    """A few variants that have a record."""
    rows = compile_in_process("--sample", str(RECORDED_SAMPLE), "--jobs", "1")
    assert rows and [row for row in rows if not is_good(row)] == []
    known = read_record()
    for row in rows:
        del row["seconds"]
        assert known.get(row["key"], row) == row


@pytest.mark.slow
def test_representative_variants_compile() -> None:
    rows = compile_in_process()
    assert rows and [row for row in rows if not is_good(row)] == []


def test_recorded_variants_are_good() -> None:
    """The record holds the result of each variant by a hash of its source."""
    rows = list(read_record().values())
    assert len(rows) > 500
    assert [row for row in rows if not is_good(row)] == []


def test_unrecorded_variants_compile() -> None:
    """Of changed kernels and variants, or with another compiler: the representative ones and a
    sample. All of them: `gate.py --all --record`."""
    rows = compile_in_process("--all", "--missing", "--sample", str(SAMPLE), "--jobs", "1")
    assert [row for row in rows if not is_good(row)] == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_variants_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """Half an hour of one core the first time; Triton caches its results."""
    rows = compile_in_process("--all")
    with capsys.disabled():
        print("", *table(rows), sep="\n")
        print(f"{len(rows)} variants: {dict(Counter(row['arch'] for row in rows))}")
    assert [row for row in rows if not is_good(row)] == []
