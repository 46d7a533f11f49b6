"""PLaMo 2 and 3 against their mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import Shapes, Weights, attention, check, checkpoint, rms, rotated
from torch import Tensor

DIM, HEADS, WIDTH, INNER, VOCAB, SIZE, RANK = 64, 4, 16, 48, 100, 8, 64
BASE: dict[str, Any] = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_local_theta": 100.0,
    "tie_word_embeddings": False,
}
NORMS = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")


def _around(at: str) -> Shapes:
    """The norms and the feed-forward of a layer."""
    shapes: Shapes = {f"{at}{name}.weight": (DIM,) for name in NORMS}
    shapes[f"{at}mlp.gate_up_proj.weight"] = (2 * INNER, DIM)
    shapes[f"{at}mlp.down_proj.weight"] = (DIM, INNER)
    return shapes


def _model(layers: list[Shapes]) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes["lm_head.weight"] = (VOCAB, DIM)
    for i, own in enumerate(layers):
        at = f"model.layers.layers.{i}."
        shapes |= _around(at) | {f"{at}mixer.{name}": shape for name, shape in own.items()}
    return shapes


class Reference:
    """The model; subclasses say what a mixer computes."""

    def __init__(self, weights: Weights, count: int) -> None:
        self.w, self.count = weights, count

    def normed(self, x: Tensor, name: str, offset: float = 1.0) -> Tensor:
        return rms(x, self.w[name + ".weight"] + offset)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name + ".weight"])

    def mixed(self, i: int, at: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    def attended(
        self, at: str, qk: tuple[Tensor, ...], v: Tensor, theta: float, span: int = 0
    ) -> Tensor:
        q, k = (rotated(one, theta) for one in qk)
        places = torch.arange(len(q))
        near = places[:, None] - places < span if span else None
        return self.linear(attention(q, k, v, WIDTH**-0.5, near), at + "o_proj")

    def __call__(self, ids: list[int]) -> Tensor:
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.count):
            at = f"model.layers.layers.{i}."
            read = self.mixed(i, at + "mixer.", self.normed(x, at + "pre_mixer_norm"))
            x = x + self.normed(read, at + "post_mixer_norm", 1 / 5)
            h = self.linear(self.normed(x, at + "pre_mlp_norm"), at + "mlp.gate_up_proj")
            gate, up = h.chunk(2, -1)
            fed = self.linear(F.silu(gate) * up, at + "mlp.down_proj")
            x = x + self.normed(fed, at + "post_mlp_norm", 1 / 5**1.5)
        return self.linear(self.normed(x, "model.norm"), "lm_head")


class Plamo3(Reference):
    def mixed(self, i: int, at: str, x: Tensor) -> Tensor:
        qkv = self.linear(x, at + "qkv_proj")
        q, k, v = (one.unflatten(-1, (HEADS, WIDTH)) for one in qkv.chunk(3, -1))
        qk = self.normed(q, at + "q_norm"), self.normed(k, at + "k_norm")
        return self.attended(at, qk, v, *((10000.0,) if i else (100.0, 5)))


@pytest.mark.parametrize("by_pattern", [False, True])
def test_plamo_3(tmp_path: Path, by_pattern: bool) -> None:
    own: Shapes = {"qkv_proj.weight": (3 * DIM, DIM), "o_proj.weight": (DIM, DIM)}
    own |= {f"{one}_norm.weight": (WIDTH,) for one in "qk"}
    windows: dict[str, Any] = {"interleaved_sliding_window": [5, None]}
    if by_pattern:
        windows = {"sliding_window": 5, "sliding_window_pattern": 2}
    config = {**BASE, "architectures": ["Plamo3ForCausalLM"], **windows}
    config |= {"head_dim": WIDTH, "num_hidden_layers": 2}
    check(tmp_path, Plamo3(checkpoint(tmp_path, config, _model([own, own])), 2))


class Plamo2(Reference):
    """Attention without and with a window in layers 1 and 3; the others are Mamba."""

    def mixed(self, i: int, at: str, x: Tensor) -> Tensor:
        return self._read(i, at, x) if i % 2 else self._scanned(at, x)

    def _read(self, i: int, at: str, x: Tensor) -> Tensor:
        qkv = self.linear(x, at + "qkv_proj")
        q, k, v = (t.unflatten(-1, (-1, WIDTH)) for t in qkv.split((DIM, 2 * WIDTH, 2 * WIDTH), -1))
        qk = tuple(rms(t, self.w[f"{at}{n}_weight"], 1e-6) for n, t in (("q", q), ("k", k)))
        return self.attended(at, qk, v, *((10000.0,) if i == 1 else (100.0, 5)))

    def _scanned(self, at: str, x: Tensor) -> Tensor:
        """The state of each head, token by token."""
        w = self.w
        z, x = self.linear(x, at + "in_proj").unflatten(-1, (HEADS, 2 * WIDTH)).chunk(2, -1)
        padded = F.pad(x.flatten(1).T, (2, 0))
        x = F.silu(F.conv1d(padded[None], w[at + "conv1d.weight"], groups=DIM))[0].T
        parts = self.linear(x, at + "bcdt_proj").split((SIZE, SIZE, RANK), -1)
        b, c, dt = (
            rms(t, w[f"{at}{n}_norm_weight"]) for n, t in zip(("B", "C", "dt"), parts, strict=True)
        )
        steps = F.softplus(self.linear(dt, at + "dt_proj") + w[at + "dt_bias"])
        kept = torch.exp(-w[at + "A_log"].exp() * steps)
        x = x.unflatten(-1, (HEADS, WIDTH))
        state, rows = torch.zeros(HEADS, WIDTH, SIZE), []
        for t in range(len(x)):
            new = (x[t] * steps[t][:, None])[..., None] * b[t]
            state = state * kept[t][:, None, None] + new
            rows.append(state @ c[t] + w[at + "D"][:, None] * x[t])
        return self.linear((torch.stack(rows) * F.silu(z)).flatten(1), at + "out_proj")


def test_plamo_2(tmp_path: Path) -> None:
    attends: Shapes = {"qkv_proj.weight": (DIM + 4 * WIDTH, DIM), "o_proj.weight": (DIM, DIM)}
    attends |= {"q_weight": (HEADS, WIDTH), "k_weight": (2, WIDTH)}
    scans: Shapes = {"in_proj.weight": (2 * DIM, DIM), "conv1d.weight": (DIM, 1, 3)}
    scans |= {"bcdt_proj.weight": (2 * SIZE + RANK, DIM), "dt_proj.weight": (HEADS, RANK)}
    scans |= dict.fromkeys(("A_log", "D", "dt_bias"), (HEADS,))
    scans |= {"dt_norm_weight": (RANK,), "B_norm_weight": (SIZE,), "C_norm_weight": (SIZE,)}
    scans["out_proj.weight"] = (DIM, DIM)
    config = {**BASE, "architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2"}
    config |= {"hidden_size_per_head": WIDTH, "mamba_num_heads": HEADS, "mamba_d_state": SIZE}
    config |= {"mamba_d_conv": 3, "mamba_step": 2, "num_key_value_heads": 2}
    config |= {"attention_window_size": 5, "full_attention_idx": [1], "num_hidden_layers": 4}
    w = checkpoint(tmp_path, config, _model([scans, attends] * 2))
    check(tmp_path, Plamo2(w, 4))
