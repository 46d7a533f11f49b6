"""One configuration of a kernel, and its compilation without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from radixlm.base.errors import RadixError
from radixlm.base.record import Record, field

MAX_SHARED_BYTES = 227 * 1024  # sm_90; sm_80 has 163 KiB
MAX_SHARED_BYTES_SM80 = 163 * 1024
NEWEST = 999  # of architectures
_WARP = 32
# of activations, as triton writes them
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
MIN_ARCH = {"*fp8e4nv": 89}  # of pointers that older GPUs do not know
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_IS_INTEGER = re.compile(r"[iu]\d+")


class Variant(Record):
    """One configuration of a kernel.

    ``signature``: the type of every run-time parameter, as triton writes them ("*bf16", "i32",
    "fp32"). Pointers are taken as aligned to 16 bytes, as torch's are ("*bf16:1": not); integers
    are not ("i32:16": a multiple of 16). ``constants``: the tl.constexpr parameters, and
    parameters that are always None or 1. ``wgmma``: the PTX for sm_90 must use it. ``min_arch``:
    the oldest GPU on which it is chosen (89 for fp8 e4m3), ``max_arch`` the newest. ``options``:
    further options of the compiler.
    """

    name: str
    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    wgmma: bool = False
    min_arch: int = 80
    max_arch: int = NEWEST
    options: Mapping[str, Any] = field(default_factory=dict)


class Compiled(Record):
    """Of one variant: registers a thread, bytes of local memory a thread (spills and stack),
    shared memory a block."""

    registers: int
    spills: int
    shared_bytes: int
    ptx: str


def compiled(variant: Variant, arch: int = 90) -> Compiled:
    """Compile for ``sm_<arch>``; needs neither a GPU nor a driver, but a process in which
    kernels are not interpreted."""
    kernel = triton.compile(
        ast_source(variant),
        target=GPUTarget("cuda", arch, _WARP),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            **variant.options,
        },
    )
    registers, local_bytes = _usage(kernel.asm["cubin"])
    return Compiled(registers, local_bytes, kernel.metadata.shared, kernel.asm["ptx"])


def ast_source(variant: Variant) -> ASTSource:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        kind, _, alignment = variant.signature[name].partition(":")
        signature[name] = kind
        if (alignment or ("1" if _IS_INTEGER.fullmatch(kind) else "16")) == "16":
            if kind.startswith("*") or _IS_INTEGER.fullmatch(kind):
                attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(variant.kernel, signature, dict(variant.constants), attributes)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(answer)
    if found is None:
        raise RadixError(f"cuobjdump tells no registers: {answer!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
