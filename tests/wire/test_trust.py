"""The product runs no code from outside: the source is searched for ways to do so."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import radixlm
from radixlm.base.lazy import require_transformers

ROOT = Path(radixlm.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}


def _trees() -> list[tuple[str, ast.Module]]:
    paths = sorted(ROOT.rglob("*.py"))
    assert len(paths) > 100
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in paths]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_that_unpickles_is_imported() -> None:
    found = []
    for path, tree in _trees():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            found += [(path, n) for n in names if set(n.split(".")) & MODULES]
    assert found == [("weights/pickle_file.py", "pickle")]  # only for the name of an error
    tree = ast.parse((ROOT / "weights/pickle_file.py").read_text())
    used = {_dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.UnpicklingError"}


def test_nothing_is_evaluated() -> None:
    found = []
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = _dotted(node.func)
                found += [(path, name)] if name in CALLS else []
                if name.endswith(("yaml.load", "yaml.unsafe_load", "os.system", "os.popen")):
                    found.append((path, name))
                is_shell = any(
                    k.arg == "shell" and getattr(k.value, "value", None) is not False
                    for k in node.keywords
                )
                found += [(path, f"{name}(shell)")] if is_shell else []
    # what a model wrote, where --allow-code-execution is given, in a process without rights
    assert found == [("evals/sandbox.py", "exec"), ("evals/sandbox.py", "compile")]


def test_torch_load_takes_weights_only() -> None:
    calls = []
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _dotted(node.func) in ("torch.load", "np.load"):
                flags = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                safe = flags.get("weights_only") is True or flags.get("allow_pickle") is False
                calls.append((path, _dotted(node.func), safe))
    assert any(name == "torch.load" for _, name, _ in calls)
    # np.load refuses pickles by default
    assert [c for c in calls if not c[2] and c[1] == "torch.load"] == []
    assert not any("allow_pickle=True" in p.read_text() for p in ROOT.rglob("*.py"))


def test_no_remote_code_of_checkpoints() -> None:
    for path in ROOT.rglob("*.py"):
        assert "trust_remote_code=True" not in path.read_text(), path


def test_nobody_is_asked_whether_to_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    library = require_transformers("hf", "a test")
    with pytest.raises(ValueError, match="trust_remote_code"):
        library.AutoConfig.from_pretrained(tmp_path)
