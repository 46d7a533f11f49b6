"""Finds 32-bit integers that may overflow in kernels, without running them: it propagates the
bounds of parameters through a kernel's intermediate code. Run as a program, it prints a line of
JSON for each operation whose result may be too large. See test_int32_overflow.py.

A pool of 60 GB has more than 2^31 elements, and so may tokens times channels of a step. Such
offsets must be computed in 64 bits.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator

import triton
import triton.language as tl
from tests.kernels.triton import gate
from tests.kernels.triton.compiler import Variant, ast_source
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

LARGEST = 2**31 - 1
TOKENS = 2**20  # of a step, times experts per token
WIDTH = 2**18  # channels, strides of rows, vocabularies
SMALL = 2**12
CONTEXT = 2**21
CARRIED = 2**22  # counts in loops and sums: rows, blocks, positions of a context
# Bounds of parameters that are not widths, by name, in one kernel or in all. For
# pointers: bounds of the loaded values.
BOUNDS = {
    **dict.fromkeys(("num_rows", "num_slots", "num_tokens", "slots_ptr", "num_blocks"), TOKENS),
    **dict.fromkeys(("query_start", "start_ptr", "num_units", "unit_row", "unit_number"), TOKENS),
    **dict.fromkeys(("kv_len", "split_len", "table_stride"), CONTEXT),
    **dict.fromkeys(("window", "chunk"), 2**30),
    **dict.fromkeys(("page_table", "size"), 2**31 - 1),
    **dict.fromkeys(("splits", "num_weights", "segments", "rank_blocks"), 2**9),
    **dict.fromkeys(("num_chunks", "num_parts", "top_k", "tiles", "group_size", "steps"), SMALL),
    **dict.fromkeys(("group", "k_heads", "q_heads", "half", "weight_stride"), SMALL),
    **dict.fromkeys(("num_experts", "owners_ptr"), SMALL),
    **dict.fromkeys(("k_head_stride", "v_head_stride", "q_head_stride"), SMALL),
    **dict.fromkeys(("q_head", "k_head", "v_head", "k_pool_head", "v_pool_head"), SMALL),
    "num_in": 13_000,  # with WIDTH outputs: 3.4e9 weights
    "part_ptr": WIDTH,
    "block_size": 128,
    "split_kernel.num_rows": 16,
    "sum_kernel.num_rows": 16,
    "sum_kernel.num_parts": 2**7,
}
LEAST = {"group": 32}
# indices of work units, for which the host allocated memory
BOUNDED = ("plan_kernel",)
# programs along x, y, z if not (TOKENS, SMALL, SMALL)
GRIDS = {
    "gemm_kernel": (2**20, 1, 1),
    "pointwise_kernel": (2**31 - 1, 1, 1),
    "dequantize_kernel": (2**13, 406, 1),
    "split_kernel": (2**13, 64, 1),
    "sum_kernel": (16, 2**10, 1),
    "route_kernel": (2**17, 1, 1),
    **dict.fromkeys(("shrink_kernel", "expand_kernel", "store_kernel"), (2**16, 2**9, 2**9)),
}
_RESULT = re.compile(r"\s*(%[\w]+)(?::(\d+))? = (.*)")
_NAME = re.compile(r"%[\w]+(?:#\d+)?")
_PARAMETER = re.compile(r"(%[\w]+): (!tt\.ptr<[^>]*>|[if]\d+)")
_CONSTANT = re.compile(r"arith.constant (?:dense<)?(-?\d+)>? :")
_WATCHED = ("arith.muli", "arith.addi", "arith.subi", "arith.shli")
_MOVES = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast")
Range = tuple[int, int]


def intermediate(variant: Variant) -> str:
    """The kernel's code before it is laid out for threads."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    source = ast_source(variant)
    sizes = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options = backend.parse_options({**sizes, **variant.options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    made = source.make_ir(
        GPUTarget("cuda", 90, 32), options, functions, backend.get_module_map(), context
    )
    return str(backend.make_ttir(made, {}, options, 90))


class Ranges:
    """Bounds of each value, and values that may exceed 32 bits on the way to an address."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._grid = GRIDS.get(kernel, (TOKENS, SMALL, SMALL))
        self._of: dict[str, Range] = {}
        self._pointer: dict[str, str] = {}  # value -> the parameter that it points into
        self._made_of: dict[str, list[str]] = {}
        self._quotients: set[str] = set()
        self._offsets: list[str] = []
        self._large: dict[str, str] = {}

    def read(self, code: str) -> list[str]:
        """All operations that may overflow."""
        for line in code.splitlines():
            text = line.split(" loc(")[0].rstrip()
            if "tt.func" in line:
                self._parameters(line)
            elif text.lstrip().startswith("^bb"):
                for name, _ in _PARAMETER.findall(text):
                    self._of[name] = (-CARRIED, CARRIED)
            elif (match := _RESULT.match(text)) is not None:
                self._line(match[1], int(match[2] or 0), match[3])
        seen, left = set[str](), list(self._offsets)
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += self._made_of.get(name, [])
        return [text for name, text in self._large.items() if name in seen]

    def _parameters(self, line: str) -> None:
        for name, kind in _PARAMETER.findall(line):
            if kind.startswith("!"):
                self._pointer[name] = name[1:]
            else:
                self._of[name] = (LEAST.get(name[1:], 0), self._limit(name[1:]))

    def _limit(self, parameter: str, default: int = WIDTH) -> int:
        return BOUNDS.get(f"{self._kernel}.{parameter}", BOUNDS.get(parameter, default))

    def _line(self, result: str, num: int, text: str) -> None:
        operation = re.split(r"[ (]", text)[0].strip('"')
        names = _NAME.findall(text)
        results = [result, *(f"{result}#{index}" for index in range(num))]
        if operation in ("scf.for", "scf.while", "scf.if"):
            return self._region(operation, results, names)
        if operation in _MOVES and names[0] in self._pointer:
            self._pointer[result] = self._pointer[names[0]]
            self._offsets += names[1:2]
            return None
        is_wide = re.search(r"\bi64|xi64", text.rpartition(" : ")[2].rpartition(" to ")[2])
        low, high = self._range(operation, text, names, bool(is_wide))
        if operation in _WATCHED and not is_wide and max(high, -low) > LARGEST:
            self._large[result] = f"{result} = {text} may be {max(high, -low):.3g}"
            low, high = max(low, -LARGEST), min(high, LARGEST)
        if operation == "arith.divsi":
            self._quotients.add(result)
        for name in results:
            self._of[name] = low, high
            self._made_of[name] = [] if operation == "tt.load" else names
        return None

    def _region(self, operation: str, results: list[str], names: list[str]) -> None:
        """A loop: its counter has the range of its bounds, carried values have that of counts."""
        if operation == "scf.for":
            counter, *ends = names[:3]
            (low, first), (_, last) = map(self._get, ends)
            self._of[counter] = min(0, low), max(first, last)
            self._made_of[counter] = ends
            names = names[4:]
        for name, start in zip(names[::2], names[1::2], strict=False):
            self._of[name] = (-CARRIED, CARRIED)
            self._made_of[name] = [start]
            if start in self._pointer:
                self._pointer[name] = self._pointer[start]
        for name in results:
            self._of[name] = (-CARRIED, CARRIED)

    def _get(self, name: str) -> Range:
        return self._of.get(name, (0, 0))

    def _range(self, operation: str, text: str, names: list[str], is_wide: bool) -> Range:
        values = [self._get(name) for name in names]
        if operation == "arith.constant":
            match = _CONSTANT.match(text)
            value = int(match[1]) if match else 0
            return (value, value) if abs(value) < 2**62 else (0, 0)
        if operation == "tt.get_program_id":
            return 0, self._grid["xyz".index(text.split()[1])]
        if operation == "arith.cmpi":
            return -1, 1
        if operation == "tt.make_range":
            return 0, int(re.findall(r"end = (\d+)", text)[0])
        if operation == "tt.load":
            return -1, 2**40 if is_wide else self._limit(self._pointer.get(names[0], ""), CARRIED)
        if operation in ("tt.reduce", "tt.scan"):
            return -CARRIED, max([CARRIED, *(high for _, high in values)])
        return self._arithmetic(operation, values, names)

    def _arithmetic(self, operation: str, values: list[Range], names: list[str]) -> Range:
        if len(values) < 2:
            return values[0] if values else (0, 0)
        (a, b), (c, d) = values[:2]
        ends = a * c, a * d, b * c, b * d
        if operation == "arith.select":
            (a, b), (c, d) = values[1:3]
            return min(a, c), max(b, d)
        if operation == "arith.muli":
            factor = self._made_of.get(names[0], [])
            if len(factor) == 2 and factor[1] == names[1] and names[0] in self._quotients:
                return self._get(factor[0])  # x // y * y
            return min(ends), max(ends)
        ranges: dict[str, Range] = {
            "arith.addi": (a + c, b + d),
            "arith.subi": (a - d, b - c),
            "arith.shli": (a << min(40, max(0, d)), b << min(40, max(0, d))),
            "arith.remsi": (min(0, a), min(b, d)),
            "arith.andi": (0, min(b, d) if a >= 0 and c >= 0 else max(b, d)),
            "arith.divsi": (a // max(1, c), b // max(1, c)),
            "arith.maxsi": (max(a, c), max(b, d)),
            "arith.minsi": (min(a, c), min(b, d)),
        }
        return ranges.get(operation, (min(a, c), max(b, d)))


@triton.jit
def careless_kernel(x_ptr, x_stride, BLOCK: tl.constexpr):
    """Row times stride in 32 bits."""
    row = tl.program_id(0)
    tl.store(x_ptr + row * x_stride + tl.arange(0, BLOCK), 0.0)


@triton.jit
def careful_kernel(x_ptr, x_stride, BLOCK: tl.constexpr):
    """Row times stride in 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(x_ptr + row * x_stride + tl.arange(0, BLOCK), 0.0)


def examples() -> Iterator[Variant]:
    """One kernel that is reported and one that is not."""
    types = {"x_ptr": "*fp32", "x_stride": "i32"}
    for kernel in (careless_kernel, careful_kernel):
        yield Variant(kernel.fn.__name__, kernel, types, {"BLOCK": 64}, 4, 3)


def chosen(modules: Iterable[str], is_all: bool) -> Iterator[Variant]:
    """Variants of some modules: all for sm_90, or those of `gate.representative`."""
    for module in modules:
        jobs = gate.every(module) if is_all else gate.representative(module)
        for index in dict.fromkeys(index for _, index, arch in jobs if arch == 90):
            if gate.variants_of(module)[index].kernel.fn.__name__ not in BOUNDED:
                yield gate.variants_of(module)[index]


def main() -> None:
    arguments = sys.argv[1:]
    modules = [name for name in arguments if not name.startswith("--")]
    found = examples() if "--examples" in arguments else chosen(modules, "--all" in arguments)
    for variant in found:
        name = variant.kernel.fn.__name__
        print(json.dumps([variant.name, Ranges(name).read(intermediate(variant))]), flush=True)


if __name__ == "__main__":
    main()
