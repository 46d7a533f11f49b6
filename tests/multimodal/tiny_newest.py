"""Tiny checkpoints with vision encoders and decoders with indexers, hyper-connections and biases;
see `tiny.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from radixlm.multimodal.checkpoint import NoVideos, class_of
from tests.fakes.decoder_configs import DECODER_CONFIGS
from tests.fakes.unusual_configs import UNUSUAL_CONFIGS as SHAPES
from tests.multimodal.tiny import PIXTRAL, TEXT, Tiny, image_processor, processor, tokenizer
from tests.multimodal.tiny_more import quick_images

TOKENS = {
    "vocab_size": 400, "max_position_embeddings": 2048, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
AREA = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def held(architecture: str, **more: Any) -> dict[str, Any]:
    """The text model's settings of its own tests, with more tokens."""
    own = {**DECODER_CONFIGS, **SHAPES}[architecture]
    made = {**TEXT, **own, **TOKENS, **more}
    return {k: v for k, v in made.items() if v is not None or k.endswith("token_id")}


def minimax_m3() -> Tiny:
    marks = "]<]image[>[ ]<]video[>[".split()
    tok = tokenizer(*marks, "]<]start of image[>[", "]<]end of image[>[")
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 7,
    }  # fmt: skip
    config = tf.MiniMaxM3VLConfig(
        vision_config=encoder, text_config=held("MiniMaxM3VLForCausalLM"), image_token_index=257,
        video_token_index=398, projector_hidden_size=48,
    )  # fmt: skip
    reader = quick_images(
        "MiniMaxM3VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=AREA
    )
    whole = processor(tf.MiniMaxM3VLProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "]<]image[>[")


def glm5_next() -> Tiny:
    names = "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|>"
    tok = tokenizer(*names.split(), "<|end_of_video|>")
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "image_size": 56,
        "out_hidden_size": 64, "intermediate_size": 48, "projection_intermediate_size": 40,
        "swiglu_limit": 0.5,
    }  # fmt: skip
    config = tf.Glm5NextConfig(
        vision_config=encoder, text_config=held("Glm5NextForCausalLM"), image_token_id=257,
        video_token_id=398,
    )  # fmt: skip
    reader = quick_images("Glm5Next", patch_size=7, merge_size=2, temporal_patch_size=2, size=AREA)
    whole = processor(tf.Glm5NextProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|begin_of_image|><|image|><|end_of_image|>")


def dots3_note() -> Tiny:
    tok = tokenizer("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>", "<|img|>")
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "patch_size": 7,
        "num_attention_heads": 2, "moe_intermediate_size": 24, "adapter_in_dim": 32,
        "adapter_out_dim": 64, "pyramid_num_routed": [-1, 2, 4],
    }  # fmt: skip
    audio_config = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "downsample_hidden_size": 8, "adapter_input_size": 32,
        "adapter_out_dim": 64,
    }  # fmt: skip
    config = tf.Dots3NoteConfig(
        vision_config=encoder, audio_config=audio_config, text_config=held("Dots3NoteForCausalLM"),
        image_token_id=257, video_token_id=398, audio_token_id=399,
    )  # fmt: skip
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=1, size=AREA
    )
    whole = processor(
        tf.Dots3NoteProcessor, image_processor=reader, tokenizer=tok, video_processor=NoVideos(),
        feature_extractor=tf.Dots3NoteFeatureExtractor(),
    )  # fmt: skip
    return Tiny(config, whole, "<|imgpad|>")


def hy_v4_vl() -> Tiny:
    tok = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 7,
        "num_attention_heads": 2, "out_hidden_size": 64, "max_image_size": 112,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = tf.HYV4VLConfig(
        vision_config=encoder, text_config=held("HYV4ForCausalLM", rope_parameters=rope),
        image_token_id=257, video_token_id=258,
    )  # fmt: skip
    reader = image_processor("HYV4VL", patch_size=7, merge_size=2, temporal_patch_size=1, size=AREA)
    whole = processor(tf.HYV4VLProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|image_pad|>")


def inkling() -> Tiny:
    marks = "<|unused_200054|> <|unused_200053|> <|content_image|> <|content_audio_input|>"
    tok = tokenizer(*marks.split())
    encoder = {
        "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = tf.InklingConfig(
        vision_config=encoder, text_config=held("InklingForCausalLM"), image_token_id=257,
        audio_token_id=398, image_bos_token_id=259, audio_bos_token_id=260,
        audio_config={"n_mel_bins": 8, "mel_vocab_size": 16},
    )  # fmt: skip
    reader = quick_images("Inkling", size={"height": 8, "width": 8})
    whole = tf.InklingProcessor(tf.InklingFeatureExtractor(), reader, tok)
    return Tiny(config, whole, "<|unused_200054|>")


def inkling2(kind: str = "Inkling2") -> Tiny:
    tok = tokenizer("<|unused_200054|>", "<|content_image|>")
    encoder = {
        "patch_size": 7, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "posemb_grid_size": 4, "projection_hidden_dim": 48, "text_hidden_size": 64,
    }  # fmt: skip
    config = getattr(tf, f"{kind}Config")(
        vision_config=encoder, text_config=held(f"{kind}ForCausalLM"), image_token_id=257,
    )  # fmt: skip
    reader = quick_images("Inkling2", size={"height": 14, "width": 14})
    return Tiny(config, tf.Inkling2Processor(reader, tok), "<|unused_200054|>")


def inkling2_loop() -> Tiny:
    return inkling2("Inkling2Loop")


def mistral_large4() -> Tiny:
    tok = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = tf.MistralLarge4Config(
        vision_config=PIXTRAL, text_config=held("MistralLarge4ForCausalLM"), image_token_index=257,
        vision_feature_layer=-1, spatial_merge_size=2,
    )  # fmt: skip
    patch = {"height": 7, "width": 7}
    reader = quick_images("Pixtral", patch_size=patch, size={"longest_edge": 84})
    kind = class_of("PixtralProcessor")
    return Tiny(config, kind(reader, tok, patch_size=7, spatial_merge_size=2), "[IMG]")


NEWEST: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        minimax_m3,
        glm5_next,
        dots3_note,
        hy_v4_vl,
        inkling,
        inkling2,
        inkling2_loop,
        mistral_large4,
    )
}
# their processors need an optional package
NEWEST_NEEDS = {"inkling": "scipy"}
