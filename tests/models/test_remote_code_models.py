"""Models published with their own code (DeciLM, Phi-3 small, Solar, Step 3, Xverse MoE) against
their mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    Shapes,
    Weights,
    attention,
    check,
    checkpoint,
    heads,
    rms,
    rotated,
    routed,
    swiglu,
)
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

DIM, HEADS, VOCAB = 64, 4, 100
BASE: dict[str, Any] = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ENDS: Shapes = {
    "model.embed_tokens.weight": (VOCAB, DIM),
    "model.norm.weight": (DIM,),
    "lm_head.weight": (VOCAB, DIM),
}


def _swiglu(at: str, inner: int) -> Shapes:
    return {
        f"{at}gate_proj.weight": (inner, DIM),
        f"{at}up_proj.weight": (inner, DIM),
        f"{at}down_proj.weight": (DIM, inner),
    }


def _qkv(at: str, kv: int) -> Shapes:
    rows = {"q": DIM, "k": kv, "v": kv, "o": DIM}
    return {f"{at}{part}_proj.weight": (n, DIM) for part, n in rows.items()}


def _attend(w: Weights, at: str, x: Tensor) -> Tensor:
    q, k, v = heads(w, at, x, DIM // HEADS)
    out = attention(rotated(q), rotated(k), v, (DIM // HEADS) ** -0.5)
    return F.linear(out, w[at + "o_proj.weight"])


def _head(w: Weights, x: Tensor) -> Tensor:
    return F.linear(rms(x, w["model.norm.weight"]), w["lm_head.weight"])


# -- Xverse MoE ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "renorm"), [(2, False), (None, True)])
def test_xverse_moe(tmp_path: Path, shared: int | None, renorm: bool) -> None:
    config = {
        **BASE,
        "architectures": ["XverseMoeForCausalLM"],
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "moe_top_k": 2,
        "num_shared_experts": shared,
        "norm_topk_prob": renorm,
    }
    shapes = dict(ENDS)
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (DIM,), f"{at}mlp.router.weight": (6, DIM)}
        shapes |= {f"{at}post_attention_layernorm.weight": (DIM,)} | _qkv(at + "self_attn.", DIM)
        for e in range(6):
            shapes |= _swiglu(f"{at}mlp.experts.{e}.", 48)
        shapes |= _swiglu(at + "mlp.shared_experts.", 96) if shared else {}
    w = checkpoint(tmp_path, config, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(2):
            at = f"model.layers.{i}."
            x = x + _attend(w, at + "self_attn.", rms(x, w[at + "input_layernorm.weight"]))
            h = rms(x, w[at + "post_attention_layernorm.weight"])
            scores = F.linear(h, w[at + "mlp.router.weight"]).softmax(-1)
            y = routed(
                h, scores, 2, renorm, lambda e, t, at=at: swiglu(w, f"{at}mlp.experts.{e}.", t)
            )
            x = x + y + (swiglu(w, at + "mlp.shared_experts.", h) if shared else 0)
        return _head(w, x)

    check(tmp_path, reference)


# -- Solar --------------------------------------------------------------------------------------


SOLAR: dict[str, Any] = {
    **BASE,
    "architectures": ["SolarForCausalLM"],
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_key_value_heads": HEADS,
    "sliding_window": None,
    "bskcn_1": [1, 3],
    "bskcn_2": [0, 3],
    "bskcn_3": [2, 5],
    "bskcn_4": [4, 5, 90],
    "bskcn_tv": [0.9, 0.7],
}


def test_solar(tmp_path: Path) -> None:
    shapes = dict(ENDS)
    for i in range(7):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (DIM,)} | _qkv(at + "self_attn.", DIM)
        shapes |= {f"{at}post_attention_layernorm.weight": (DIM,)} | _swiglu(at + "mlp.", 48)
    w = checkpoint(tmp_path, SOLAR, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        first = second = x
        for i in range(7):
            first = x if i in SOLAR["bskcn_1"] else first
            second = x if i in SOLAR["bskcn_2"] else second
            x = first * 0.7 + x * (1 - 0.7) if i in SOLAR["bskcn_3"] else x
            x = second * 0.7 + x * (1 - 0.7) if i in SOLAR["bskcn_4"] else x
            at = f"model.layers.{i}."
            x = x + _attend(w, at + "self_attn.", rms(x, w[at + "input_layernorm.weight"]))
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        return _head(w, x)

    check(tmp_path, reference)


@pytest.mark.parametrize(
    ("changes", "key"), [({"bskcn_1": [3]}, "bskcn_3"), ({"bskcn_tv": [0.5]}, "bskcn_tv")]
)
def test_solar_refuses_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        describe({**SOLAR, **changes})


# -- DeciLM -------------------------------------------------------------------------------------

DECI_BLOCKS = [
    ({"n_heads_in_group": 2}, {"ffn_mult": 1.0}),
    ({"no_op": True}, {"ffn_mult": 3.0}),
    ({"n_heads_in_group": 4}, {"no_op": True}),
    ({"no_op": True}, {"no_op": True}),
    ({"replace_with_linear": True}, {"replace_with_linear": True}),
    ({"n_heads_in_group": 1}, {"intermediate_size": 80}),
]
DECI_WIDTHS = {0: 256, 1: 256, 5: 80}


def _deci_config(blocks: Any = None) -> dict[str, Any]:
    listed = blocks or [{"attention": a, "ffn": f} for a, f in DECI_BLOCKS]
    return {
        **BASE,
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "num_hidden_layers": len(listed),
        "num_key_value_heads": None,
        "block_configs": listed,
    }


def test_decilm(tmp_path: Path) -> None:
    shapes = dict(ENDS)
    for i, (attn, ffn) in enumerate(DECI_BLOCKS):
        at = f"model.layers.{i}."
        if not attn.get("no_op"):
            shapes[at + "input_layernorm.weight"] = (DIM,)
        if not ffn.get("no_op"):
            shapes[at + "post_attention_layernorm.weight"] = (DIM,)
        if "n_heads_in_group" in attn:
            shapes |= _qkv(at + "self_attn.", DIM // attn["n_heads_in_group"])
        if i in DECI_WIDTHS:
            shapes |= _swiglu(at + "mlp.", DECI_WIDTHS[i])
    shapes["model.layers.4.self_attn.linear_attn.weight"] = (DIM, DIM)
    shapes["model.layers.4.mlp.linear_mlp.weight"] = (DIM, DIM)
    w = checkpoint(tmp_path, _deci_config(), shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i, (attn, ffn) in enumerate(DECI_BLOCKS):
            at = f"model.layers.{i}."
            if not attn.get("no_op"):
                h = rms(x, w[at + "input_layernorm.weight"])
                linear = w.get(at + "self_attn.linear_attn.weight")
                straight = linear is not None
                x = x + (F.linear(h, linear) if straight else _attend(w, at + "self_attn.", h))
            if not ffn.get("no_op"):
                h = rms(x, w[at + "post_attention_layernorm.weight"])
                linear = w.get(at + "mlp.linear_mlp.weight")
                x = x + (F.linear(h, linear) if linear is not None else swiglu(w, at + "mlp.", h))
        return _head(w, x)

    check(tmp_path, reference)


@pytest.mark.parametrize(
    ("attn", "problem"),
    [
        ({"n_heads_in_group": 3}, "n_heads_in_group"),
        ({"n_heads_in_group": 2, "sparsify": ["x"]}, "sparsify"),
        (None, "attention"),
    ],
)
def test_decilm_refuses_by_name(attn: Any, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"block_configs.*{problem}"):
        describe(_deci_config([{"attention": attn, "ffn": {"ffn_mult": 1.0}}]))


# -- Step 3 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("listed", "renorm"), [("1,2", False), (None, True), ([0, 2], False)])
def test_step3(tmp_path: Path, listed: Any, renorm: bool) -> None:
    text = {
        **BASE,
        "model_type": "step3_text",
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "head_dim": 24,
        "share_q_dim": 40,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "share_expert_dim": 24,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "norm_expert_weight": renorm,
        "moe_layers_enum": listed,
        "max_position_embedding": 128,
        "max_position_embeddings": None,
    }
    config = {"architectures": ["Step3VLForConditionalGeneration"], "text_config": text}
    sparse = {1, 2} if listed in ("1,2", None) else {0, 2}
    shapes = dict(ENDS) | {
        "vision_model.conv1.weight": (4, 3, 2, 2),
        "vit_large_projector.weight": (4, 4),
    }
    for i in range(3):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
        rows = {"q_proj": (40, DIM), "k_proj": (24, DIM), "v_proj": (24, DIM)}
        rows |= {"wq": (120, 40), "o_proj": (DIM, 120), "inter_norm": (40,)}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in rows.items()}
        if i not in sparse:
            shapes |= _swiglu(at + "mlp.", 48)
            continue
        shapes |= _swiglu(at + "share_expert.", 24) | {f"{at}moe.gate.weight": (4, DIM)}
        shapes |= {f"{at}moe.{p}_proj.weight": (4, 32, DIM) for p in ("gate", "up")}
        shapes[f"{at}moe.down_proj.weight"] = (4, DIM, 32)
    w = checkpoint(tmp_path, config, shapes)

    def expert(at: str, e: int, t: Tensor) -> Tensor:
        gate, up, down = (w[f"{at}moe.{p}_proj.weight"][e] for p in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(t, gate)) * F.linear(t, up), down)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(3):
            at = f"model.layers.{i}."
            h, attn = rms(x, w[at + "input_layernorm.weight"]), at + "self_attn."
            q, k, v = (F.linear(h, w[f"{attn}{p}_proj.weight"]) for p in "qkv")
            q = F.linear(rms(q, w[attn + "inter_norm.weight"]), w[attn + "wq.weight"])
            q, k, v = (t.unflatten(-1, (-1, 24)) for t in (q, k, v))
            out = attention(rotated(q), rotated(k), v, 24**-0.5)
            x = x + F.linear(out, w[attn + "o_proj.weight"])
            h = rms(x, w[at + "post_attention_layernorm.weight"])
            if i not in sparse:
                x = x + swiglu(w, at + "mlp.", h)
                continue
            scores = F.linear(h, w[at + "moe.gate.weight"]).softmax(-1)
            y = routed(h, scores, 2, renorm, lambda e, t, at=at: expert(at, e, t))
            x = x + y + swiglu(w, at + "share_expert.", h)
        return _head(w, x)

    check(tmp_path, reference)


# -- Phi-3 small --------------------------------------------------------------------------------

PHI = {
    "architectures": ["Phi3SmallForCausalLM"],
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "ff_intermediate_size": 48,
    "blocksparse_block_size": 4,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "dense_attention_every_n_layers": 2,
    "gegelu_limit": 0.4,
    "rope_embedding_base": 5000,
    "mup_attn_multiplier": 1.3,
    "dummy_token_indices": [3, 50],
}


def _blocks(length: int, step: int) -> Tensor:
    """bool [H, Q, N], position by position, from the published kernel's layout."""
    mask = torch.zeros(4, length, length, dtype=torch.bool)
    for h in range(4):
        for q in range(length):
            for k in range(q + 1):
                is_near = q // 4 - k // 4 < 2
                mask[h, q, k] = is_near or (k // 4 + 1 + h * step) % 3 == 0
    return mask


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"blocksparse_homo_head_pattern": True, "rope_position_scale": 2.0},
        {"mup_use_scaling": False, "dense_attention_every_n_layers": None},
    ],
)
def test_phi3_small(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**PHI, **changes}
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for part in ("model.final_layernorm.",):
        shapes |= {part + "weight": (DIM,), part + "bias": (DIM,)}
    for i in range(3):
        at = f"model.layers.{i}."
        matrices = {"self_attn.query_key_value": (128, DIM), "self_attn.dense": (DIM, DIM)}
        matrices |= {"mlp.up_proj": (96, DIM), "mlp.down_proj": (DIM, 48)}
        matrices |= {"input_layernorm": (DIM,), "post_attention_layernorm": (DIM,)}
        for name, shape in matrices.items():
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
    w = checkpoint(tmp_path, config, shapes)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def reference(ids: list[int]) -> Tensor:
        scale = 1.3 / 16 if config.get("mup_use_scaling", True) else 0.25
        stretch = config.get("rope_position_scale", 1.0)
        mask = _blocks(len(ids), 0 if config.get("blocksparse_homo_head_pattern") else 1)
        x = w["model.embed_tokens.weight"][ids] * 10
        for i in range(3):
            at = f"model.layers.{i}."
            grouped = linear(at + "self_attn.query_key_value", norm(at + "input_layernorm", x))
            grouped = grouped.view(len(ids), 2, 4, 16)
            q, k, v = grouped[:, :, :2].flatten(1, 2), grouped[:, :, 2], grouped[:, :, 3]
            q, k = (rotated(t, 5000.0, stretch) for t in (q, k))
            is_dense = config["dense_attention_every_n_layers"] and i == 1
            out = attention(q, k, v, scale, None if is_dense else mask)
            x = x + linear(at + "self_attn.dense", out)
            h = linear(at + "mlp.up_proj", norm(at + "post_attention_layernorm", x))
            gate, up = h[:, ::2].clamp(max=0.4), h[:, 1::2].clamp(-0.4, 0.4)
            x = x + linear(at + "mlp.down_proj", gate * torch.sigmoid(1.702 * gate) * (up + 1))
        logits = norm("model.final_layernorm", x) @ w["model.embed_tokens.weight"].T / 8
        logits[:, [3, 50]] = -torch.inf
        return logits

    check(tmp_path, reference)


def test_phi3_small_of_the_long_context_stretches_by_factors() -> None:
    factors = [1.0 + i / 8 for i in range(8)]
    su = {"type": "su", "long_factor": factors, "short_factor": factors}
    su |= {"long_mscale": 1.25, "short_mscale": 1.25, "original_max_position_embeddings": 64}
    position = describe({**PHI, "rope_scaling": su}).blocks[0].attention.rope
    assert position.theta == 5000 and position.scaling.kind == "longrope"
    assert dict(position.scaling.params)["attention_factor"] == 1.25
    with pytest.raises(CheckpointError, match="long_mscale"):
        describe({**PHI, "rope_scaling": {**su, "short_mscale": 1.0}})
