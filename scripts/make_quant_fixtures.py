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


def original(num_out: int = 16, num_in: int = 128) -> Tensor:
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
    cases["nf4"]["original"] = original()
    values, most, _ = functional.int8_vectorwise_quant(original().half())
    wide = functional.int8_vectorwise_dequant(values, most)
    return {**cases, "int8": {"weight": values, "SCB": most, "expected": wide.bfloat16()}}


def hqq() -> dict[str, Case]:
    """All numbers of bits, both axes, and rows with one scale."""
    torch_nn, core = torch.nn, import_module("hqq.core.quantize")
    cases: dict[str, Case] = {}
    for bits, group, axis in ((8, 64, 1), (4, 64, 1), (3, 64, 1), (2, 32, 1), (1, 32, 1),
                              (4, 64, 0), (4, None, 1)):  # fmt: skip
        layer = torch_nn.Linear(128, 16, bias=False).bfloat16()
        layer.weight.data.copy_(original())
        config = core.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        packed = core.HQQLinear(layer, config, compute_dtype=torch.bfloat16, device="cpu")
        stored = {k: v for k, v in packed.state_dict().items() if isinstance(v, Tensor)}
        cases[f"{bits}-{group}-{axis}"] = {**stored, "expected": packed.dequantize()}
    return cases


def torchao() -> dict[str, Case]:
    """Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor; the metadata go to a JSON file."""
    quant = import_module("torchao.quantization")
    flatten = import_module("torchao.prototype.safetensors.safetensors_support")
    configs = {
        "int8wo": quant.Int8WeightOnlyConfig(version=2),
        "int8dq": quant.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8wo": quant.Float8WeightOnlyConfig(),
        "int4": quant.IntxWeightOnlyConfig(torch.int4, quant.PerGroup(32)),
        "int2": quant.IntxWeightOnlyConfig(torch.int2, quant.PerGroup(64)),
        "int6": quant.IntxWeightOnlyConfig(torch.int6, quant.PerGroup(64)),
    }
    cases: dict[str, Case] = {}
    for name, config in configs.items():
        layer = torch.nn.Sequential(torch.nn.Linear(128, 16, bias=False).bfloat16())
        layer[0].weight.data.copy_(original())
        quant.quantize_(layer, config)
        stored, metadata = flatten.flatten_tensor_state_dict(layer.state_dict())
        metadata_of[f"torchao/{name}"] = metadata["0.weight"]
        parts = {part.removeprefix("0."): tensor for part, tensor in stored.items()}
        cases[name] = {**parts, "expected": layer[0].weight.dequantize().bfloat16()}
    return cases


metadata_of: dict[str, str] = {}


def prefixed(prefix: str, tensors: Case) -> Case:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


MAKERS: dict[str, Callable[[], dict[str, Case]]] = {
    "bitsandbytes": bitsandbytes,
    "hqq": hqq,
    "torchao": torchao,
}


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
        save_file(tensors, file, {"made_by": f"{library} {version(library)}", **metadata_of})
        print(file, file.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
