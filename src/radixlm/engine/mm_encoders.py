"""Builds the encoders of a multimodal model; imported when one is served."""

import torch

from radixlm.engine.model_info import ModelInfo
from radixlm.media.encoder_cache import EncoderCache, MultimodalEncoder
from radixlm.media.image_vectors import ImageVectors
from radixlm.models.encoders.image_embedder import ImageEmbedder
from radixlm.models.encoders.speech import SpeechEncoder
from radixlm.models.encoders.transformers_encoder import BoundaryTokenEncoder, TransformersEncoder


def encoder_cache(info: ModelInfo, device: torch.device) -> EncoderCache:
    """The model's encoder and the cache of its outputs."""
    spec = info.media
    assert spec is not None
    if spec.embeds_images:
        return ImageVectors(ImageEmbedder(info.folder, device))
    encoder: MultimodalEncoder
    if spec.is_encoder_decoder:
        encoder = SpeechEncoder(info.folder, device, torch.float32)
    else:
        encoder = TransformersEncoder(
            info.folder, device, torch.float32, spec.encoder == "class_forward"
        )
        if spec.adds_to_embeddings and not spec.custom:  # whose own rows are all there are
            encoder = BoundaryTokenEncoder(encoder, spec.tokens["image"])
    token = next(iter(spec.tokens.values())) if spec.uses_cross_attention else None
    return EncoderCache(encoder, cross_attention_token=token, needs_token_ids=spec.needs_token_ids)
