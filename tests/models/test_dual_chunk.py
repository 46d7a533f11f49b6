"""Dual chunk attention (Qwen2.5-1M, arXiv:2501.15383) against its mathematics written out: prompts
around the borders of chunks, in parts, after a hit, and decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.models.test_decoder import relative_error
from torch import Tensor

from radixlm import Engine
from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

DIM, HEADS, KV_HEADS, INNER, LAYERS, VOCAB, HEAD = 64, 4, 2, 96, 2, 100, 16
SIZE, LOCAL, TRAINED = 40, 8, 24
CHUNK = SIZE - LOCAL
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dual_chunk_attention_config": {
        "chunk_size": SIZE,
        "local_size": LOCAL,
        "sparse_attention_enabled": True,
    },
}


def checkpoint(folder: Path, trained: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    w = {"model.embed_tokens.weight": random(VOCAB, DIM), "lm_head.weight": random(VOCAB, DIM)}
    w["model.norm.weight"] = 1 + random(DIM)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w[f"{at}{norm}.weight"] = 1 + random(DIM)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            w[f"{at}self_attn.{part}_proj.weight"] = random(heads * HEAD, DIM)
            w[f"{at}self_attn.{part}_proj.bias"] = random(heads * HEAD)
        w[f"{at}self_attn.o_proj.weight"] = random(DIM, HEADS * HEAD)
        w[f"{at}mlp.gate_proj.weight"] = random(INNER, DIM)
        w[f"{at}mlp.up_proj.weight"] = random(INNER, DIM)
        w[f"{at}mlp.down_proj.weight"] = random(DIM, INNER)
    save_file(w, folder / "model.safetensors")
    dual = {**CONFIG["dual_chunk_attention_config"], "original_max_position_embeddings": trained}
    config = {**CONFIG, "dual_chunk_attention_config": dual}
    (folder / "config.json").write_text(json.dumps(config))
    return w


def turned(x_HC: Tensor, position: int) -> Tensor:
    half = HEAD // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    a, b = x_HC.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attention(w: dict[str, Tensor], at: str, x: Tensor, trained: int) -> Tensor:
    """One query and one key at a time."""
    q, k, v = (
        F.linear(x, w[f"{at}{p}_proj.weight"], w[f"{at}{p}_proj.bias"]).unflatten(-1, (-1, HEAD))
        for p in "qkv"
    )
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    out = torch.empty(len(x), HEADS, HEAD)
    for i in range(len(x)):
        scores = torch.empty(HEADS, i + 1)
        for j in range(i + 1):
            place, apart = i % CHUNK, i // CHUNK - j // CHUNK
            seen_from = (place, min(place + CHUNK, SIZE), min(2 * CHUNK - 1, SIZE))[min(apart, 2)]
            scores[:, j] = (turned(q[i], seen_from) * turned(k[j], j % CHUNK)).sum(-1)
        scale = HEAD**-0.5
        if trained:
            scale *= max(1.0, 1 + 0.1 * torch.log(torch.tensor((i + 1) / trained)).item()) ** 2
        out[i] = torch.einsum("hk,khd->hd", (scores * scale).softmax(-1), v[: i + 1])
    return F.linear(out.flatten(1), w[f"{at}o_proj.weight"])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def logits(w: dict[str, Tensor], ids: list[int], trained: int) -> Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, w[at + "input_layernorm.weight"])
        x = x + attention(w, at + "self_attn.", y, trained)
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = F.silu(F.linear(y, w[at + "mlp.gate_proj.weight"]))
        y = gate * F.linear(y, w[at + "mlp.up_proj.weight"])
        x = x + F.linear(y, w[at + "mlp.down_proj.weight"])
    return F.linear(norm(x, w["model.norm.weight"]), w["lm_head.weight"])


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK + 5])
def test_logits_equal_the_mathematics(length: int, backend: str, tmp_path: Path) -> None:
    trained = TRAINED if length % 2 else 0
    weights = checkpoint(tmp_path, trained)
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = logits(weights, ids, trained)
    for num_chunks in (1, 3):
        runner = PagedRunner(load_model(tmp_path), backend=backend, page_size=16, num_pages=32)
        ours = runner.prefill({0: ids}, num_chunks=num_chunks)[0]
        assert relative_error(ours, wanted) < 1e-4
    runner.step({1: ids[:-1]})
    assert relative_error(runner.step({1: ids[-1:]})[1], wanted[-1:]) < 1e-4


@pytest.mark.parametrize(
    "dual", [{"chunk_size": 8, "local_size": 8}, {"chunk_size": "8"}, {"local_size": -1}]
)
def test_wrong_sizes_are_told(dual: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, "dual_chunk_attention_config": dual}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"dual_chunk_attention_config.*smaller"):
        describe(tmp_path)


def test_an_engine_answers_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    """With pages found, chunks of prompts and the reference's flag."""
    checkpoint(tmp_path, TRAINED)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (20, 50, 110)]
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with Engine(
        model_path=str(tmp_path),
        attention_backend="dual_chunk_flash_attn",
        skip_tokenizer_init=True,
        chunked_prefill_size=32,
        max_total_tokens=1024,
        cpu_threads=1,
        log_level="error",
    ) as engine:
        alone = [engine.generate(input_ids=ids, sampling_params=greedy) for ids in prompts]
        again = engine.generate(input_ids=prompts, sampling_params=greedy)
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in alone]
    assert again[-1]["meta_info"]["cached_tokens"] > 2 * CHUNK
