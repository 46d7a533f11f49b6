"""The table of families costs nothing heavy to import."""

from __future__ import annotations

import subprocess
import sys

from radixlm.arch.registry import FAMILIES


def test_no_heavy_package_is_imported() -> None:
    code = (
        "import sys, radixlm.arch.hf\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_families_are_documented_by_their_lineage() -> None:
    for describe in FAMILIES.values():
        module = sys.modules[describe.__module__]
        assert module.__doc__, module.__name__
