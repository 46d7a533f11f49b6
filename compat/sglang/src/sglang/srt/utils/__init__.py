"""The functions of ``sglang.srt.utils`` that programs use."""

from __future__ import annotations

import os
import random
import resource
import signal
import uuid
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from select import select
from typing import Any

from radixlm.base.lazy import load
from radixlm.multimodal.fetch import FetchRules, fetch
from sglang.srt.utils.network import get_open_port as get_open_port
from sglang.srt.utils.network import is_port_available as is_port_available

_TRUE = ("1", "true", "yes", "y")


def _children(pid: int) -> Iterable[int]:
    """The processes below one, deepest first."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _children(int(child))
            yield int(child)


def kill_process_tree(
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    wait_timeout: float | None = None,
) -> None:
    """Kill a process and those below it; of this process, or of None, only those below.

    With ``wait_timeout`` it returns when they have ended; RuntimeError after so many seconds."""
    parent = os.getpid() if parent_pid is None else parent_pid
    pids = [pid for pid in _children(parent) if pid != skip_pid]
    if include_parent and parent != os.getpid():
        pids.append(parent)
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            if wait_timeout is not None and not select([handle], [], [], wait_timeout)[0]:
                raise RuntimeError(f"process {pid} has not ended within {wait_timeout} s")
            os.close(handle)


def is_cuda() -> bool:
    """Whether torch was built for NVIDIA and finds a GPU."""
    torch: Any = load("torch:__dict__")
    return torch["version"].cuda is not None and bool(torch["cuda"].is_available())


def is_cuda_alike() -> bool:
    """As ``is_cuda``: RadixLM runs on no other kind of GPU."""
    return is_cuda()


def is_hip() -> bool:
    """RadixLM does not run on AMD's GPUs."""
    return False


def is_npu() -> bool:
    """RadixLM does not run on Ascend's NPUs."""
    return False


def is_xpu() -> bool:
    """RadixLM does not run on Intel's GPUs."""
    return False


def is_cpu() -> bool:
    """Whether there is no GPU to run on."""
    return not is_cuda()


def get_device(device_id: int | None = None) -> str:
    """The value of ``--device`` on this machine, with the GPU's number if one is given."""
    if not is_cuda():
        return "cpu"
    return "cuda" if device_id is None else f"cuda:{device_id}"


def get_device_count() -> int:
    """How many GPUs there are."""
    return int(load("torch.cuda:device_count")()) if is_cuda() else 0


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Whether an environment variable is set to true."""
    return os.environ.get(name, default).lower() in _TRUE


def get_int_env_var(name: str, default: int = 0) -> int:
    """The number of an environment variable; ``default`` if it is none."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def set_random_seed(seed: int) -> None:
    """Seed random, numpy and torch."""
    random.seed(seed)
    load("numpy:random").seed(seed)
    load("torch:manual_seed")(seed)


def load_image(image_file: Any) -> tuple[Any, None]:
    """(the PIL image, None) of a file's path, an address, a data URI, base64, or bytes."""
    image = load("PIL.Image:open")
    if isinstance(image_file, (str, Path)) and os.path.exists(image_file):
        return image(image_file), None
    if isinstance(image_file, str):
        rules = FetchRules(allow_private=True, folders=(Path("/"),))
        image_file = fetch(image_file, rules, "load_image")
    return (image(BytesIO(image_file)) if isinstance(image_file, bytes) else image_file), None


def random_uuid() -> str:
    """A new id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the number of files that may be open, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
