"""The benchmark of a GPU: `python bench/gpu`."""
