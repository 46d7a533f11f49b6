"""DFlash and DSpark heads with random weights, and what they draft, in plain torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.models.reference_math import Weights, checkpoint, heads, rms, rotated, swiglu

DIM, HEADS, KV_HEADS, WIDTH, INNER, RANK = 64, 4, 2, 16, 96, 8
SIZE, WINDOW, LAYERS, MASK, TAPS = 5, 7, 3, 9, (0, 1)
MINIMAX, ROTATED = "DSparkMiniMaxDraftModel", 8
KINDS = ["full_attention", "sliding_attention", "full_attention"]


def make_head(folder: Path, vocab: int, **changes: Any) -> tuple[dict[str, Any], Weights]:
    """A head for a model of 64 channels: its config and its tensors."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "intermediate_size": INNER,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "block_size": SIZE,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        **changes,
    }
    shapes = _shapes(config)
    folder.mkdir(exist_ok=True)
    weights = checkpoint(folder, config, shapes, seed=len(json.dumps(config)))
    if config["architectures"] == [MINIMAX]:
        _write_minimax(folder, config, weights)
    if config.get("draft_vocab_size"):
        targets = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
        weights["targets"] = targets[: config["draft_vocab_size"]]
        offsets = weights["targets"] - torch.arange(len(weights["targets"]))
        stored = {name: w for name, w in weights.items() if name != "targets"} | {"d2t": offsets}
        save_file(stored, folder / "model.safetensors")
    return config, weights


def _write_minimax(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    """The same head with MiniMax's names and keys. It adds one to the weights of norms."""
    stored = {}
    for name, weight in weights.items():
        at = re.sub(r"^layers\.(\d+)\.", r"layers.\1.decoder_layer.", name)
        at = "final_norm.weight" if at == "norm.weight" else at
        at = "language_model.model.dspark." + at
        stored[at] = weight - 1 if "norm" in name else weight
        if "quantization_config" in config and re.match(r"layers\..*_proj", name):
            stored[at], stored[at + "_scale_inv"], weights[name] = _in_mxfp8(weight)
    save_file(stored, folder / "model.safetensors")
    left_out = ("architectures", "dflash_config", "block_size", "sliding_window_non_causal")
    held = {key: value for key, value in config.items() if key not in left_out}
    held |= {f"dspark_{key}": held.pop(key) for key in ("markov_rank", "markov_head_type")}
    held |= {"dspark_noise_token_id": MASK, "dspark_target_layer_ids": list(TAPS)}
    held |= {"dspark_block_size": SIZE, "dense_intermediate_size": held.pop("intermediate_size")}
    held |= {"moe_layer_freq": [0] * LAYERS, "sparse_attention_config": None}
    held |= {"use_gemma_norm": True, "rotary_dim": ROTATED, "hidden_act": "swigluoai"}
    whole = {"architectures": [MINIMAX], "model_type": "minimax_m3_dspark", "text_config": held}
    if "quantization_config" in held:
        whole["quantization_config"] = held.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(whole))


def _in_mxfp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, exponents of two for 32 inputs, and the weight that they make."""
    parts = weight.unflatten(1, (-1, 32))
    exponents = (parts.abs().amax(-1) / 448).log2().ceil()
    factors = exponents.exp2()[..., None]
    numbers = (parts / factors).to(torch.float8_e4m3fn)
    made = (numbers.float() * factors).flatten(1)
    return numbers.flatten(1), (exponents + 127).to(torch.uint8), made


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (DIM, len(TAPS) * DIM),
        "hidden_norm.weight": (DIM,),
        "norm.weight": (DIM,),
    }
    is_laguna = config["architectures"][0] == "DFlashLagunaForCausalLM"
    if own := config.get("draft_vocab_size"):
        shapes["lm_head.weight"] = (own, DIM)
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{n}_norm.weight": (WIDTH,) for n in "qk"}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (KV_HEADS * WIDTH, DIM) for n in "kv"}
        shapes[f"{at}self_attn.q_proj.weight"] = (HEADS * WIDTH, DIM)
        shapes[f"{at}self_attn.o_proj.weight"] = (DIM, HEADS * WIDTH)
        shapes |= {f"{at}mlp.{n}_proj.weight": (INNER, DIM) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (DIM, INNER)
        if is_laguna:
            shapes[f"{at}self_attn.g_proj.weight"] = (HEADS, DIM)
    if is_laguna:
        shapes |= {f"aux_hidden_norms.{i}.weight": (DIM,) for i in range(len(TAPS))}
    if config["architectures"][0].startswith("DFlash2"):
        shapes |= _of_dflash2(config["dflash_config"], own or config["vocab_size"])
    if config.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = (config["vocab_size"], RANK)
        shapes["markov_head.markov_w2.weight"] = (own or config["vocab_size"], RANK)
        shapes["confidence_head.proj.weight"] = (1, DIM + RANK)
        kind = config["markov_head_type"]
        if kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (RANK, DIM + RANK)
            shapes["markov_head.gate_proj.bias"] = (RANK,)
        elif kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + DIM)
            shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return shapes


def _of_dflash2(config: dict[str, Any], vocab: int) -> dict[str, tuple[int, ...]]:
    taps, rank = config["conv_kernel_size"], config["selector_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.hidden_projection.weight": (rank, DIM),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
    }
    for i, branch in product(range(LAYERS), ("attention", "mlp")):
        at = f"layers.{i}.{branch}_conv."
        shapes[at + "base_kernel"] = (2, taps, DIM)
        groups = DIM // config["conv_group_size"]
        shapes[at + "kernel_projection.weight"] = (2 * taps * groups, DIM)
    return shapes


def drafts(
    config: dict[str, Any], w: Weights, hidden_TN: Tensor, last: int, table: Tensor, head: Tensor
) -> list[int]:
    """Behind the token ``last`` and tokens with these hidden states of the tapped layers."""
    if "aux_hidden_norms.0.weight" in w:
        parts = hidden_TN.chunk(len(TAPS), -1)
        normed = [rms(p, w[f"aux_hidden_norms.{i}.weight"]) for i, p in enumerate(parts)]
        hidden_TN = torch.cat(normed, -1)
    context = rms(hidden_TN @ w["fc.weight"].T, w["hidden_norm.weight"])
    own = config["dflash_config"]
    x = table[torch.tensor([last] + [MASK] * (SIZE - 1))] * own.get("input_embedding_scale", 1)
    for i in range(LAYERS):
        at = f"layers.{i}."
        h = rms(x, w[at + "input_layernorm.weight"])
        h, behind = _convolved(own, w, at + "attention_conv.", h)
        x = x + behind(_attended(config, w, i, h, context))
        h = rms(x, w[at + "post_attention_layernorm.weight"])
        h, behind = _convolved(own, w, at + "mlp_conv.", h)
        ffn = _clamped if config["architectures"] == [MINIMAX] else swiglu
        x = x + behind(ffn(w, at + "mlp.", h))
    x = rms(x, w["norm.weight"])
    head, targets = w.get("lm_head.weight", head), w.get("targets", torch.arange(len(head)))
    if "selector_rank" in own:
        return _selected(own, w, x[1:], last, head, targets)
    if not config.get("markov_rank"):
        return targets[(x[1:] @ head.T).argmax(-1)].tolist()
    return _markov(config["markov_head_type"], w, x, last, head, targets)


def _clamped(w: Weights, at: str, h: Tensor) -> Tensor:
    gate, up = (h @ w[f"{at}{one}_proj.weight"].T for one in ("gate", "up"))
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid() @ w[at + "down_proj.weight"].T


def _convolved(
    own: dict[str, Any], w: Weights, at: str, h: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``h`` [block, channels] convolved, and what convolves the outcome of the branch."""
    if at + "base_kernel" not in w:
        return h, lambda out: out
    taps, group = own["conv_kernel_size"], own["conv_group_size"]
    dynamic = (h @ w[at + "kernel_projection.weight"].T).view(len(h), 2, taps, -1)
    kernel = w[at + "base_kernel"] + dynamic.repeat_interleave(group, -1)

    def convolve(x: Tensor, side: int) -> Tensor:
        rows = [
            sum((kernel[t, side, k] * x[t - k] for k in range(min(taps, t + 1))), torch.zeros(DIM))
            for t in range(len(x))
        ]
        return torch.stack(rows)

    return convolve(h, 0), lambda out: convolve(out, 1)


