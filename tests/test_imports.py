"""Scripts beside the package name modules and members of it that exist."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("bench", "deploy", "examples", "scripts", "zoo")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, member) of each `from radixlm... import ...` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "radixlm":
            yield from ((str(node.module), alias.name) for alias in node.names)


def exists(module: str, member: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), member) or bool(
            importlib.util.find_spec(f"{module}.{member}")
        )
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_exists(path: Path) -> None:
    missing = [
        f"{module}.{member}" for module, member in imported(path) if not exists(module, member)
    ]
    assert not missing
