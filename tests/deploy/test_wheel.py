"""scripts/check_wheel.py finds what is wrong with a wheel; scripts/release runs it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.panels import ROOT

_SPEC = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
assert _SPEC is not None and _SPEC.loader is not None
check_wheel = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_wheel)

NAME = "radixlm-0.2.0-cp311-cp311-manylinux_2_28_x86_64.whl"
EXTENSION = "radixlm/_cpu.cpython-311-x86_64-linux-gnu.so"
RECORD = "radixlm-0.2.0.dist-info/RECORD"


def _wheel(folder: Path, changes: dict[str, bytes | None], name: str = NAME) -> Path:
    files: dict[str, bytes | None] = {f"radixlm/{name}": b"x" for name in check_wheel.NEEDED}
    files |= {EXTENSION: b"ELF", "radixlm-0.2.0.dist-info/licenses/LICENSE": b"Apache"} | changes
    lines = [f"{RECORD},,"]
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file, data in files.items():
            if data is not None:
                wheel.writestr(file, data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                lines.append(f"{file},sha256={digest.decode()},{len(data)}")
        wheel.writestr(RECORD, "\n".join(lines))
    return folder / name


def test_a_whole_wheel_passes(tmp_path: Path) -> None:
    assert check_wheel.faults(_wheel(tmp_path, {"radixlm/testing.py": b""})) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"radixlm/py.typed": None}, "radixlm/py.typed is missing"),
        ({"radixlm/tests/test_a.py": b""}, "radixlm/tests/test_a.py does not belong here"),
        ({"radixlm/kernel.cpp": b""}, "radixlm/kernel.cpp does not belong here"),
        ({"zoo/a": b""}, "top level 'zoo' is not ours"),
        ({"radixlm-0.2.0.dist-info/licenses/LICENSE": None}, "the licence is missing"),
        ({EXTENSION: None}, "the extension _cpu is missing"),
        ({EXTENSION: b"libgomp-24e2ab19.so.1\0"}, "a second OpenMP runtime"),
        (
            {f"{check_wheel.VENDOR}/lock.json": b'{"packages": {"htm": {"licence": "MIT"}}}'},
            "the licence of htm is missing",
        ),
        ({"radixlm/a": b"version https://git-lfs.github.com/spec/v1"}, "a Git LFS pointer"),
    ],
)
def test_each_fault_is_found(tmp_path: Path, changes: dict[str, bytes | None], fault: str) -> None:
    found = check_wheel.faults(_wheel(tmp_path, changes))
    assert len(found) == 1 and fault in found[0]


def test_a_wheel_that_auditwheel_has_not_seen_is_refused(tmp_path: Path) -> None:
    path = _wheel(tmp_path, {}, "radixlm-0.2.0-cp311-cp311-linux_x86_64.whl")
    assert check_wheel.faults(path) == [
        "the tag is linux, not manylinux: auditwheel has not repaired it"
    ]


HIDDEN = """
import ctypes
whole = ctypes.CDLL
ctypes.CDLL = lambda name, mode=0, **options: whole(name, ctypes.RTLD_LOCAL, **options)
import torch
ctypes.CDLL = whole
assert not hasattr(whole(None), "GOMP_parallel")
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="as here", marks=pytest.mark.slow),
        pytest.param(HIDDEN, id="torch hides its runtime"),
    ],
)
def test_the_extension_here_brings_no_openmp_runtime(before: str) -> None:
    """One runtime in the process: torch's, also where torch keeps it to itself as on Arm."""
    code = before + (
        "import radixlm.kernels.cpu as cpu, re\n"
        "if cpu.available:\n"
        "    maps = open('/proc/self/maps').read()\n"
        "    print(*{line.split()[-1] for line in maps.splitlines()"
        " if re.search('lib(gomp|omp|iomp5)', line)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if not (loaded := done.stdout.split()):
        assert not list((ROOT / "src" / "radixlm").glob("_cpu*.so")), "it could not be imported"
        pytest.skip("the extension is not built")
    assert len(loaded) == 1 and "torch" in loaded[0], loaded
