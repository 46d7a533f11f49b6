"""What SGLang and vLLM save for ``--load-format sharded_state``."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from radixlm.quant.param import Param
from radixlm.weights.mapper import LoadableModel
from radixlm.weights.param_reader import ParamReader


def save_sharded_state(
    model: LoadableModel, reader: ParamReader, folder: Path, rank: int = 0
) -> None:
    """Write the parameters that ``reader`` gives for ``model`` to ``folder``. Of the model only
    names and shapes are read."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for layer_path, layer in model.layers():
        for name, param in layer.own_params().items():
            path = f"{layer_path}.{name}"
            filled = Param(param.shape, param.storage)
            filled.fill(reader.read(path, param), model.weight_dtype, torch.device("cpu"))
            tensors[path] = filled.take()
            reader.release(path)
    save_file(tensors, folder / f"model-rank-{rank}-part-0.safetensors")
