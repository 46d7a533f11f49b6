"""The product runs no code from outside: the source is searched for ways to do so."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import radixlm
from radixlm.base.lazy import require_transformers

ROOT = Path(radixlm.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
CALLS = ("eval", "exec", "compile", "__import__", "execfile")
DOTTED = ("yaml.load", "yaml.unsafe_load", "os.system", "os.popen")


@cache
def _sources() -> dict[str, str]:
    found = {str(p.relative_to(ROOT)): p.read_text() for p in sorted(ROOT.rglob("*.py"))}
    assert len(found) > 100
    return found


def _nodes(pattern: str) -> Iterator[tuple[str, ast.AST]]:
    """(file, node) of the files in which `pattern` is found; the others need not be parsed."""
    for path, text in _sources().items():
        if re.search(pattern, text):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_that_unpickles_is_imported() -> None:
    found = []
    for path, node in _nodes("|".join(MODULES)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        found += [(path, n) for n in names if set(n.split(".")) & MODULES]
    assert found == [("weights/pickle_file.py", "pickle")]  # only for the name of an error
    tree = ast.parse(_sources()["weights/pickle_file.py"])
    used = {_dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.UnpicklingError"}


def test_nothing_is_evaluated() -> None:
    found = []
    bare = rf"(?<![\w.])(?:{'|'.join(CALLS)})\s*\("
    for path, node in _nodes(rf"{bare}|\b(?:{'|'.join(DOTTED)})\b|shell\s*="):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = _dotted(node.func)
            found += [(path, name)] if name in CALLS or name.endswith(DOTTED) else []
            is_shell = any(
                k.arg == "shell" and getattr(k.value, "value", None) is not False
                for k in node.keywords
            )
            found += [(path, f"{name}(shell)")] if is_shell else []
    # what a model wrote, where --allow-code-execution is given, in a process without rights
    assert found == [("evals/sandbox.py", "exec"), ("evals/sandbox.py", "compile")]


def test_torch_load_takes_weights_only() -> None:
    calls = []
    for path, node in _nodes(r"\b(?:torch|np)\.load\b"):
        if isinstance(node, ast.Call) and _dotted(node.func) in ("torch.load", "np.load"):
            flags = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            safe = flags.get("weights_only") is True or flags.get("allow_pickle") is False
            calls.append((path, _dotted(node.func), safe))
    assert any(name == "torch.load" for _, name, _ in calls)
    # np.load refuses pickles by default
    assert [c for c in calls if not c[2] and c[1] == "torch.load"] == []
    assert not any("allow_pickle=True" in text for text in _sources().values())


def test_no_remote_code_of_checkpoints() -> None:
    for path, text in _sources().items():
        assert "trust_remote_code=True" not in text, path


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
