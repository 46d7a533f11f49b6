"""An EAGLE-3 head for the bundled model, and how many of its tokens are accepted.

One Llama layer reads the target's residual stream behind three layers together with the next
token and guesses the token after it; its own output takes the stream's place for later guesses.

    python zoo/eagle.py --minutes 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from batches import Packer, Rows
from chat import Encoder
from checkpoint import read, save
from data import BUCKETS, stream
from model import Tiny, attend, rms_norm, rotate
from muon import Muon
from safetensors.torch import load_file
from speculation import accept_length, transcripts
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from train import attention_bias

CAPTURED = (0, 2, 4)  # the streams behind these layers are read
STEPS = 3
INNER = 512
DTYPE = torch.bfloat16


class Eagle(nn.Module):
    """The head. Matrices are stacks of one, as the optimizer wants them."""

    def __init__(self, target: Tiny) -> None:
        super().__init__()
        s = self.shape = target.shape
        self.target = [target]  # a list: the target's weights are not this module's
        width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        sizes = {
            "fc": (s.hidden, s.hidden * len(CAPTURED)),
            "q": (width, 2 * s.hidden), "k": (kv, 2 * s.hidden), "v": (kv, 2 * s.hidden),
            "o": (s.hidden, width), "gate": (INNER, s.hidden), "up": (INNER, s.hidden),
            "down": (s.hidden, INNER),
        }  # fmt: skip
        self.matrix = nn.ParameterDict(
            {
                n: nn.Parameter(torch.randn(1, *size) * 0.5 * size[1] ** -0.5)
                for n, size in sizes.items()
            }
        )
        names = ("input", "hidden", "post", "norm")
        self.vector = nn.ParameterDict({n: nn.Parameter(torch.ones(s.hidden)) for n in names})
        self.head = nn.Parameter(target.embed.detach().clone())
        with torch.no_grad():  # begin as the target's last captured stream under its own head
            self.vector["norm"].copy_(target.norm)
            self.matrix["fc"].zero_()[0, :, -s.hidden :] = torch.eye(s.hidden)
            self.matrix["o"].mul_(0.1)
            self.matrix["down"].mul_(0.1)

    def w(self, name: str) -> Tensor:
        """One matrix in the computing type."""
        return self.matrix[name][0].to(DTYPE)

    def project(self, h: Tensor, token: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one step; `at` holds the rotary positions [L]."""
        s, target = self.shape, self.target[0]
        e = rms_norm(F.embedding(token, target.embed), self.vector["input"])
        x = torch.cat((e, rms_norm(h, self.vector["hidden"])), -1).to(DTYPE)
        q = F.linear(x, self.w("q")).unflatten(-1, (s.heads, s.head_dim)).transpose(1, 2)
        k = F.linear(x, self.w("k")).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        v = F.linear(x, self.w("v")).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        cos, sin = target.cos[at], target.sin[at]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, h: Tensor, heads: Tensor) -> Tensor:
        """The residual stream behind the layer."""
        h = h + F.linear(heads.transpose(1, 2).flatten(2), self.w("o"))
        x = rms_norm(h, self.vector["post"]).to(DTYPE)
        inner = F.silu(F.linear(x, self.w("gate"))) * F.linear(x, self.w("up"))
        return h + F.linear(inner, self.w("down"))

    def forward(self, streams: Tensor, ids: Tensor, bias: Tensor) -> list[Tensor]:
        """Normed hidden states [B, L, D] of every step.

        Step s at place t has seen the true tokens up to t + 1 + s and guesses token t + 2 + s.
        Its query looks at the first step's keys up to t and at place t's keys of later steps.
        """
        h = F.linear(streams.to(DTYPE), self.w("fc")).float()
        places = torch.arange(ids.shape[1])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = []
        for step in range(STEPS):
            token = F.pad(ids[:, 1 + step :], (0, 1 + step))
            q, k, v = self.project(h, token, places + step)
            keys.append(k)
            values.append(v)
            heads = attend(q, k, v, bias) if step == 0 else later(q, keys, values, bias)
            h = self.finish(h, heads)
            made.append(rms_norm(h, self.vector["norm"]).to(DTYPE))
        return made


def later(q: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor) -> Tensor:
    """Attention over the first step's keys and, at the own place only, those of later steps."""
    groups = q.shape[1] // keys[0].shape[1]
    k, v = (torch.stack(x).repeat_interleave(groups, 2) for x in (keys, values))
    scores = (q @ k[0].mT).float() * q.shape[-1] ** -0.5 + bias
    own = (q * k[1:]).sum(-1).float().movedim(0, -1) * q.shape[-1] ** -0.5
    probs = torch.cat((scores, own), -1).softmax(-1).to(DTYPE)
    length = k.shape[3]
    extra = (probs[..., length:].movedim(-1, 0).unsqueeze(-1) * v[1:]).sum(0)
    return probs[..., :length] @ v[0] + extra


