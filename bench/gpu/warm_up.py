"""Compiles the kernels of a measured model in a worker: an engine of two of its layers meets them
all, and the results stay on disk for later stages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gpu.decode import BATCHES, flags_of, shape_of
from gpu.random_engine import opened
from gpu.session import Session
from gpu.workers import say
from radixlm.base.record import replace

TOKENS = 32768  # KV tokens; the card is shared with other workers


def work(given: dict[str, Any]) -> None:
    """Open the engine and close it."""
    s = Session(torch.device(given["device"], 0), 0.0, Path("unused"))
    shape = replace(shape_of(s, given["model"]), layers=2)
    flags = [*flags_of(s, given["weights"], BATCHES), "--max-total-tokens", str(TOKENS)]
    began_s = time.perf_counter()
    with opened(s, shape, *flags):
        took_s = round(time.perf_counter() - began_s, 1)
    say(kernel=f"start of {given['model']} {given['weights']}", ok=True, seconds=took_s)
