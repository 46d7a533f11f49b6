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
from tests.kernels.triton.gate import ENVIRONMENT, MODULES, read_record, table

SAMPLE = 12  # variants
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


@pytest.mark.parametrize("part", range(3))  # a process takes seconds to import Triton
def test_representative_variants_compile(part: int) -> None:
    rows = compile_in_process(*MODULES[part::3], "--jobs", "1")
    assert rows and [row for row in rows if not is_good(row)] == []


def test_recorded_variants_are_good() -> None:
    """The record holds the result of each variant by a hash of its source."""
    rows = list(read_record().values())
    assert len(rows) > 500
    assert [row for row in rows if not is_good(row)] == []


def test_unrecorded_variants_compile() -> None:
    """A sample of changed kernels and variants, or with another compiler. All of them: `gate.py
    --all --record`."""
    rows = compile_in_process("--all", "--missing", "--sample", str(SAMPLE), "--jobs", "1")
    assert len(rows) <= SAMPLE
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


def test_names_of_variants_are_unique() -> None:
    program = (
        "import sys; from tests.kernels.triton.gate import variants_of\n"
        "for name in sys.argv[1:]:\n"
        "    for v in variants_of(name): print(name, v.name)\n"
    )
    names = subprocess.run(
        [sys.executable, "-c", program, *MODULES],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(set(names)) == len(names)
