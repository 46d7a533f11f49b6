"""The towers of a model that takes media: what few starts need and all would import."""

from __future__ import annotations

import torch

from radixlm.engine.modelinfo import ModelInfo
from radixlm.executor.media import MediaRows, Tower
from radixlm.executor.vectors import MediaVectors
from radixlm.models.encoder_tower import EncoderTower
from radixlm.models.towers import AmongMarks, HfTower
from radixlm.models.vector_tower import VectorTower


def media_rows(info: ModelInfo, device: torch.device) -> MediaRows:
    """What runs the model's towers when a step reaches media."""
    facts = info.media
    assert facts is not None
    if facts.gives_vector:
        return MediaVectors(VectorTower(info.folder, device))
    tower: Tower
    if facts.is_encoded:
        tower = EncoderTower(info.folder, device, torch.float32)
    else:
        tower = HfTower(info.folder, device, torch.float32, facts.by_forward)
        if facts.has_marks:
            tower = AmongMarks(tower, facts.tokens["image"])
    token = next(iter(facts.tokens.values())) if facts.is_crossed else None
    return MediaRows(tower, crossed_token=token, keeps_ids=facts.keeps_ids)
