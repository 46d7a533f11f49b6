"""The command line: unknown verbs and options."""

from __future__ import annotations

import pytest

from radixlm.entrypoints import cli
from radixlm.entrypoints.check_env import main as check_env


@pytest.mark.parametrize("argv", [["version", "now"], ["check-env", "--jsn"], ["--version", "-x"]])
def test_a_verb_refuses_unknown_options(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert argv[1] in said.err and not said.out


def test_a_wrong_verb_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sreve"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err


def test_the_usage_of_check_env_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_env(["--help"]) == 0
    assert "--json" in capsys.readouterr().out
