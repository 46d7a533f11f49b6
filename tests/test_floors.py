"""Imports go down the floors of ARCHITECTURE.md only, and stand at the top of their files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "radixlm"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("arch", "wire", "step", "observe"),
    ("config", "memory", "kernels", "text", "multimodal", "distributed", "devices", "hub"),
    ("pools", "quant", "sampling", "grammar"),
    ("layers", "attention", "weights", "transfer"),
    ("models", "tiers"),
    ("intake", "scheduler", "executor"),
    tuple(
        "speculative lora media cuda_graphs parallel warm_restart kv_events live_feed "
        "continuation weight_updates self_check hidden_outputs step_sizes admission_order "
        "operations tails".split()
    ),
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
    ("bench", "router"),
    ("cuda_graphs", "lora"),
}
TORCH_FREE = (
    "base arch wire observe config memory text intake scheduler entrypoints router lang tiers "
    "hub warm_restart kv_events live_feed continuation weight_updates self_check "
    "admission_order operations tails".split()
)
TORCH_FREE_FILES = {
    *("engine/intake.py", "lora/registry.py"),
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


def _statements(body: list[ast.stmt], live: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Those of `body` and of the blocks in it; with each, whether it runs outside type checks."""
    for one in body:
        yield one, live
        typing_only = isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)
        for part in ("body", "handlers", "cases", "orelse", "finalbody"):
            yield from _statements(getattr(one, part, []), live and not typing_only)


@lru_cache(None)
def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at run time) of each import in the file."""
    found: list[tuple[str, bool]] = []
    for node, live in _statements(ast.parse(path.read_text()).body, True):
        if isinstance(node, ast.Import):
            found += [(alias.name, live) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, live))
    return found


def _live_imports(path: Path) -> list[str]:
    return [module for module, at_run_time in _imports(path) if at_run_time]


PACKAGES: dict[str | None, list[Path]] = {}
for one in FILES:
    PACKAGES.setdefault(_package(one), []).append(one)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _is_torch_free(path: Path) -> bool:
    mine = _package(path)
    free = mine in TORCH_FREE or _name(path) in TORCH_FREE_FILES
    return free or (mine == "step" and path.name != "batch.py")


@pytest.mark.parametrize("package", FLOOR)
def test_imports_go_down(package: str) -> None:
    wrong = []
    for path in PACKAGES[package]:
        for module in _live_imports(path):
            parts = module.split(".")
            if parts[0] != "radixlm" or len(parts) == 1 or parts[1] not in FLOOR:
                continue
            other = parts[1]
            is_allowed = other == package or (package, other) in SIDEWAYS
            if not is_allowed and FLOOR[other] >= FLOOR[package]:
                wrong.append(f"{_name(path)} (floor {FLOOR[package]}) imports {module}")
    assert not wrong, wrong


def test_every_package_stands_on_a_floor() -> None:
    assert PACKAGES.keys() - {None, "assets"} == FLOOR.keys(), "name it in FLOORS"


@pytest.mark.parametrize("package", FLOOR)
def test_torch_free_packages_import_no_torch(package: str) -> None:
    paths = [path for path in PACKAGES[package] if _is_torch_free(path)]
    live = [(_name(path), m) for path in paths for m in _live_imports(path)]
    assert not [one for one in live if one[1].split(".")[0] in ("torch", "transformers")]


def test_what_drafts_on_the_host_imports_no_torch() -> None:
    paths = [path for path in PACKAGES["speculative"] if path.parent.name == "speculative"]
    assert paths and not [m for p in paths for m in _live_imports(p) if m.split(".")[0] == "torch"]


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
