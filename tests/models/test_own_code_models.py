"""Further models with their own code (Jais, Ling 2.5, MiMo V2, Ouro, TeleChat 2) against
their mathematics in plain torch, or a class of transformers with the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.fakes.tiny_checkpoint import make_tiny, reference_model
from tests.models.reference_math import (
    Shapes,
    Weights,
    attention,
    check,
    checkpoint,
    rms,
    rotated,
    swiglu,
)
from torch import Tensor

from radixlm.arch.families.alibi import alibi_slopes

DIM, HEADS, WIDTH, INNER, VOCAB = 64, 4, 16, 48, 100
BASE: dict[str, Any] = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ENDS: Shapes = {
    "model.embed_tokens.weight": (VOCAB, DIM),
    "model.norm.weight": (DIM,),
    "lm_head.weight": (VOCAB, DIM),
}


def _mlp(at: str) -> Shapes:
    rows: Shapes = {f"{at}{one}_proj.weight": (INNER, DIM) for one in ("gate", "up")}
    return rows | {f"{at}down_proj.weight": (DIM, INNER)}


def _linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{at}.weight"], w.get(f"{at}.bias"))


def _attend(qkv: tuple[Tensor, ...], theta: float = 10000.0, mask: Tensor | None = None) -> Tensor:
    q, k, v = (one.unflatten(-1, (-1, WIDTH)) for one in qkv)
    return attention(rotated(q, theta), rotated(k, theta), v, WIDTH**-0.5, mask)


def test_telechat_2(tmp_path: Path) -> None:
    config = {k: v for k, v in BASE.items() if k not in ("num_attention_heads", "rms_norm_eps")}
    config |= {"architectures": ["TeleChat2ForCausalLM"], "n_head": HEADS}
    config |= {"ffn_hidden_size": INNER, "layer_norm_epsilon": 1e-5}
    shapes: Shapes = {"transformer.word_embeddings.weight": (VOCAB, DIM)}
    shapes |= {"transformer.ln_f_norm.weight": (DIM,), "lm_head.weight": (VOCAB, DIM)}
    shapes["transformer.ln_f.weight"] = shapes.pop("transformer.ln_f_norm.weight")
    for i in range(2):
        at = f"transformer.h.{i}."
        shapes |= {f"{at}input_layernorm.weight": (DIM,), f"{at}self_attention.dense.bias": (DIM,)}
        shapes |= {
            f"{at}post_attention_layernorm.weight": (DIM,),
            f"{at}mlp.down_proj.bias": (DIM,),
        }
        for part, rows in (("query", DIM), ("key_value", 2 * DIM), ("dense", DIM)):
            shapes[f"{at}self_attention.{part}.weight"] = (rows, DIM)
        shapes |= _mlp(at + "mlp.")
    w = checkpoint(tmp_path, config, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["transformer.word_embeddings.weight"][ids]
        for i in range(2):
            at = f"transformer.h.{i}."
            h = rms(x, w[at + "input_layernorm.weight"])
            pairs = _linear(w, at + "self_attention.key_value", h).unflatten(-1, (HEADS, 2, WIDTH))
            k, v = (one.flatten(1) for one in pairs.unbind(2))
            read = _attend((_linear(w, at + "self_attention.query", h), k, v))
            x = x + _linear(w, at + "self_attention.dense", read)
            h = rms(x, w[at + "post_attention_layernorm.weight"])
            x = x + swiglu(w, at + "mlp.", h) + w[at + "mlp.down_proj.bias"]
        return _linear(w, "lm_head", rms(x, w["transformer.ln_f.weight"]))

    check(tmp_path, reference)


def _norms(at: str, *names: str) -> Shapes:
    return {f"{at}{name}.weight": (DIM,) for name in names}


def _llama_parts(at: str) -> Shapes:
    shapes: Shapes = {f"{at}self_attn.{one}_proj.weight": (DIM, DIM) for one in "qkvo"}
    return shapes | _mlp(at + "mlp.")


def _llama_qkv(w: Weights, at: str, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(_linear(w, f"{at}self_attn.{one}_proj", x) for one in "qkv")


def test_ouro(tmp_path: Path) -> None:
    names = ("input_layernorm", "input_layernorm_2")
    names += ("post_attention_layernorm", "post_attention_layernorm_2")
    shapes = {**ENDS, "model.early_exit_gate.weight": (1, DIM), "model.early_exit_gate.bias": (1,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= _llama_parts(at) | _norms(at, *names)
    config = {**BASE, "architectures": ["OuroForCausalLM"], "total_ut_steps": 3}
    w = checkpoint(tmp_path, config, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for _ in range(3):
            for i in range(2):
                at = f"model.layers.{i}."
                before, behind, before2, behind2 = (w[f"{at}{name}.weight"] for name in names)
                read = _attend(_llama_qkv(w, at, rms(x, before)))
                x = x + rms(_linear(w, at + "self_attn.o_proj", read), behind)
                x = x + rms(swiglu(w, at + "mlp.", rms(x, before2)), behind2)
            x = rms(x, w["model.norm.weight"])
        return _linear(w, "lm_head", x)

    check(tmp_path, reference)


@pytest.mark.parametrize("has_slopes", [False, True])
def test_jais(tmp_path: Path, has_slopes: bool) -> None:
    config = {
        "architectures": ["JAISLMHeadModel"],
        "n_embd": DIM,
        "n_head": HEADS,
        "n_layer": 2,
        "n_inner": INNER,
        "n_positions": 128,
        "vocab_size": VOCAB,
        "activation_function": "swiglu",
        "position_embedding_type": "alibi" if has_slopes else "learned",
        "layer_norm_epsilon": 1e-5,
        "embeddings_scale": 3.0,
        "mup_output_alpha": 2.0,
        "mup_width_scale": 0.3,
        "scale_qk_dot_by_d": True,
    }
    shapes: Shapes = {"transformer.wte.weight": (VOCAB, DIM)}
    shapes |= {} if has_slopes else {"transformer.wpe.weight": (128, DIM)}
    norms = ["transformer.ln_f"]
    for i in range(2):
        at = f"transformer.h.{i}."
        norms += [at + "ln_1", at + "ln_2"]
        inner = {"attn.c_attn": 3 * DIM, "attn.c_proj": DIM, "mlp.c_fc": INNER, "mlp.c_fc2": INNER}
        for name, columns in inner.items():
            shapes |= {f"{at}{name}.weight": (DIM, columns), f"{at}{name}.bias": (columns,)}
        shapes |= {f"{at}mlp.c_proj.weight": (INNER, DIM), f"{at}mlp.c_proj.bias": (DIM,)}
    for name in norms:
        shapes |= {f"{name}.weight": (DIM,), f"{name}.bias": (DIM,)}
    w = checkpoint(tmp_path, config, shapes)

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (DIM,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def read(qkv: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, WIDTH)) for one in qkv.chunk(3, -1))
        scores = torch.einsum("qhd,khd->hqk", q, k) / WIDTH
        places = torch.arange(len(qkv))
        if has_slopes:
            scores = scores + torch.tensor(alibi_slopes(HEADS))[:, None, None] * (
                places - places[:, None]
            )
        scores = scores.masked_fill(places > places[:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def reference(ids: list[int]) -> Tensor:
        x = w["transformer.wte.weight"][ids]
        x = 3.0 * (x if has_slopes else x + w["transformer.wpe.weight"][: len(ids)])
        for i in range(2):
            at = f"transformer.h.{i}."
            mixed = read(linear(normed(x, at + "ln_1"), at + "attn.c_attn"))
            x = x + linear(mixed, at + "attn.c_proj")
            h = normed(x, at + "ln_2")
            opened = linear(h, at + "mlp.c_fc") * F.silu(linear(h, at + "mlp.c_fc2"))
            x = x + linear(opened, at + "mlp.c_proj")
        return 0.6 * F.linear(normed(x, "transformer.ln_f"), w["transformer.wte.weight"])

    check(tmp_path, reference)


def test_mimo_v2_by_its_published_config(tmp_path: Path) -> None:
    kinds = ("full_attention", "sliding_attention", "sliding_attention")
    thetas = zip(kinds[:2], (10000.0, 777.0), strict=True)
    ropes = {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for kind, theta in thetas
    }
    shape = {"head_dim": 24, "v_head_dim": 16, "vocab_size": VOCAB}
    make_tiny(
        "MiMoV2FlashForCausalLM", tmp_path, layer_types=list(kinds), rope_parameters=ropes,
        sliding_window=6, rms_norm_eps=1e-5, **shape,
    )  # fmt: skip
    model = reference_model(tmp_path)
    config = BASE | shape | {"architectures": ["MiMoV2ForCausalLM"], "num_hidden_layers": 3}
    config |= {"intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 32, "norm_topk_prob": True, "routed_scaling_factor": None}
    config |= {"num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 24}
    config |= {"swa_num_key_value_heads": 4, "swa_v_head_dim": 16, "swa_rope_theta": 777.0}
    config |= {"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}
    config |= {"partial_rotary_factor": 0.5, "sliding_window_size": 5, "layernorm_epsilon": 1e-5}
    config |= {"add_swa_attention_sink_bias": True, "attention_value_scale": 0.707}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    named = {k.replace("sinks", "attention_sink_bias"): v for k, v in load_file(path).items()}
    save_file(named, path)

    def reference(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    check(tmp_path, reference)


LING: dict[str, Any] = {
    **BASE,
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "first_k_dense_replace": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "partial_rotary_factor": 0.5,
    "group_norm_size": 2,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def _lightning(w: Weights, at: str, x: Tensor, layer: int, is_normed: bool) -> Tensor:
    """The state is written out token by token."""
    qkv = _linear(w, at + "query_key_value", x).unflatten(-1, (3, HEADS, WIDTH))
    q, k, v = qkv.unbind(1)
    if is_normed:
        q, k = (rms(t, w[f"{at}{n}_layernorm.weight"]) for t, n in ((q, "query"), (k, "key")))
    q, k = (torch.cat((rotated(t[..., :8]), t[..., 8:]), -1) for t in (q, k))
    kept = torch.exp(-torch.tensor(alibi_slopes(HEADS)) * (1 - layer / 2 + 1e-5))
    state, rows = torch.zeros(HEADS, WIDTH, WIDTH), []
    for t in range(len(x)):
        state = state * kept[:, None, None] + k[t][:, :, None] * v[t][:, None]
        rows.append(torch.einsum("hk,hkv->hv", q[t] * WIDTH**-0.5, state).flatten())
    out = torch.stack(rows).unflatten(-1, (2, -1))
    out = rms(out, w[at + "g_norm.weight"].unflatten(0, (2, -1))).flatten(1)
    return _linear(w, at + "dense", out * torch.sigmoid(_linear(w, at + "g_proj", x)))


def _pairs_rotated(x: Tensor) -> Tensor:
    """Rotary embedding of neighboring channels."""
    halves = rotated(torch.cat((x[..., 0::2], x[..., 1::2]), -1))
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)


def _latent(w: Weights, at: str, x: Tensor) -> Tensor:
    q = _linear(w, at + "q_proj", x).unflatten(-1, (HEADS, 24))
    low, shared = _linear(w, at + "kv_a_proj_with_mqa", x).split((12, 8), -1)
    kv = _linear(w, at + "kv_b_proj", rms(low, w[at + "kv_a_layernorm.weight"]))
    k, v = kv.unflatten(-1, (HEADS, 32)).chunk(2, -1)
    turned = _pairs_rotated(shared[:, None]).expand(-1, HEADS, -1)
    q = torch.cat((q[..., :16], _pairs_rotated(q[..., 16:])), -1)
    return _linear(w, at + "dense", attention(q, torch.cat((k, turned), -1), v, 24**-0.5))


@pytest.mark.parametrize("is_normed", [False, True])
def test_ling_2_5(tmp_path: Path, is_normed: bool) -> None:
    shapes: Shapes = {"model.word_embeddings.weight": (VOCAB, DIM), **ENDS}
    del shapes["model.embed_tokens.weight"]
    for i in range(3):
        at = f"model.layers.{i}."
        shapes |= _mlp(at + "mlp.") | _norms(at, "input_layernorm", "post_attention_layernorm")
        rows = {"query_key_value": 3 * DIM, "g_proj": DIM}
        rows = {"q_proj": HEADS * 24, "kv_a_proj_with_mqa": 20} if i == 2 else rows
        shapes |= {f"{at}attention.{name}.weight": (n, DIM) for name, n in rows.items()}
        shapes[at + "attention.dense.weight"] = (DIM, DIM)
        if i == 2:
            shapes[at + "attention.kv_b_proj.weight"] = (HEADS * 32, 12)
            shapes[at + "attention.kv_a_layernorm.weight"] = (12,)
            continue
        shapes[at + "attention.g_norm.weight"] = (DIM,)
        for part in ("query", "key") if is_normed else ():
            shapes[f"{at}attention.{part}_layernorm.weight"] = (WIDTH,)
    w = checkpoint(tmp_path, LING | {"use_qk_norm": is_normed}, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.word_embeddings.weight"][ids]
        for i in range(3):
            at = f"model.layers.{i}."
            h, inside = rms(x, w[at + "input_layernorm.weight"]), at + "attention."
            x = x + (_latent(w, inside, h) if i == 2 else _lightning(w, inside, h, i, is_normed))
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        return _linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    check(tmp_path, reference)
