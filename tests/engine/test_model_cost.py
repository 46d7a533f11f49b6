"""--enable-mfu-metrics: operations and bytes, compared with loops and with a checkpoint's size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import radixlm
from radixlm.arch.hf import describe
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.groups import ALONE
from radixlm.engine.features.cost import CacheCost, CostFeature, ModelCost
from radixlm.engine.model_cost import make_cost
from radixlm.kernels.dispatch import bind
from radixlm.models.build import build_model
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items
from tests.fakes.tiny_checkpoint import cached_tiny

PAGE = 4


def steps() -> list[Items]:
    """Decodes, a chunk that ends a prompt, one that does not, and drafts."""
    decodes = DecodeBatch(("a", "b"), np.array([0, 1]))
    chunk = Item("c", 2, 3, 5, np.zeros(5, np.int32), True)
    first = Item("d", 3, 0, 2, np.zeros(2, np.int32), False)
    lens = np.array([2, 0], np.int32)
    return [
        Items(decodes, np.array([9, 2])),
        Items(decodes, np.array([10, 3]), (chunk, first)),
        Items(DecodeBatch((), np.zeros(0, np.int64)), np.zeros(0, np.int64), (first,)),
        Items(decodes, np.array([11, 4]), (), Drafts(lens, np.array([5, 6], np.int32))),
    ]


def test_counts_are_those_of_a_loop_over_tokens() -> None:
    caches = (CacheCost(flops=7.0, num_bytes=3.0), CacheCost(flops=5.0, num_bytes=2.0, window=6))
    cost = ModelCost(100, 10, 1000, 1 / 8, 0.5, caches)
    feature = CostFeature(cost)
    flops = read = written = 0.0
    for items in steps():
        assert feature.extend(items) == {}
        places = [(item, at) for item in items for at in range(item.start, item.start + item.count)]
        rows = sum(item.count if item.tokens is None else item.emit for item in items)
        flops += len(places) * 2 * (100 + 1000 / 8) + rows * 20
        read += 0.5 * (100 + (10 if rows else 0) + 1000 * min(1, len(places) / 8))
        for cache in caches:
            window = cache.window or 10**9
            flops += cache.flops * sum(min(at + 1, window) for _, at in places)
            read += cache.num_bytes * sum(
                min(item.start + item.count, window)
                if item.tokens is None
                else min(item.start, window) + item.count
                for item in items
            )
            written += cache.num_bytes * len(places)
    told = feature.stats()
    assert told["estimated_flops"] == pytest.approx(flops, rel=0.02), "drafts see up to their last"
    assert told["estimated_read_bytes"] == pytest.approx(read)
    assert told["estimated_write_bytes"] == pytest.approx(written)


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_a_model_costs_what_its_matrices_hold(architecture: str) -> None:
    folder = cached_tiny(architecture)
    decoder, kernels, cpu = describe(folder), bind("cpu"), torch.device("cpu")
    model = build_model(decoder, cpu, torch.float32, kernels)
    attn = make_backend("torch_native", model.kv_groups, kernels, cpu)
    for group in model.kv_groups:
        attn.make_pool(group, 2, PAGE, torch.float32)
    parts: Any = SimpleNamespace(model=model, attn=attn, ranks=ALONE)
    asked: Any = ServerConfig.from_kwargs(enable_metrics=True, enable_mfu_metrics=True)
    (feature,) = make_cost(asked, decoder, parts, 4 * 1000)
    cost = feature.cost
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}
    table = next(size for name, size in sizes.items() if "embed_tokens" in name)
    whole = cost.dense + cost.head + cost.experts + (0 if decoder.tied else table)
    assert whole == pytest.approx(sum(sizes.values()), rel=0.01)
    assert cost.head == decoder.vocab * decoder.dim
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert cost.experts == pytest.approx(experts, rel=0.01)
    assert (cost.chosen > 0) == (experts > 0)
    stored = sum(pool.nbytes_per_page for pool in attn.pools if pool is not None)
    assert sum(cache.num_bytes for cache in cost.caches) == stored / PAGE
    assert make_cost(ServerConfig.from_kwargs(), decoder, parts, 4000) == []


def test_other_models_are_refused() -> None:
    folder = str(cached_tiny("Qwen3ForCausalLM"))
    with pytest.raises(ConfigError, match="--enable-mfu-metrics"):
        radixlm.Engine(
            model_path=folder, model_impl="transformers", enable_metrics=True,
            enable_mfu_metrics=True, max_total_tokens=64, cpu_threads=1,
        )  # fmt: skip
