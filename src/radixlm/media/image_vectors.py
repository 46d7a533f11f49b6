"""Image embeddings that the encoder makes without the text model (CLIP).

A step with such an image computes its one placeholder token, whose hidden state is not used.
"""

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.media.encoder_cache import EncoderCache, MultimodalEncoder, caught
from radixlm.media.optional_inputs import add_optional_inputs
from radixlm.models.pooler import Head, Pooler
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Item, StepPlan
from radixlm.step.result import ItemResult


class ImageVectors(EncoderCache):
    """Keeps the vector of each image of a step until the pooler takes it."""

    def __init__(self, encoder: MultimodalEncoder) -> None:
        super().__init__(encoder)
        self._vectors: dict[str, Tensor] = {}

    def put(
        self, plan: StepPlan, tables: DeviceTables, batch: ForwardBatch
    ) -> dict[str, ItemResult]:
        """Run the encoder, whose output is not in the batch. Returns request id -> error."""
        add_optional_inputs(plan, tables, batch)
        failed: dict[str, ItemResult] = {}
        for item in plan.items:
            for media in tables.state(item.slot).media if item.tokens is not None else ():
                with caught(media, item.rid, failed):
                    self._vectors[item.rid] = self.output(media)[0, 0]
        return failed

    def take(self, rid: str) -> Tensor | None:
        """float32 [D]; None the second time."""
        return self._vectors.pop(rid, None)


class VectorPooler(Pooler):
    """The encoder's vector at unit length for an image, ``Pooler``'s for a text."""

    def __init__(self, head: Head | None, vectors: ImageVectors) -> None:
        super().__init__(head)
        self._vectors = vectors

    def forget(self, rid: str) -> None:
        super().forget(rid)
        self._vectors.take(rid)

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        image = self._vectors.take(item.rid)
        if image is None:
            return super().add(item, hidden_TD, prompt_len)
        vector: list[float] = torch.nn.functional.normalize(image, dim=-1).tolist()
        return vector
