"""Images whose encoder makes the request's vector: the text model takes no part in it.

A step with such an image computes one token that stands for it, whose hidden state nobody reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.media import MediaRows, MultimodalEncoder, caught
from radixlm.executor.pooling import Head, Pooler
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Item, StepPlan


class MediaVectors(MediaRows):
    """Keeps the vector of each image of a step until it is asked for."""

    def __init__(self, encoder: MultimodalEncoder) -> None:
        super().__init__(encoder)
        self._vectors: dict[str, Tensor] = {}

    def put(self, plan: StepPlan, tables: DeviceTables, batch: ForwardBatch) -> dict[str, str]:
        """Run the encoder; the batch stays as it is. Request id -> why it has no vector."""
        failed: dict[str, str] = {}
        for item in plan.items:
            for media in tables.state(item.slot).media if item.tokens is not None else ():
                with caught(media, item.rid, failed):
                    self._vectors[item.rid] = self.made(media)[0, 0]
        return failed

    def take(self, rid: str) -> Tensor | None:
        """float32 [D], once."""
        return self._vectors.pop(rid, None)


class VectorPooler(Pooler):
    """An image's vector is its encoder's at unit length, a text's is what ``Pooler`` makes."""

    def __init__(self, head: Head | None, vectors: MediaVectors) -> None:
        super().__init__(head)
        self._vectors = vectors

    def forget(self, rid: str) -> None:
        super().forget(rid)
        self._vectors.take(rid)

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        found = self._vectors.take(item.rid)
        if found is None:
            return super().add(item, hidden_TD, prompt_len)
        vector: list[float] = torch.nn.functional.normalize(found, dim=-1).tolist()
        return vector
