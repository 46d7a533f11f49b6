"""Write tests/weights/fixtures/{modelopt,compressed}.safetensors: weights as ModelOpt 0.47 and
compressed-tensors (0.20; 2:4 by 0.9.4) store them, and the numbers that they make of them.

``python scripts/make_fp4_fixtures.py NAME`` in an environment with that library alone.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parents[1] / "tests/weights/fixtures"
Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    """bfloat16 [32, 128], with groups of very different sizes."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(32, 128, generator=generator) * 0.05
    sizes = torch.exp2(torch.randint(-6, 3, (32, 8, 1), generator=generator).float())
    return (rows.view(32, 8, 16) * sizes).view(32, 128).bfloat16()


def modelopt_nvfp4() -> Tensors:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor  # noqa: PLC0415

    stored, scale, scale_2 = NVFP4QTensor.quantize(weight(), 16)
    numbers = stored.dequantize(
        dtype=torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    return {
        "weight": stored._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2,
        "input_scale": torch.tensor(0.5), "expected": numbers,
    }  # fmt: skip


def compressed_fp4(name: str) -> Tensors:
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415
    from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16  # noqa: PLC0415

    is_mx = name == "mxfp4"
    scheme = QuantizationScheme(targets=["Linear"], **(MXFP4A16 if is_mx else NVFP4A16))
    rows = weight()
    largest = rows.view(32, -1, 32 if is_mx else 16).abs().amax(-1).float()
    state = {"weight": rows}
    if is_mx:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    else:
        number = 448.0 * 6.0 / rows.abs().amax().float()
        scale = (largest / 6.0 * number).to(torch.float8_e4m3fn).float()
        state |= {"weight_scale": scale, "weight_global_scale": number.reshape(1)}
    compressor = BaseCompressor.get_value_from_registry(f"{name}-pack-quantized")
    stored = compressor.compress(state, scheme)
    stored["expected"] = compressor.decompress(stored, scheme)["weight"].bfloat16()
    return stored


def compressed_sparse() -> Tensors:
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import (  # noqa: PLC0415
        Sparse24BitMaskTensor,
    )

    stored = Sparse24BitMaskTensor.from_dense(weight())
    return stored.dict("x.weight") | {"expected": stored.decompress()}


CASES: dict[str, dict[str, Callable[[], Tensors]]] = {
    "modelopt": {"nvfp4": modelopt_nvfp4},
    "compressed": {
        "nvfp4": lambda: compressed_fp4("nvfp4"), "mxfp4": lambda: compressed_fp4("mxfp4")
    },
    "sparse": {"sparse24": compressed_sparse},
}  # fmt: skip

if __name__ == "__main__":
    for case, make in CASES[sys.argv[1]].items():
        file = FIXTURES / f"{'compressed' if sys.argv[1] == 'sparse' else sys.argv[1]}.safetensors"
        held = load_file(file) if file.exists() else {}
        held |= {f"{case}/{k.removeprefix('x.')}": v.contiguous() for k, v in make().items()}
        save_file(held, file)
