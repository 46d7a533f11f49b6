"""A model with a predictable hidden state: [token, position, rope length, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.hidden_outputs.reader import HiddenReader
from radixlm.models.pooler import Pooler
from radixlm.sampling.table import SamplingTable
from radixlm.step.batch import ForwardBatch

VOCAB = 16
DIM = 4
PAGE = 4
SLOTS = 4
CPU = torch.device("cpu")


class FakeModel:
    """Token t + 1 is the most likely successor of t; rows whose token is in `poison` have
    non-finite logits."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.poison: set[int] = set()
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.batches.append(batch)
        columns = (batch.token_ids_T, batch.positions_T, batch.rope_len_T)
        return torch.stack([*(c.float() for c in columns), torch.ones(batch.num_tokens)], dim=1)

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states only on request; logits of the requested rows."""
        hidden_TD = self.forward(batch)
        rows = batch.logits_rows_R
        return hidden_TD if need_hidden else None, self.logits(hidden_TD[rows]) if len(
            rows
        ) else None

    def logits(self, hidden_RD: Tensor, lora: object = None) -> Tensor:
        self.rows.append(len(hidden_RD))
        ids = torch.arange(VOCAB)
        wanted = (hidden_RD[:, :1].long() + 1) % VOCAB
        logits = -(ids - wanted).abs().float()
        for row, token in enumerate(hidden_RD[:, 0].long().tolist()):
            if token in self.poison:
                logits[row, 3] = torch.nan
        return logits


class FakeAttention:
    def begin(self, batch: ForwardBatch) -> None:
        """Nothing to plan."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor | None, site: object) -> Tensor:
        raise AssertionError("the fake model has no attention")


def make_runner(num_spaces: int = 1, max_pages: int = 8) -> tuple[Runner, FakeModel]:
    model = FakeModel()
    tables = DeviceTables(SLOTS, max_pages, num_spaces, CPU)
    sampling = SamplingTable(SLOTS, VOCAB, CPU)
    spaces = tuple(range(num_spaces))
    outputs = HiddenReader(model, tables, Pooler())
    return Runner(
        RunnerParts(model, FakeAttention(), tables, sampling, outputs=outputs),
        RunnerOptions(PAGE, spaces, (0,)),
    ), model
