"""build.sh calls scripts that exist with flags that they have, and goes on where it is told to."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "src/radixlm/assets/radix-tiny"


def lines_of(out: Path, *stages: str, **variables: str) -> list[str]:
    """The commands that build.sh would run."""
    done = subprocess.run(
        ["sh", "zoo/build.sh", *stages],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", "OUT": str(out), **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("begun", ["", BASE])
def test_every_command_has_a_script_with_its_flags(begun: str, tmp_path: Path) -> None:
    lines = lines_of(tmp_path, FROM=begun)
    assert {"train", "lora", "pooled", "reward", "eagle", "vision", "evaluate", "speculation"} == {
        line.split()[0].removeprefix("zoo/").removesuffix(".py") for line in lines
    }
    for line in lines:
        script, *words = line.split()
        text = (ROOT / script).read_text()
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in text, line
        for folder in re.findall(r"--begun (zoo/models/\S+)", line):
            assert (ROOT / folder).is_dir()


def test_stages_are_named_and_go_on_from_what_is_shipped(tmp_path: Path) -> None:
    new = lines_of(tmp_path, "eagle", SCALE="0.5")
    on = lines_of(tmp_path, "eagle", SCALE="0.5", FROM=BASE)
    assert len(new) == len(on) == 1
    assert "--minutes 4 " in new[0]
    assert "--begun" not in new[0]
    assert "--minutes 2 " in on[0]
    assert on[0].endswith("--begun zoo/models/radix-tiny-eagle3")
