"""Loads and unloads of adapters beside streams: does anything fail, wait or leak?

    PYTHONPATH=src python bench/adapters.py --model src/radixlm/assets/radix-tiny --calls 1000
    PYTHONPATH=src python bench/adapters.py --model FOLDER --calls 40 -- --load-format dummy

Starts a server, writes two adapters of all seven projections, and keeps --streams requests going,
with one of the adapters or none in turn. Then it loads and unloads the other: each call's time, the
time between two tokens before and meanwhile, and memory and descriptors of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from server_process import ServerProcess

from radixlm.base.units import format_bytes
from radixlm.bench.client import HttpClient

MAX_NEW_TOKENS = 400


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter of a Llama-like model, bfloat16."""
    config = json.loads((model / "config.json").read_text())
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    kv, inner = config.get("num_key_value_heads", heads), config["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (dim, heads * head_dim), "self_attn.k_proj": (dim, kv * head_dim),
        "self_attn.v_proj": (dim, kv * head_dim), "self_attn.o_proj": (heads * head_dim, dim),
        "mlp.gate_proj": (dim, inner), "mlp.up_proj": (dim, inner), "mlp.down_proj": (inner, dim),
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{at}{half}.weight"] = values.bfloat16()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Streams:
    """Requests that follow each other, and the times between their tokens."""

    def __init__(self, client: HttpClient, count: int) -> None:
        self._client, self.gaps_s, self.num_failed, self.num_done = client, [0.0][:0], 0, 0
        self._is_over = False
        self._tasks = [asyncio.ensure_future(self._run(index)) for index in range(count)]

    async def _run(self, index: int) -> None:
        body = {
            "input_ids": [5 + (index * 31 + i * 7) % 200 for i in range(64)], "stream": True,
            "sampling_params": {
                "temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True
            },
            "lora_path": "kept" if index % 2 else None,
        }  # fmt: skip
        while not self._is_over:
            last_s = 0.0

            def event(_: bytes, now_s: float) -> None:
                nonlocal last_s
                if last_s:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s

            answer = await self._client.ask("POST", "/generate", body, event)
            self.num_failed += answer.status != 200
            self.num_done += 1

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


def shares(values: Sequence[float]) -> str:
    """Median and the 99th of a hundred, in ms."""
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"median {statistics.median(ordered) * 1e3:.1f} ms, p99 {top * 1e3:.1f} ms"


async def measure(args: argparse.Namespace, root: Path) -> None:
    folders = [write_adapter(args.model, root / name, args.rank, i) for i, name in enumerate("ab")]
    options = ["--model-path", str(args.model), "--lora-paths", f"kept={folders[0]}", *args.options]
    async with ServerProcess(options, root / "log") as server:
        client = HttpClient(server.base_url)
        streams = Streams(client, args.streams)
        await asyncio.sleep(args.seconds)
        print(f"quiet      {shares(streams.gaps_s)} between tokens of {args.streams} streams")
        streams.gaps_s.clear()
        load_s: list[float] = []
        num_bad, before = 0, server.sample()
        for number in range(args.calls):
            if number == min(100, args.calls // 4):
                before = server.sample()  # after caches have filled
            started_s = time.perf_counter()
            body = {"lora_name": "x", "lora_path": str(folders[1])}
            loaded = await client.ask("POST", "/load_lora_adapter", body)
            load_s.append(time.perf_counter() - started_s)
            unloaded = await client.ask("POST", "/unload_lora_adapter", {"lora_name": "x"})
            num_bad += (loaded.status != 200) + (unloaded.status != 200)
            await asyncio.sleep(args.pause)
        after = server.sample()
        print(f"loading    {shares(streams.gaps_s)} between tokens")
        print(f"load       {shares(load_s)}, longest {max(load_s):.3f} s, {args.calls} calls each")
        await streams.stop()
        print(f"failed     {num_bad} calls, {streams.num_failed} of {streams.num_done} requests")
        grown = format_bytes(abs(after.rss_bytes - before.rss_bytes))
        sign = "-" if after.rss_bytes < before.rss_bytes else "+"
        print(f"memory     {format_bytes(before.rss_bytes)} {sign}{grown}")
        print(f"open files {before.num_fds} -> {after.num_fds}, threads {before.num_threads} -> "
              f"{after.num_threads}")  # fmt: skip
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of quiet before the loads")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each unload")
    parser.add_argument("options", nargs="*", help="of the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(args, Path(root)))


if __name__ == "__main__":
    main()
