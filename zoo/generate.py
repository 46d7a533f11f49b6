"""Batched greedy decoding with a key/value cache, in plain torch."""

from __future__ import annotations

import torch
from model import Tiny, attend, rms_norm
from torch import Tensor
from torch.nn import functional as F

BATCH = 50
SCORES = 16_000_000  # places of one batch's score matrix


class Decoder:
    """Greedy decoding of left-padded prompts (rotary positions are relative: padding is free)."""

    def __init__(self, model: Tiny, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.shape, self.dtype = model, model.shape, dtype
        with torch.no_grad():
            self.weights = model.layer_weights(dtype)
            self.head = model.embed.to(dtype)

    def _step(self, ids_BL: Tensor, bias: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [B, L, D] of new tokens; the cache in `past` grows by L."""
        start = past[0][0].shape[2] if past else 0
        cos = self.model.cos[start : start + ids_BL.shape[1]]
        sin = self.model.sin[start : start + ids_BL.shape[1]]
        x = F.embedding(ids_BL, self.model.embed)
        for i, w in enumerate(self.weights):
            q, k, v = self.model.project(x, w, cos, sin, self.dtype)
            if start:
                k, v = torch.cat((past[i][0], k), 2), torch.cat((past[i][1], v), 2)
                past[i] = (k, v)
            else:
                past.append((k, v))
            x = self.model.finish(x, attend(q, k, v, bias), w, self.dtype)
        return rms_norm(x, self.model.norm).to(self.dtype)

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], stop: int, max_new: int) -> list[list[int]]:
        """Continuations without the stop token."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        begin = torch.tensor([width - len(p) for p in prompts])
        columns = torch.arange(width + max_new)
        real = columns >= begin[:, None]  # [B, columns]
        causal = columns[:width, None] >= columns[None, :width]
        seen = (real[:, None, None, :width] & causal) | torch.eye(width, dtype=torch.bool)
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -1e9)
        past: list[tuple[Tensor, Tensor]] = []
        hidden = self._step(ids, bias, past)[:, -1]
        made: list[list[int]] = [[] for _ in prompts]
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for n in range(max_new):
            token = (hidden @ self.head.T).argmax(-1)
            alive &= token != stop
            if not alive.any():
                break
            for i in alive.nonzero().squeeze(1).tolist():
                made[i].append(int(token[i]))
            held = real[:, None, None, : width + n + 1]
            bias = torch.zeros(held.shape).masked_fill_(~held, -1e9)
            hidden = self._step(token[:, None], bias, past)[:, -1]
        return made

    def all(self, prompts: list[list[int]], stop: int, max_new: int) -> list[list[int]]:
        """Continuations of any number of prompts, in their order."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        made: list[list[int]] = [[] for _ in prompts]
        at = 0
        while at < len(order):
            # The scores of a batch, width squared, bound its memory.
            widest = len(prompts[order[min(at + BATCH, len(order)) - 1]]) + max_new
            part = order[at : at + max(1, min(BATCH, SCORES // widest**2))]
            at += len(part)
            outs = self.batch([prompts[i] for i in part], stop, max_new)
            for i, out in zip(part, outs, strict=True):
                made[i] = out
        return made
