"""Decode speed with the KV pool in a memfd against anonymous memory with huge pages.

python bench/memfd_pool.py [--steps 100] [--layers 14] [--batch 1 16] [--context 1024 512]

Two engines of one process, of Qwen3-0.6B's shape with random weights, take turns step by step.
Prints the medians of both, and the median of the pairs' ratios with its quartiles.
"""

import argparse
import json
import mmap
import os
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch

from radixlm.attention.cpu import CpuPool
from radixlm.bench.one_batch import Batch, Shape
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import resolved

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


class MemfdPool(CpuPool):
    """A pool whose memory is a memfd."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v = in_memfd(self.k), in_memfd(self.v)


def in_memfd(tensor):
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, tensor.nbytes)
    memory = mmap.mmap(descriptor, tensor.nbytes)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def batch(folder, layers, max_tokens, pool):
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": layers}))
    given = {
        "model_path": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
        "max_total_tokens": max_tokens, "chunked_prefill_size": max_tokens,
        "max_prefill_tokens": max_tokens, "max_running_requests": 16, "device": "cpu",
        "schedule_conservativeness": 0.0,
    }  # fmt: skip
    config, info = resolved(ServerConfig.from_kwargs(**given), frozenset(given))
    with mock.patch("radixlm.attention.cpu.CpuPool", pool):
        return Batch(config, info, 0)


def compare(plain, shared, shape, steps):
    engines = (plain, shared)
    for engine in engines:
        engine.send(shape)
        engine.timed_step(shape)
    for engine in engines:
        engine.timed_step(shape)
    pairs = []
    for step in range(steps):
        order = engines if step % 2 else engines[::-1]
        times = {id(e): e.timed_step(shape) for e in order}
        pairs.append((times[id(plain)], times[id(shared)]))
    for engine in engines:
        while engine.live:
            engine.timed_step(shape)
        engine.flush()
    quarters = statistics.quantiles([b / a for a, b in pairs], n=4)
    first, second = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    print(
        f"batch {shape.batch_size} x {shape.input_len}: huge pages {first:.2f} ms, memfd "
        f"{second:.2f} ms, ratio {quarters[1]:.4f} ({quarters[0]:.4f} to {quarters[2]:.4f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 512])
    args = parser.parse_args()
    room = max(b * (c + args.steps + 64) for b, c in zip(args.batch, args.context, strict=True))
    with tempfile.TemporaryDirectory() as name:
        plain = batch(Path(name), args.layers, room, CpuPool)
        shared = batch(Path(name), args.layers, room, MemfdPool)
    for size, context in zip(args.batch, args.context, strict=True):
        compare(plain, shared, Shape(size, context, args.steps + 3), args.steps)


if __name__ == "__main__":
    main()
