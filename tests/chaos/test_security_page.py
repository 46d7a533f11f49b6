"""SECURITY.md and docs/reliability.md name tests: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    last = ""
    found = 0
    for name in re.findall(r"`((?:(?:tests|bench)/)?[\w/.]*(?:\.py)?(?:::\w+)?)`", text):
        path, mark, test = name.partition("::")
        if path.endswith(".py"):
            known = [p for p in (ROOT / path, *ROOT.glob(f"tests/**/{path}")) if p.is_file()]
            if not (path.startswith(("tests/", "bench/", "test_")) or known):
                continue  # a module of the package
            assert known, f"{page} names {name}"
            last = str(known[0])
        elif not mark:
            continue
        found += 1
        if mark:
            assert f"def {test}(" in Path(last).read_text(encoding="utf-8"), f"{page} names {name}"
    assert found > 15
