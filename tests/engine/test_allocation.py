"""Missing memory at the start is an error that names the flag, whichever allocator raised it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.engine.memory import needs_memory
from tests.fakes.tiny_checkpoint import cached_tiny

ADVICE = "lower --max-total-tokens"
# the address space left after all imports: a small part of the pools' size
LIMITED = """
import resource, sys
import radixlm
from radixlm.engine import kept
old = kept.make_pools
def limited(*args, **kwargs):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        return old(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept.make_pools = limited
try:
    radixlm.Engine(model_path=sys.argv[1], max_total_tokens=2_000_000, cpu_threads=1)
except radixlm.base.errors.ConfigError as error:
    print("told:", error)
"""


def test_errors_of_allocators_are_recognised() -> None:
    with pytest.raises(ConfigError, match=r"for the pools: lower --max-total-tokens \("):
        with needs_memory("the pools", ADVICE):
            torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="MemoryError"):
        with needs_memory("the pools", ADVICE):
            raise MemoryError


@pytest.mark.parametrize("error", [RuntimeError("a shape"), OSError(2, "no file"), ValueError("x")])
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        with needs_memory("the pools", ADVICE):
            raise error
    assert caught.value is error


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.slow
def test_an_engine_without_memory_for_its_pools_names_the_flag(tmp_path: Path) -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    command = [sys.executable, "-c", LIMITED, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "told: no memory for the KV cache" in done.stdout, done.stdout + done.stderr
    assert "--max-total-tokens" in done.stdout
