"""A small eager torch driver of a `Decoder` record: a readable definition of every field.

The oracle of the family tests is Hugging Face; this driver only shows that the record and the
names say everything that is needed to reproduce it. T tokens, H heads, D channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.names import Named, prefix_of, spellings
from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import Attention, Block, Decoder, LatentAttention, Mlp, Moe, Norm, Rope

ACT = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


class Weights:
    """Fetches roles from a checkpoint and records unused tensors."""

    def __init__(self, decoder: Decoder, tensors: dict[str, Tensor]) -> None:
        self.decoder, self.tensors, self.unused = decoder, tensors, set(tensors)
        self.ours, self.theirs = prefix_of(decoder, tensors)

    def __call__(self, role: str, suffix: str, i: int = 0, experts: int = 0) -> Tensor:
        ways = spellings(self.decoder.names, role)
        for way in ways:
            names = [self._names(template, suffix, i, experts) for template in way.templates]
            if all(name in self.tensors for group in names for name in group):
                return self._read(way, names)
        raise KeyError(f"{role}.{suffix} of layer {i}: none of {ways}")

    def _names(self, template: str, suffix: str, i: int, experts: int) -> list[str]:
        many = range(experts) if "{e}" in template else [0]
        if template.startswith(self.ours):
            template = self.theirs + template.removeprefix(self.ours)
        exact = [template.format(i=i, e=e) for e in many]
        return [n if n in self.tensors else f"{n}.{suffix}" for n in exact]

    def _read(self, way: Named, names: list[list[str]]) -> Tensor:
        stacked = "{e}" in way.templates[0]
        parts = []
        for group in names:
            self.unused -= set(group)
            found = [self.tensors[name] for name in group]
            parts.append(torch.stack(found) if stacked else found[0])
        joined = torch.cat(parts, 1 if stacked else 0) if len(parts) > 1 else parts[0]
        return way.recipe(joined, torch.cat) if way.recipe else joined


class Runner:
    """Logits of a prompt for a description and a checkpoint."""

    def __init__(self, decoder: Decoder, tensors: dict[str, Tensor]) -> None:
        self.d, self.w = decoder, Weights(decoder, tensors)

    def __call__(self, ids: Tensor) -> Tensor:
        d, w = self.d, self.w
        embed, positions = w("embed", "weight"), torch.arange(len(ids))
        x = embed[ids] * d.embed_scale
        if d.positions:
            x = x + w("positions", "weight")[positions + d.positions[1]]
        for i, block in enumerate(d.blocks):
            x = self.block(block, x, i)
        x = self.norm(d.norm, "norm", x)
        logits = F.linear(x, embed if d.tied else w("head", "weight"))
        if d.head_bias:
            logits = logits + w("head", "bias")
        logits = logits * d.logit_scale
        if d.logit_softcap:
            logits = (logits / d.logit_softcap).tanh() * d.logit_softcap
        return logits

    def linear(self, role: str, x: Tensor, bias: bool, i: int) -> Tensor:
        return F.linear(x, self.w(role, "weight", i), self.w(role, "bias", i) if bias else None)

    def norm(self, s: Norm, role: str, x: Tensor, i: int = 0) -> Tensor:
        x = x.float()
        if s.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + s.eps)
        if s.affine:
            x = x * (self.w(role, "weight", i) + s.offset)
        return x + self.w(role, "bias", i) if s.bias else x

    def block(self, b: Block, x: Tensor, i: int) -> Tensor:
        mix = lambda h: self.mixer(b.mixer, h, i) * b.residual  # noqa: E731
        feed = lambda h: self.ffn(b.ffn, h, i) * b.residual  # noqa: E731
        norm = lambda n, h: self.norm(b.norm, f"norm{n}", h, i)  # noqa: E731
        match b.layout:
            case "pre":
                x = x + mix(norm(1, x))
                return x + feed(norm(2, x))
            case "post":
                x = x + norm(1, mix(x))
                return x + norm(2, feed(x))
            case "sandwich":
                x = x + norm(2, mix(norm(1, x)))
                return x + norm(4, feed(norm(3, x)))
            case "parallel":
                h = norm(1, x)
                return x + mix(h) + feed(h)
            case "parallel2":
                return x + mix(norm(1, x)) + feed(norm(2, x))

    def mixer(self, s: Attention | LatentAttention, x: Tensor, i: int) -> Tensor:
        return self.attention(s, x, i) if isinstance(s, Attention) else self.latent(s, x, i)

    def attention(self, s: Attention, x: Tensor, i: int) -> Tensor:
        q_heads = s.heads * (2 if s.gate else 1)
        sizes = [n * s.head_dim for n in (q_heads, s.kv_heads, s.kv_heads)]
        q, k, v = self.linear("mixer.qkv", x, s.qkv_bias, i).split(sizes, -1)
        if s.gate:
            q, gate = (t.flatten(1) for t in q.unflatten(-1, (s.heads, 2, -1)).unbind(2))
        if s.qk_norm == "row":
            q, k = self.qk_norm(s, q, k, i)
        q, k, v = (t.unflatten(-1, (-1, s.head_dim)) for t in (q, k, v))
        if s.qk_norm in ("head", "each"):
            q, k = self.qk_norm(s, q, k, i)
        if s.rope:
            q, k = rotate(q, s.rope), rotate(k, s.rope)
        sinks = self.w("mixer.sinks", "weight", i) if s.sinks else None
        out = attend(q, k, v, s.softmax_scale, s.window, s.softcap, sinks)
        out = out * gate.sigmoid() if s.gate else out
        return self.linear("mixer.o", out, s.o_bias, i)

    def qk_norm(self, s: Attention, q: Tensor, k: Tensor, i: int) -> tuple[Tensor, Tensor]:
        spec = s.qk_norm_spec
        return self.norm(spec, "mixer.q_norm", q, i), self.norm(spec, "mixer.k_norm", k, i)

    def latent(self, s: LatentAttention, x: Tensor, i: int) -> Tensor:
        if s.q_rank:
            q = self.norm(s.norm, "mixer.q_a_norm", self.linear("mixer.q_a", x, s.bias, i), i)
            q = self.linear("mixer.q_b", q, False, i)
        else:
            q = self.linear("mixer.q", x, False, i)
        q_nope, q_rope = q.unflatten(-1, (s.heads, -1)).split((s.nope_dim, s.rope_dim), -1)
        kv = self.linear("mixer.kv_a", x, s.bias, i)
        kv, k_rope = kv.split((s.kv_rank, s.rope_dim), -1)
        kv = self.linear("mixer.kv_b", self.norm(s.norm, "mixer.kv_a_norm", kv, i), False, i)
        k_nope, v = kv.unflatten(-1, (s.heads, -1)).split((s.nope_dim, s.v_dim), -1)
        q_rope, k_rope = rotate(q_rope, s.rope), rotate(k_rope[:, None], s.rope)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, s.heads, -1)), -1)
        return self.linear("mixer.o", attend(q, k, v, s.scale), s.bias, i)

    def ffn(self, s: Mlp | Moe, x: Tensor, i: int) -> Tensor:
        return self.moe(s, x, i) if isinstance(s, Moe) else self.mlp(s, x, i, "ffn")

    def mlp(self, s: Mlp, x: Tensor, i: int, role: str) -> Tensor:
        if not s.gated:
            up = ACT[s.act](self.linear(f"{role}.up1", x, s.bias, i))
            return self.linear(f"{role}.down", up, s.bias, i)
        gate, up = self.linear(f"{role}.up", x, s.bias, i).chunk(2, -1)
        return self.linear(f"{role}.down", ACT[s.act](gate) * up, s.bias, i)

    def moe(self, s: Moe, x: Tensor, i: int) -> Tensor:
        weights, chosen = self.route(s, x, i)
        up, down = (self.w(f"moe.{n}", "weight", i, s.experts) for n in ("up", "down"))
        y = torch.zeros_like(x)
        for e in range(s.experts):
            token, rank = (chosen == e).nonzero(as_tuple=True)
            up_bias = self.w("moe.up_bias", "bias", i, s.experts)[e] if s.bias else None
            gate, value = F.linear(x[token], up[e], up_bias).chunk(2, -1)
            if s.act == "swiglu_oai":
                gate, value = gate.clamp(max=7.0), value.clamp(-7.0, 7.0)
                h = (value + 1) * gate * torch.sigmoid(gate * 1.702)
            else:
                h = ACT[s.act](gate) * value
            down_bias = self.w("moe.down_bias", "bias", i, s.experts)[e] if s.bias else None
            h = F.linear(h, down[e], down_bias)
            y.index_add_(0, token, h * weights[token, rank, None])
        if s.shared:
            shared = self.mlp(s.shared, x, i, "moe.shared")
            if s.shared_gate:
                shared = shared * self.linear("moe.shared_gate", x, False, i).sigmoid()
            y = y + shared
        return y

    def route(self, s: Moe, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        logits = self.linear("moe.router", x, s.bias, i)
        score = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(s.score, logits)
        pick = score + self.w("moe.correction", "bias", i) if s.correction else score
        groups, kept = s.groups
        if groups > 1:
            each = pick.unflatten(-1, (groups, -1))
            best = each.amax(-1) if s.group_score == "max" else each.topk(2, -1)[0].sum(-1)
            keep = torch.zeros_like(best).scatter_(1, best.topk(kept, -1)[1], 1).bool()
            pick = each.masked_fill(~keep[..., None], -torch.inf).flatten(1)
        chosen = pick.topk(s.top_k, -1)[1]
        weights = score.gather(1, chosen)
        if s.score == "softmax_topk":
            weights = weights.softmax(-1)
        if s.renorm:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * s.scale, chosen


def rotate(x_THD: Tensor, s: Rope) -> Tensor:
    frequencies, factor = inv_freq(s, len(x_THD))
    angles = torch.arange(len(x_THD))[:, None].float() * torch.from_numpy(frequencies)
    cos, sin = angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
    turned, rest = x_THD[..., : s.dim], x_THD[..., s.dim :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if s.interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if s.interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D], k [T, K, D], v [T, K, E] -> [T, H * E], causal."""
    length, heads = q.shape[:2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < window if window else True)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, length, 1)), -1)
    shares = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
