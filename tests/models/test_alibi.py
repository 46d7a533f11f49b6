"""ALiBi slopes: Falcon's against Hugging Face, those of large Baichuan models written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import make_tiny
from tests.models.reference_math import Shapes, check, checkpoint, rms, swiglu
from tests.models.test_decoder import relative_error
from torch import Tensor
from transformers import FalconForCausalLM

DIM, VOCAB = 48, 100


# Hugging Face's eager attention adds the slopes twice and rounds slope * position to bfloat16.
# With a power of two as the number of heads that is exact.
@pytest.mark.parametrize("layout", ["parallel", "one after another", "grouped"])
@pytest.mark.parametrize("heads", [4, 8])
def test_falcon(layout: str, heads: int, tmp_path: Path) -> None:
    grouped = layout == "grouped"
    changes = {
        "alibi": True,
        "num_attention_heads": heads,
        "num_kv_heads": 2 if grouped else heads,
        "new_decoder_architecture": grouped,
        "multi_query": layout == "parallel",
        "parallel_attn": layout != "one after another",
        "bias": not grouped,
    }
    make_tiny("FalconForCausalLM", tmp_path, **changes)
    theirs = FalconForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    ids = torch.randint(3, 380, (43,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = theirs.eval()(ids[None]).logits[0]
    ours = PagedRunner(load_model(tmp_path)).prefill({0: ids.tolist()}, num_chunks=3)[0]
    assert relative_error(ours, wanted) < 1e-5


def _slopes(heads: int) -> list[float]:
    """As in the authors' code."""

    def of_power(n: int) -> list[float]:
        start = 2 ** -(2 ** -(math.log2(n) - 3))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + _slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [4, 6])
def test_the_large_baichuan_models(heads: int, tmp_path: Path) -> None:
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "hidden_size": DIM,
        "num_attention_heads": heads,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "model_max_length": 128,
        "rms_norm_eps": 1e-5,
    }
    ends = ("model.embed_tokens", "lm_head")
    shapes: Shapes = {f"{name}.weight": (VOCAB, DIM) for name in ends}
    shapes["model.norm.weight"] = (DIM,)
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
        shapes[at + "self_attn.W_pack.weight"] = (3 * DIM, DIM)
        shapes[at + "self_attn.o_proj.weight"] = (DIM, DIM)
        shapes |= {f"{at}mlp.{p}_proj.weight": (40, DIM) for p in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (DIM, 40)
    w = checkpoint(tmp_path, config, shapes)

    def reference(ids: list[int]) -> Tensor:
        x, count = w["model.embed_tokens.weight"][ids], len(ids)
        slopes = torch.tensor(_slopes(heads))[:, None, None]
        mask = slopes * torch.arange(1 - count, 1) + torch.full((count, count), -torch.inf).triu(1)
        for i in range(2):
            at = f"model.layers.{i}."
            h = rms(x, w[at + "input_layernorm.weight"])
            packed = F.linear(h, w[at + "self_attn.W_pack.weight"]).view(count, 3, heads, -1)
            q, k, v = packed.permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2) / (DIM // heads) ** 0.5 + mask
            out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + F.linear(out, w[at + "self_attn.o_proj.weight"])
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        return F.linear(rms(x, w["model.norm.weight"]), w["lm_head.weight"])

    check(tmp_path, reference)
