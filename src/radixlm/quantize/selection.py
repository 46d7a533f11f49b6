"""Which weights of a checkpoint are rounded: those that the model multiplies with, except the
output head, the embeddings and what chooses experts."""

from __future__ import annotations

from pathlib import Path

import torch

from radixlm.arch.hf import describe, load_config
from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.models.build import build_model
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.weights.mapper import WeightsMapper
from radixlm.weights.source import TensorSource


def linear_weights(folder: Path, source: TensorSource) -> list[str]:
    """The names of the tensors, in the model's order. CheckpointError: the model has no linear
    layer that this engine could serve in few bits."""
    decoder = describe(load_config(folder))
    cpu = torch.device("cpu")
    model = build_model(decoder, cpu, torch.float32, bind("cpu", {}), scheme=PrequantizedScheme())
    sizes = source.sizes()
    mapper = WeightsMapper(decoder, sizes)
    names: dict[str, None] = {}
    for path, layer in model.layers():
        for name, param in layer.own_params().items():
            mapping = mapper.mapping(path, name)
            if param.accepts_quantized and mapping.recipe is None:
                names |= dict.fromkeys(n for n in mapping.names() if n.endswith(".weight"))
    found = [name for name in names if name in sizes]
    if not found:
        raise CheckpointError(
            f"{folder}: no linear layer of this model can be quantized: its weights are joined in "
            "a way that no format describes"
        )
    return found
