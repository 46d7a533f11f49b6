"""``radixlm check-env``: the machine, the installed packages and the kernels that will run."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from radixlm import __version__
from radixlm.base.cores import num_cores
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.system_memory import system_memory
from radixlm.base.units import format_bytes

PACKAGES = (
    "torch numpy tokenizers safetensors fastapi uvicorn pydantic msgspec pyzmq orjson llguidance "
    "xgrammar transformers triton openai"
).split()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def facts() -> dict[str, Any]:
    """Everything that is printed, as data."""
    torch = load("torch:version")
    kernels = load("radixlm.kernels.cpu:describe")()
    memory = system_memory()
    return {
        "radixlm": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "cores": num_cores(),
        "memory": format_bytes(memory.total),
        "memory available": format_bytes(memory.available),
        "cuda": torch.cuda or "none",
        "gpus": load("torch:cuda").device_count(),
        "CPU kernels": kernels,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def main(argv: list[str]) -> int:
    """Print the facts; --json prints one object."""
    if {"-h", "--help"} & set(argv):
        print("usage: radixlm check-env [--json]")
        return 0
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"check-env takes no {unknown[0]!r}, only --json")
    values = facts()
    if "--json" in argv:
        print(json.dumps(values, indent=2, default=str))
        return 0
    for name, value in values.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, inner in value.items():
                print(f"  {key:<16} {inner}")
        else:
            print(f"{name:<18} {value}")
    return 0
