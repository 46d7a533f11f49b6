"""The encoders of a model that takes media: what few starts need and all would import."""

from __future__ import annotations

import torch

from radixlm.engine.model_info import ModelInfo
from radixlm.executor.media import MediaRows, MultimodalEncoder
from radixlm.executor.media_embeddings import MediaVectors
from radixlm.models.image_embedder import ImageEmbedder
from radixlm.models.mm_encoder import BoundaryTokenEncoder, TransformersEncoder
from radixlm.models.speech_encoder import SpeechEncoder


def media_rows(info: ModelInfo, device: torch.device) -> MediaRows:
    """What runs the model's encoders when a step reaches media."""
    facts = info.media
    assert facts is not None
    if facts.embeds_images:
        return MediaVectors(ImageEmbedder(info.folder, device))
    encoder: MultimodalEncoder
    if facts.is_encoder_decoder:
        encoder = SpeechEncoder(info.folder, device, torch.float32)
    else:
        encoder = TransformersEncoder(info.folder, device, torch.float32, facts.uses_class_forward)
        if facts.adds_to_embeddings:
            encoder = BoundaryTokenEncoder(encoder, facts.tokens["image"])
    token = next(iter(facts.tokens.values())) if facts.uses_cross_attention else None
    return MediaRows(encoder, cross_attention_token=token, needs_token_ids=facts.needs_token_ids)
