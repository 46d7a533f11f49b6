"""The verbs of ``radixlm bench``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from radixlm.bench.cli import VERBS, main


def test_help_lists_every_verb(capsys) -> None:
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


@pytest.mark.parametrize("verb", list(VERBS))
def test_each_verb_explains_itself(verb: str, capsys) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"radixlm bench {verb}" in shown
    assert "--output-file" in shown or verb == "compare"
    assert main([verb.replace("-", "_"), "--help"]) == 0


def test_an_unknown_verb_exits_with_2(capsys) -> None:
    assert main(["nonsense"]) == main(["longcontext"]) == 2
    assert "nonsense" in (shown := capsys.readouterr().err)
    assert "did you mean 'long-context'?" in shown


def test_help_and_the_client_need_no_torch() -> None:
    code = (
        "import sys; from radixlm.bench.cli import main;"
        "main(['--help']); main(['serve', '--help']);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