def _selected(
    own: dict[str, Any], w: Weights, x: Tensor, last: int, head: Tensor, targets: Tensor
) -> list[int]:
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    before, after, hidden = (w[f"candidate_selector.{name}"] for name in names)
    tokens, sorted_ids = [], targets.sort().values.tolist()
    for row in x:
        best, ids = (head @ row * own.get("output_multiplier", 1)).topk(own["selector_top_k"])
        lower = [token for token in sorted_ids if token <= last] or sorted_ids[:1]
        context = before[targets.tolist().index(lower[-1])] * (hidden @ row)
        last = int(targets[ids[(best + after[ids] @ context).argmax()]])
        tokens.append(last)
    return tokens


def _attended(config: dict[str, Any], w: Weights, layer: int, h: Tensor, context: Tensor) -> Tensor:
    at, num = f"layers.{layer}.self_attn.", len(context)
    if "aux_hidden_norms.0.weight" in w:
        context = rms(context, w[f"layers.{layer}.input_layernorm.weight"])
    q, k, v = heads(w, at, torch.cat((context, h)), WIDTH)
    q, k = (rms(x, w[f"{at}{n}_norm.weight"]) for x, n in ((q, "q"), (k, "k")))
    if config["architectures"] == ["Lfm2DSparkDraftModel"]:  # which rotates neighboring channels
        q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    turned = ROTATED if config["architectures"] == [MINIMAX] else WIDTH
    q, k = (torch.cat((rotated(x[..., :turned]), x[..., turned:]), -1) for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    ahead = torch.arange(num + SIZE) - torch.arange(num, num + SIZE)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if KINDS[layer] == "sliding_attention":
        sees_both = config.get("sliding_window_non_causal") or config.get("is_causal") is False
        seen = (ahead > -WINDOW) & ((ahead <= 0) | bool(sees_both))
    scores = torch.einsum("qhd,khd->hqk", q[num:], k) * WIDTH**-0.5
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", shares, v)
    if at + "g_proj.weight" in w:
        out = out * F.softplus(h @ w[at + "g_proj.weight"].T)[..., None]
    return out.flatten(1) @ w[at + "o_proj.weight"].T


def _markov(
    kind: str, w: Weights, x: Tensor, last: int, head: Tensor, targets: Tensor
) -> list[int]:
    tokens, before, state = [], last, torch.zeros(RANK)
    for row in x:
        read = w["markov_head.markov_w1.weight"][before]
        if kind == "gated":
            gate = F.linear(torch.cat((row, read)), w["markov_head.gate_proj.weight"],
                            w["markov_head.gate_proj.bias"])  # fmt: skip
            read = gate.sigmoid() * read
        elif kind == "rnn":
            joint = F.linear(torch.cat((state, read, row)), w["markov_head.joint_proj.weight"],
                             w["markov_head.joint_proj.bias"])  # fmt: skip
            gate, new, out = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            read = out.tanh()
        best = (head @ row + w["markov_head.markov_w2.weight"] @ read).argmax()
        before = int(targets[best])
        tokens.append(before)
    return tokens
