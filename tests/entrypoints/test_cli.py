"""The command line: unknown verbs and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_help_of_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--help"]) == 0
    assert "radixlm version" in capsys.readouterr().out


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_leaves_is_no_fault(buffered: str) -> None:
    """As with ``| head -1``: its end of the pipe is closed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "radixlm.entrypoints.cli", "--help"]
    env = os.environ | {"PYTHONUNBUFFERED": buffered}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "radixlm.entrypoints.cli", "--help"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"radixlm: [Errno 28] No space left on device\n"


def test_run_batch_keeps_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    text = '{"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": []}}'
    file.write_text(text)
    assert cli.main(["run-batch", str(file), "-o", f"{tmp_path}/./in.jsonl"]) == 2
    assert "is the input too" in capsys.readouterr().err and file.read_text() == text


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "2>&-"])
def test_processes_of_a_program_without_standard_files_have_them(
    closed: str, tmp_path: Path
) -> None:
    """An engine without standard error cannot tell of its crash, and did not start."""
    inner = "import os; [os.fstat(number) for number in range(3)]"
    code = (
        "import subprocess, sys; from radixlm.entrypoints.cli import main; main(['version']); "
        f"sys.exit(subprocess.run([sys.executable, '-c', {inner!r}], close_fds=True).returncode)"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0


def test_closed_standard_files_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["version"]) == 0
    with sys.stdin:
        assert sys.stdin.read() == ""


def test_ctrl_c_is_quiet_while_the_command_imports() -> None:
    code = (
        "import sys, radixlm.__main__ as command\n"
        "assert not {'typing', 'radixlm.base'} & (sys.modules.keys() - before)\n"
        "def interrupted(name): raise KeyboardInterrupt\n"
        "command.import_module = interrupted\n"
        "sys.exit(command.main())"
    )
    command = [sys.executable, "-c", f"import sys; before = {{*sys.modules}}\n{code}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_ctrl_c_does_not_wait_for_an_engine_that_loads() -> None:
    program = """if True:
        import atexit, threading
        from radixlm.entrypoints import cli
        threading.Thread(target=threading.Event().wait, name="engine", daemon=True).start()
        atexit.register(print, "waited")
        def interrupted(args):
            raise KeyboardInterrupt
        cli._run = interrupted
        raise SystemExit(cli.main())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
