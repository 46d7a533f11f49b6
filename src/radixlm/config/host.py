"""Facts about the machine and the model that option defaults depend on."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from radixlm.base import env
from radixlm.base.cores import num_cores

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What ``resolve`` needs to know.

    device    "cuda" or "cpu": the best that this machine has
    num_cpus  cores that this process may use
    model     None while the model is unknown; otherwise any of context_len (tokens),
              is_moe, has_window, vocab (entries), architecture
    seed      what --random-seed becomes when unset
    """

    device: str
    num_cpus: int
    model: Mapping[str, Any] | None = None
    seed: int = 0
    may_exceed_context: bool = field(default=False)
    """Whether --context-length may exceed the model's (RADIXLM_ALLOW_LONGER_CONTEXT)."""


def read_host_info(model: Mapping[str, Any] | None = None) -> HostInfo:
    """The facts about this machine, without importing torch."""
    return HostInfo(
        device="cuda" if has_cuda() else "cpu",
        num_cpus=num_cores(),
        model=None if model is None else MappingProxyType(dict(model)),
        seed=secrets.randbelow(2**31),
        may_exceed_context=env.ALLOW_LONGER_CONTEXT.get(),
    )


def has_cuda(driver: Path = Path("/dev/nvidiactl")) -> bool:
    """Whether an NVIDIA driver is there, visible, and torch was built for it."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return False
    visible = env.CUDA_VISIBLE_DEVICES.get() not in ("", "-1")
    return driver.exists() and visible and not torch_version.endswith("+cpu")


def cgroup_limits(own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> tuple[Path, ...]:
    """The files that limit the memory of this process: those of its control group and of all above
    it, of version 2 or 1."""
    found = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    for line in own.read_text(encoding="utf-8").splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (root / "memory", found[1].name) if controllers else (root, found[0].name)
        inside = base / group.lstrip("/")
        found += [one / name for one in (inside, *inside.parents) if base in one.parents]
    return tuple(found)


def total_memory_bytes(total_bytes: int, limits: tuple[Path, ...] | None = None) -> int:
    """Of ``total_bytes`` of the machine, what the container may have."""
    texts = map(_text, cgroup_limits() if limits is None else limits)
    return min([total_bytes, *(int(text) for text in texts if text.isdecimal())])


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def free_memory_bytes(free_bytes: int, limits: tuple[Path, ...] | None = None) -> int:
    """Of ``free_bytes`` of the machine, what the container's limit leaves: pages of files, which
    the system gives up when it needs room, count as free."""
    for path in cgroup_limits() if limits is None else limits:
        text = _text(path)
        usage = path.with_name(_CGROUP_USAGE[path.name]) if path.name in _CGROUP_USAGE else path
        stat = path.with_name("memory.stat")
        if not text.isdecimal() or usage == path or not (usage.exists() and stat.exists()):
            continue
        rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
        files = sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file"))
        used = int(usage.read_text(encoding="ascii")) - files
        free_bytes = min(free_bytes, max(0, int(text) - used))
    return free_bytes