@torch.no_grad()
def target_streams(target: Tiny, ids: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(captured streams [B, L, 3D], the target's choices [B, L])."""
    outputs: list[Tensor] = []
    hidden = target(ids, bias, outputs=outputs)
    choices = (hidden @ target.embed.to(hidden.dtype).T).argmax(-1)
    return torch.cat([outputs[i] for i in CAPTURED], -1), choices


def loss_of_rows(model: Eagle, rows: Rows) -> Tensor:
    """Mean loss of all steps where the assistant writes; the target's choices are the truth."""
    ids, documents = torch.from_numpy(rows.ids).long(), torch.from_numpy(rows.documents)
    bias = attention_bias(documents)
    streams, choices = target_streams(model.target[0], ids, bias)
    total = torch.zeros(())
    for step, hidden in enumerate(model(streams, ids, bias)):
        ahead = 1 + step  # the target at t + 1 + step chose token t + 2 + step
        written = F.pad(torch.from_numpy(rows.written)[:, ahead + 1 :] > 0, (0, ahead + 1))
        same = documents == F.pad(documents[:, ahead + 1 :], (0, ahead + 1), value=-2)
        at = (written & same).flatten().nonzero().squeeze(1)
        wanted = F.pad(choices[:, ahead:], (0, ahead)).flatten()[at]
        logits = (hidden.flatten(0, 1)[at] @ model.head.to(DTYPE).T).float()
        total = total + F.cross_entropy(logits, wanted) * 0.8**step
    return total


def train(target: Tiny, encoder: Encoder, minutes: float, begun: Path | None) -> Eagle:
    """A head after so many minutes."""
    model = Eagle(target)
    if begun:
        load_head(model, begun)
    target.compile_parts()
    seed, rows = (4 if begun else 3), (("short", 11), ("middle", 4))
    packers = [Packer(encoder, stream(b, seed), BUCKETS[b], n) for b, n in rows]
    optimizers = [
        Muon(model.matrix.values(), lr=0.02),
        torch.optim.AdamW([model.head, *model.vector.values()], lr=2e-3, weight_decay=0.0),
    ]
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    begin = time.monotonic()
    bar = tqdm(total=round(60 * minutes), unit="s", mininterval=10)
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1:
        for packer in packers:
            loss = loss_of_rows(model, packer.rows())
            loss.backward()
        factor = min(1.0, 20 * progress + 0.05, 1.6 * (1 - progress))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        bar.n = round(time.monotonic() - begin)
        bar.set_postfix(loss=f"{loss.item():.4f}")
    target.plain_parts()
    return model


@torch.inference_mode()
def accepted(model: Eagle, encoder: Encoder, num_items: int = 100) -> float:
    """Mean number of tokens a verification yields, over the target's own held-out replies."""
    hits = []
    for prompt, made in transcripts(model.target[0], encoder, num_items):
        ids = torch.tensor([prompt + made])
        bias = attention_bias(torch.zeros_like(ids))
        streams, _ = target_streams(model.target[0], ids, bias)
        guesses = [(h @ model.head.to(DTYPE).T).argmax(-1)[0] for h in model(streams, ids, bias)]
        last = len(prompt) + len(made)
        hits.append(
            [
                [
                    t + 2 + s < last and int(guesses[s][t]) == int(ids[0, t + 2 + s])
                    for s in range(STEPS)
                ]
                for t in range(len(prompt) - 1, last - 1)
            ]
        )
    return accept_length(hits)


NAMES = {
    "fc": "fc", "q": "midlayer.self_attn.q_proj", "k": "midlayer.self_attn.k_proj",
    "v": "midlayer.self_attn.v_proj", "o": "midlayer.self_attn.o_proj",
    "gate": "midlayer.mlp.gate_proj", "up": "midlayer.mlp.up_proj",
    "down": "midlayer.mlp.down_proj", "input": "midlayer.input_layernorm",
    "hidden": "midlayer.hidden_norm", "post": "midlayer.post_attention_layernorm",
    "norm": "norm",
}  # fmt: skip


@torch.no_grad()
def load_head(model: Eagle, folder: Path) -> None:
    """Go on from an exported head."""
    held = load_file(folder / "model.safetensors")
    for name, p in [*model.matrix.items(), *model.vector.items()]:
        p.copy_(held[f"{NAMES[name]}.weight"].view_as(p))
    model.head.copy_(held["lm_head.weight"])


def export_head(model: Eagle, folder: Path) -> None:
    """The layout of LlamaForCausalLMEagle3; the embedding stays the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {n: p[0] for n, p in model.matrix.items()} | dict(model.vector.items())
    weights = {f"{NAMES[n]}.weight": p.detach().bfloat16().contiguous() for n, p in held.items()}
    vocab = model.shape.vocab
    weights["lm_head.weight"] = model.head.detach().bfloat16()
    weights["d2t"], weights["t2d"] = torch.zeros(vocab, dtype=torch.int64), torch.ones(vocab).bool()
    save(weights, folder / "model.safetensors")
    s = model.shape
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": s.hidden, "target_hidden_size": s.hidden, "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "hidden_act": "silu",
        "vocab_size": vocab, "draft_vocab_size": vocab, "rms_norm_eps": 1e-6,
        "rope_theta": s.theta, "max_position_embeddings": s.context, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(CAPTURED), "use_aux_hidden_state": True,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train, export and measure the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--begun", type=Path, help="go on from this head")
    parser.add_argument("--out", type=Path, default=Path("zoo/models"))
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    encoder = Encoder(args.base / "tokenizer.json")
    model = train(read(args.base).requires_grad_(False), encoder, args.minutes, args.begun)
    export_head(model, args.out / "radix-tiny-eagle3")
    print(f"accept length with {STEPS} steps: {accepted(model, encoder):.2f}")


if __name__ == "__main__":
    main()
