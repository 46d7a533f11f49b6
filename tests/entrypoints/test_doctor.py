"""`radixlm doctor` and `radixlm completion`."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.entrypoints import doctor
from radixlm.entrypoints.completion import choices, flags_of, main
from radixlm.entrypoints.completion import main as completion


def test_the_doctor_says_what_it_found(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(doctor, "read_bandwidth", lambda: 20e9)
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["what"] for row in told["findings"]} >= {"CPU kernels", "cores", "memory", "GPUs"}
    assert told["tokens_per_s"]["0.6B"]["16 bit"] == "17"
    assert doctor.main([]) == 0
    assert "20.0 GB/s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--json"):
        doctor.main(["--jsn"])


def test_what_is_wrong_has_advice() -> None:
    values = {
        "CPU kernels": {"available": False}, "cores": 1, "memory available": "1 GiB",
        "memory": "2 GiB", "gpus": 0, "packages": {"xgrammar": "not installed"},
    }  # fmt: skip
    found = {one.what: one for one in doctor.findings(values)}
    assert "C++ compiler" in found["CPU kernels"].advice
    assert "radixlm[grammar]" in found["optional packages"].found


def test_large_models_are_said_to_be_too_large() -> None:
    table = doctor.estimates(20e9, 24 << 30)
    assert table["30B-A3B"]["16 bit"] == "too large" != table["30B-A3B"]["4 bit"]


def test_reading_takes_time() -> None:
    assert 0 < doctor.read_bandwidth(1 << 20, 2) < 1e15


def test_flags_of_verbs() -> None:
    chat = flags_of("chat", "radixlm.terminal.cli:main")
    assert {"--system", "--model-path", "--page-size"} <= chat
    assert flags_of("doctor", "radixlm.entrypoints.doctor:main") == {"--json"}
    assert "bfloat16" in choices()["--dtype"]


def words(script: str, *line: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in line)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(line) - 1}; _radixlm; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(capsys: Any) -> None:
    assert completion(["bash"]) == 0
    script = capsys.readouterr().out
    assert words(script, "radixlm", "rout") == ["router"]
    assert words(script, "radixlm", "serve", "--model-p") == ["--model-path"]
    assert words(script, "radixlm", "serve", "--dtype", "bf") == ["bfloat16"]
    assert words(script, "radixlm", "bench", "swe") == ["sweep"]


def test_other_shells(capsys: Any) -> None:
    for shell, says in (("zsh", "bashcompinit"), ("fish", "-l model-path")):
        assert main([shell]) == 0
        assert says in capsys.readouterr().out
    with pytest.raises(ConfigError, match="bash, zsh, fish"):
        main(["tcsh"])
