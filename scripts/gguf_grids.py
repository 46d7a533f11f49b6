"""Write src/radixlm/weights/gguf_grids.safetensors: the grids of GGUF's I-quants, from the package
gguf (0.19), whose own tables are packed."""

from pathlib import Path

import numpy as np
import torch
from gguf import quants
from safetensors.torch import save_file

KINDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
FILE = Path(__file__).parents[1] / "src/radixlm/weights/gguf_grids.safetensors"


def grid(kind: str) -> torch.Tensor:
    """int8 [rows, numbers of a row]."""
    table = getattr(quants, kind)
    table.init_grid()
    return torch.from_numpy(table.grid.reshape(table.grid_shape).astype(np.int8))


if __name__ == "__main__":
    save_file({kind: grid(kind) for kind in KINDS}, FILE)
