"""A deferred module is run when something looks into it, or when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAIN = """
import sys
from radixlm.base.deferred import defer, run_deferred
defer("late")
import early
assert "late ran" not in sys.modules and not early.late.__dict__.get("value")
"""


@pytest.mark.parametrize("look", ["early.late.value", "run_deferred('late').value"])
def test_it_runs_once_and_late(look: str, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import late\n")
    (tmp_path / "late.py").write_text("import sys\nsys.modules['late ran'] = 1\nvalue = 3\n")
    checks = f"assert {look} == 3 and 'late ran' in sys.modules\nimport late\nassert late.value\n"
    (tmp_path / "main.py").write_text(MAIN + checks)
    subprocess.run([sys.executable, "main.py"], cwd=tmp_path, check=True, timeout=60)


def test_an_engine_imports_torch_without_what_only_compilers_need() -> None:
    code = (
        "import sys\n"
        "from radixlm.base.deferred import defer, run_deferred\n"
        "defer('torch._meta_registrations')\n"
        "import radixlm.engine.worker, torch\n"
        "assert type(sys.modules['torch._meta_registrations']).__name__ == '_Deferred'\n"
        "x = torch.empty(2, device='meta')\n"
        "run_deferred('torch._meta_registrations')\n"
        "assert torch.where(x > 0, x, 0.0).shape == (2,)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_processor_of_a_user_finds_all_of_torch(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(
        "import torch\nclass Drawing:\n    def __init__(self):\n"
        "        self.generator = torch.Generator()\n"
        "    def __call__(self, logits, rows):\n        return logits\n"
    )
    code = (
        "from types import SimpleNamespace as Facts\n"
        "from radixlm.base.deferred import TORCH_SHAPES, defer\n"
        "defer(TORCH_SHAPES)\n"
        "import torch\n"
        "from radixlm.config.parser import parse\n"
        "from radixlm.engine.parts import make_processors\n"
        "config, _ = parse(['--skip-tokenizer-init', '--logit-processor', 'x=drawing:Drawing'])\n"
        "make_processors(config, Facts(decoder=Facts(vocab=8), eos_ids=(1,), folder='.'))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
