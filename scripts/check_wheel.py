"""What a wheel must hold and must not: ``python scripts/check_wheel.py WHEEL``.

Prints its size and tags; ends with status 1 and a line for each fault. Needs Python alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

MAX_MB = 40.0  # of the file; PyPI takes 100
PACKAGE = "radixlm"
NEEDED = (
    "py.typed",
    "assets/ui/index.html",
    "assets/evals/bundled.jsonl",
    "arch/config_defaults.json",
    "weights/gguf_grids.safetensors",
    *(
        f"assets/{model}/{name}"
        for model in ("radix-tiny", "radix-tiny-draft", "radix-tiny-eagle3")
        for name in ("config.json", "model.safetensors")
    ),
)
VENDOR = f"{PACKAGE}/assets/ui/vendor"
LICENSE = re.compile(r"\.dist-info/licenses/LICENSE$")
EXTENSION = re.compile(rf"^{PACKAGE}/_cpu[^/]*\.(so|pyd)$")
UNWANTED = re.compile(r"(^|/)(tests?|__pycache__|\.git)(/|$)|\.(pyc|cpp|h|orig|rej)$|~$")


def faults(path: Path) -> list[str]:
    """What is wrong with the wheel at ``path``, a line each."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        found = [f"{PACKAGE}/{name} is missing" for name in NEEDED
                 if f"{PACKAGE}/{name}" not in names]  # fmt: skip
        found += [f"{name} does not belong here" for name in names if UNWANTED.search(name)]
        tops = {name.partition("/")[0] for name in names}
        found += [f"top level {top!r} is not ours" for top in sorted(tops)
                  if top != PACKAGE and not top.startswith(f"{PACKAGE}-")]  # fmt: skip
        if not any(LICENSE.search(name) for name in names):
            found.append("the licence is missing")
        found += _faults_of_files(wheel)
        if f"{VENDOR}/lock.json" in names:
            packages = json.loads(wheel.read(f"{VENDOR}/lock.json"))["packages"]
            found += [f"the licence of {name} is missing" for name, one in packages.items()
                      if "tests only" not in one["licence"]
                      and f"{VENDOR}/LICENSE.{name}.txt" not in names]  # fmt: skip
    if not (extensions := [name for name in names if EXTENSION.match(name)]):
        found.append("the extension _cpu is missing: was there a C++ compiler?")
    elif len(extensions) > 1:
        found.append(f"{len(extensions)} extensions: {extensions}")
    if extensions and "-linux_" in path.name:
        found.append("the tag is linux, not manylinux: auditwheel has not repaired it")
    if (size_mb := path.stat().st_size / 1e6) > MAX_MB:
        found.append(f"{size_mb:.1f} MB are more than {MAX_MB:.0f}")
    return found


def _faults_of_files(wheel: zipfile.ZipFile) -> list[str]:
    """Files that differ from RECORD, Git LFS pointers, paths of the building machine."""
    found = []
    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    digests = dict(line.rsplit(",", 2)[:2] for line in wheel.read(record).decode().splitlines())
    for name in wheel.namelist():
        if name.endswith("/"):
            continue
        data = wheel.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name != record and digests.get(name) != f"sha256={digest}":
            found.append(f"{name} differs from RECORD")
        if data.startswith(b"version https://git-lfs"):
            found.append(f"{name} is a Git LFS pointer")
        if EXTENSION.match(name):
            found += _faults_of_extension(name, data)
    return found


def _faults_of_extension(name: str, data: bytes) -> list[str]:
    """It links no OpenMP runtime: torch's is used."""
    libraries = re.findall(rb"lib(?:gomp|omp|iomp5)[-.\w]*\.so[.\d]*", data)
    return [f"{name} brings a second OpenMP runtime ({one.decode()})" for one in libraries]


def main() -> int:
    """Check the wheel that the command line names."""
    path = Path(sys.argv[1])
    found = faults(path)
    with zipfile.ZipFile(path) as wheel:
        infos = wheel.infolist()
    installed = sum(info.file_size for info in infos) / 1e6
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, installed {installed:.1f} MB, "
          f"{len(infos)} files")  # fmt: skip
    for line in found:
        print(f"  {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
