"""Imports modules of bench/, which is no package of the project."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "bench"


def bench_module(name: str) -> ModuleType:
    """`bench/<name>.py`, or a module of a folder in bench/ by its dotted name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
