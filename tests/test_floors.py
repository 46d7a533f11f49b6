"""Imports go down the floors of ARCHITECTURE.md only, and stand at the top of their files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "radixlm"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("arch", "wire", "step", "observe"),
    ("config", "memory", "kernels", "text", "multimodal", "distributed", "hub"),
    ("pools", "quant", "sampling", "grammar", "speculative"),
    ("layers", "attention", "weights", "transfer"),
    ("models", "tiers"),
    ("lora",),
    ("intake", "scheduler", "executor"),
    ("engine",),
    ("entrypoints",),
    ("lang", "bench", "router", "quantize", "terminal", "evals"),
)
FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
# packages of one floor that may import each other, in one direction only
SIDEWAYS = {
    ("step", "wire"),
    ("observe", "wire"),
    ("distributed", "kernels"),
    ("evals", "bench"),
}
TORCH_FREE = (
    "base arch wire observe config memory text speculative intake scheduler entrypoints router "
    "lang tiers hub".split()
)
TORCH_FREE_FILES = {
    *("distributed/topology.py", "distributed/balance.py", "weights/options.py"),
    *(
        f"weights/remote/{name}.py"
        for name in "reader http place s3 redis locate local instance".split()
    ),
}
FILES = sorted(ROOT.rglob("*.py"))


def _package(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at run time) of each import in the file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        live = id(node) not in typing_only
        if isinstance(node, ast.Import):
            found += [(alias.name, live) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, live))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    mine = _package(path)
    if mine is None or "assets" in path.parts:
        return
    assert mine in FLOOR, f"{mine} stands on no floor: name it in FLOORS"
    for module, live in _imports(path):
        parts = module.split(".")
        if parts[0] != "radixlm" or len(parts) == 1 or not live:
            continue
        other = parts[1]
        if other == mine or other not in FLOOR or (mine, other) in SIDEWAYS:
            continue
        assert FLOOR[other] < FLOOR[mine], f"{mine} (floor {FLOOR[mine]}) imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_free_packages_import_no_torch(path: Path) -> None:
    mine, name = _package(path), str(path.relative_to(ROOT))
    free = mine in TORCH_FREE or name in TORCH_FREE_FILES
    if not free and not (mine == "step" and path.name != "batch.py"):
        return
    live = [m for m, at_run_time in _imports(path) if at_run_time]
    assert not [m for m in live if m.split(".")[0] in ("torch", "transformers")]


def test_the_scheduler_knows_of_no_ranks() -> None:
    paths = [p for p in FILES if _package(p) == "scheduler"]
    found = [m for p in paths for m, _ in _imports(p) if m.startswith("radixlm.distributed")]
    assert paths and not found


def test_no_package_is_called_utils() -> None:
    names = {p.stem for p in FILES} | {p.parent.name for p in FILES}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_help_and_import_need_no_torch() -> None:
    code = (
        "import sys; from radixlm.entrypoints.cli import main; main(['--help']);"
        "import radixlm.entrypoints.serve, radixlm.entrypoints.http.app;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
