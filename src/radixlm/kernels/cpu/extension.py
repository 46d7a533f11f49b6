"""The extension module, imported after torch so that both share one OpenMP runtime.

``RADIXLM_CPU_ISA`` names an instruction set to use instead of the best one (for tests).
"""

import contextlib
import ctypes
import importlib
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from radixlm.base.errors import ConfigError

ISA_VARIABLE = "RADIXLM_CPU_ISA"

# dtype codes of csrc/common/simd.h
DTYPE_CODE = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


def _share_openmp() -> None:
    """Let the extension find torch's OpenMP runtime, since it links none. torch for Arm loads its
    own under a name that nothing else knows, where other libraries do not look."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    with contextlib.suppress(OSError):  # no /proc: not Linux
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        if found := re.search(r"(/\S*/lib(?:gomp|omp|iomp5)[-.]\S*)$", maps, re.MULTILINE):
            ctypes.CDLL(found[1], ctypes.RTLD_GLOBAL)


def _load() -> tuple[ModuleType | None, str]:
    # The name of the function used keeps the import above from looking unused: torch goes first.
    torch.get_num_threads()
    _share_openmp()
    try:
        module = importlib.import_module("radixlm._cpu")
    except ImportError as error:
        return None, f"radixlm._cpu cannot be imported ({error}); it is built by `pip install .`"
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted:
        if wanted not in module.supported_isas():
            names = ", ".join(module.supported_isas())
            raise ConfigError(f"{ISA_VARIABLE}={wanted}: not available here; choose one of {names}")
        module.select_isa(wanted)
    return module, ""


_module, reason = _load()
available = _module is not None
isa: str = "" if _module is None else _module.isa()


def native() -> Any:
    """The extension module. ConfigError when it is not there."""
    if _module is None:
        raise ConfigError(reason)
    return _module


def describe() -> dict[str, object]:
    """What ``radixlm check-env`` prints: instruction sets compiled, supported, used; threads."""
    if _module is None:
        return {"available": False, "reason": reason}
    return {
        "available": True,
        "isa": _module.isa(),
        "supported": _module.supported_isas(),
        "compiled": _module.compiled_isas(),
        "threads": _module.max_threads(),
    }


def set_num_threads(count: int) -> None:
    """Threads that a kernel may use at most; small work uses fewer."""
    native().set_max_threads(count)


def address(tensor: torch.Tensor | None) -> int:
    """The address of the first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
