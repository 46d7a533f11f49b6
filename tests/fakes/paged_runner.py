"""Runs a model through its paged cache in few lines, as an executor does.

Pages are in shuffled order, so that no test relies on contiguous memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.attention.select import make_backend
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.models.build import Model, build_model
from radixlm.pools.state import StatePool
from radixlm.step.batch import ForwardBatch
from radixlm.weights.load import load_weights

CPU = torch.device("cpu")


def load_model(
    folder: Path, kernels: Kernels | None = None, device: torch.device = CPU, **build: Any
) -> Model:
    """The model of a checkpoint folder in float32."""
    kernels = kernels or bind(device.type, {"all": "reference"})
    model = build_model(describe(folder), device, torch.float32, kernels, **build)
    load_weights(model, folder, device=device, progress=False)
    return model


class PagedRunner:
    """Sequences by number; `step` computes some tokens of each and returns all their logits."""

    def __init__(
        self,
        model: Model,
        backend: str = "torch_native",
        page_size: int = 4,
        num_pages: int = 256,
        cache_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        final_len: int = 0,
    ) -> None:
        """`final_len`: the length that length-dependent ropes use (0: the present one)."""
        self.final_len = final_len
        self.model, self.page_size = model, page_size
        self.backend = make_backend(
            backend, model.kv_groups, model.context.kernels, model.context.device
        )
        for group in model.kv_groups:
            self.backend.make_pool(group, num_pages, page_size, cache_dtype)
        self.free = [
            random.Random(seed + g.index).sample(range(num_pages), num_pages)
            for g in model.kv_groups
        ]
        self.pages: list[dict[int, list[int]]] = [{} for _ in model.kv_groups]
        self.known: dict[int, list[int]] = {}
        device = model.context.device
        self.states = StatePool(
            getattr(model, "state_layers", ()), num_pages, page_size, torch.float32, device
        )
        self.state_pages: dict[int, list[int]] = {}
        self.free_states = random.Random(seed).sample(range(1, num_pages), num_pages - 1)

    def step(self, tokens: dict[int, Sequence[int]], **extra: Any) -> dict[int, Tensor]:
        """Compute tokens of sequences (a batch in this order); logits [n, V] of each."""
        batch = self.batch(tokens)
        for name, value in extra.items():
            setattr(batch, name, value)
        with torch.inference_mode():
            self.backend.begin(batch)
            logits = self.logits(batch)
        if not len(logits):
            return {}  # a rank without logits
        counts = [len(t) for t in tokens.values()]
        return dict(zip(tokens, logits.split(counts), strict=True))

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Of all tokens."""
        lora = () if batch.lora is None else (batch.lora,)
        return self.model.logits(self.model.forward(batch), *lora)

    def batch(self, tokens: dict[int, Sequence[int]]) -> ForwardBatch:
        """The step's tensors; the sequences grow by their tokens."""
        positions, starts = [], [0]
        for sequence, new in tokens.items():
            before = len(self.known.setdefault(sequence, []))
            self.known[sequence].extend(new)
            positions.append(torch.arange(before, before + len(new)))
            starts.append(starts[-1] + len(new))
        kv_len = [len(self.known[s]) for s in tokens]
        tables = tuple(self._table(g, list(tokens)) for g in range(len(self.pages)))
        counts = torch.tensor([len(t) for t in tokens.values()])
        owner = torch.repeat_interleave(torch.arange(len(tokens)), counts)
        position = torch.cat(positions)
        stores = tuple(
            t[owner, position // self.page_size].long() * self.page_size + position % self.page_size
            for t in tables
        )
        device = self.model.context.device
        batch = ForwardBatch(
            token_ids_T=torch.tensor([t for new in tokens.values() for t in new]),
            positions_T=position,
            rope_len_T=torch.tensor([self.final_len or n for n in kv_len])[owner],
            query_start_S1=torch.tensor(starts, dtype=torch.int32),
            kv_len_S=torch.tensor(kv_len, dtype=torch.int32),
            page_table_GSP=tables,
            store_GT=stores,
            logits_rows_R=torch.arange(starts[-1]),
            attn=self.backend,
            max_query_len=max(len(t) for t in tokens.values()),
            max_kv_len=max(kv_len),
        )
        if self.states.layers:
            self._put_states(batch, tokens)
        return batch if device == CPU else moved(batch, device)

    def _put_states(self, batch: ForwardBatch, tokens: dict[int, Sequence[int]]) -> None:
        """One page of states for every page of tokens, never freed."""
        width = -(-int(batch.max_kv_len) // self.page_size)
        table = np.zeros((len(tokens), width), np.int64)
        for row, sequence in enumerate(tokens):
            pages = self.state_pages.setdefault(sequence, [])
            while len(pages) * self.page_size < len(self.known[sequence]):
                pages.append(self.free_states.pop())
            table[row, : len(pages)] = pages
        counts = np.array([len(new) for new in tokens.values()])
        starts = np.array([len(self.known[s]) for s in tokens]) - counts
        batch.states = self.states.begin(table, starts, counts)

    def _table(self, group: int, sequences: list[int]) -> Tensor:
        for sequence in sequences:
            have = self.pages[group].setdefault(sequence, [])
            while len(have) * self.page_size < len(self.known[sequence]):
                have.append(self.free[group].pop())
        rows = [self.pages[group][s] for s in sequences]
        width = max(len(row) for row in rows)
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)

    def prefill(self, tokens: dict[int, Sequence[int]], num_chunks: int = 1) -> dict[int, Tensor]:
        """All tokens in `num_chunks` steps; logits of every token."""
        parts: dict[int, list[Tensor]] = {s: [] for s in tokens}
        for chunk in range(num_chunks):
            fed = {}
            for sequence, new in tokens.items():
                start = len(new) * chunk // num_chunks
                end = len(new) * (chunk + 1) // num_chunks
                if end > start:
                    fed[sequence] = list(new[start:end])
            for sequence, logits in self.step(fed).items():
                parts[sequence].append(logits)
        return {sequence: torch.cat(p) for sequence, p in parts.items() if p}


def moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The batch with every tensor on the device."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.to(device)
        elif isinstance(value, tuple):
            changes[field.name] = tuple(tensor.to(device) for tensor in value)
    return replace(batch, **changes)
