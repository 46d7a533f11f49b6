"""Writes tests/weights/fixtures/<library>.safetensors: weights as a quantization library stores
them, and the numbers that the same library makes of them.

    pip install --no-deps bitsandbytes
    python scripts/make_quant_fixtures.py [LIBRARY]

Tensors are "<case>/<name>" and "<case>/expected"; the file's metadata name the library's version.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "weights" / "fixtures"
Case = dict[str, Tensor]


def original(num_out: int = 32, num_in: int = 128) -> Tensor:
    """A bfloat16 matrix with rows of different size."""
    generator = torch.Generator().manual_seed(25)
    rows = torch.randn(num_out, num_in, generator=generator)
    return (rows * torch.linspace(0.02, 0.2, num_out)[:, None]).bfloat16()


def bitsandbytes() -> dict[str, Case]:
    """4 bits by blocks, also with quantized scales, and LLM.int8."""
    functional = import_module("bitsandbytes.functional")
    cases: dict[str, Case] = {}
    for kind, block, is_nested in (("nf4", 64, False), ("nf4", 64, True), ("fp4", 128, False)):
        packed, state = functional.quantize_4bit(
            original(), blocksize=block, compress_statistics=is_nested, quant_type=kind
        )
        stored = {"weight": packed, **prefixed("weight", state.as_dict(packed=True))}
        wide = functional.dequantize_4bit(packed, state)
        cases[f"{kind}-nested" if is_nested else kind] = {**stored, "expected": wide}
    values, most, _ = functional.int8_vectorwise_quant(original().half())
    wide = functional.int8_vectorwise_dequant(values, most)
    return {**cases, "int8": {"weight": values, "SCB": most, "expected": wide.bfloat16()}}


def prefixed(prefix: str, tensors: Case) -> Case:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


MAKERS: dict[str, Callable[[], dict[str, Case]]] = {"bitsandbytes": bitsandbytes}


def main(libraries: list[str]) -> None:
    """Write the files of these libraries, or of all."""
    FOLDER.mkdir(exist_ok=True)
    for library in libraries or MAKERS:
        tensors = {
            f"{case}/{name}": tensor.contiguous()
            for case, parts in MAKERS[library]().items()
            for name, tensor in parts.items()
        }
        file = FOLDER / f"{library}.safetensors"
        save_file(tensors, file, {"made_by": f"{library} {version(library)}"})
        print(file, file.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
