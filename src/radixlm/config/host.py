"""Facts about the machine and the model that option defaults depend on."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from radixlm.base import env

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What ``resolve`` needs to know.

    device        "cuda" or "cpu": the best that this machine has
    num_cpus      cores that this process may use
    memory_bytes  memory that this process may use, on the host
    model         None while the model is unknown; otherwise any of context_len (tokens),
                  is_moe, has_window, vocab (entries), architecture
    seed          what --random-seed becomes when unset
    """

    device: str
    num_cpus: int
    memory_bytes: int
    model: Mapping[str, Any] | None = None
    seed: int = 0
    may_exceed_context: bool = field(default=False)
    """Whether --context-length may exceed the model's (RADIXLM_ALLOW_LONGER_CONTEXT)."""


def read_host_info(model: Mapping[str, Any] | None = None) -> HostInfo:
    """The facts about this machine, without importing torch."""
    return HostInfo(
        device="cuda" if has_cuda() else "cpu",
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=host_memory_bytes(),
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


def host_memory_bytes(limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Bytes of memory, or of the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            total = min(total, int(text)) if text.isdecimal() else total
    return total
