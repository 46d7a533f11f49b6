"""Generators of random numbers that are the same at every start."""

import importlib

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU. torch makes none before this module is imported, which engines
    defer (``engine/worker.py``)."""
    importlib.import_module("torch._prims.rng_prims")
    return torch.Generator().manual_seed(seed)
