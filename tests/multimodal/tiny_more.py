"""More tiny random checkpoints of vision-language models; see tiny.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from radixlm.multimodal.checkpoint import NoVideos, class_of
from tests.multimodal.tiny import (
    PIXTRAL,
    SIGLIP,
    SMALL,
    SQUARE,
    TEXT,
    Tiny,
    image_processor,
    processor,
    text,
    tokenizer,
)

MIXTURE = {
    "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


def quick_images(name: str, **options: Any) -> Any:
    """The image processor that the server chooses too."""
    return class_of(f"{name}ImageProcessor")(**options)


def _glm(kind: str, reader: str, **more: Any) -> Tiny:
    names = "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|>"
    tok = tokenizer(*names.split(), "<|end_of_video|>")
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }  # fmt: skip
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "image_size": 56,
        "out_hidden_size": 64, "intermediate_size": 48, "temporal_patch_size": 2,
    }  # fmt: skip
    ids = {
        f"{name}_token_id": 257 + i
        for i, name in enumerate("image video image_start image_end video_start video_end".split())
    }
    held = {**TEXT, "rope_parameters": rope, **more}
    if kind == "Glm46V":
        held["model_type"] = "glm4v_text"
    config = getattr(tf, f"{kind}Config")(vision_config=encoder, text_config=held, **ids)
    size = {"shortest_edge": 28 * 28, "longest_edge": 2 * 112 * 112}
    made = image_processor(reader, patch_size=7, merge_size=2, temporal_patch_size=2, size=size)
    whole = processor(class_of(f"{reader}Processor"), made, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|begin_of_image|><|image|><|end_of_image|>")


def glm4v() -> Tiny:
    return _glm("Glm4v", "Glm4v")


def glm4v_moe() -> Tiny:
    return _glm("Glm4vMoe", "Glm4v", **MIXTURE)


def glm46v() -> Tiny:
    return _glm("Glm46V", "Glm46V")


def mistral3() -> Tiny:
    tok = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = tf.Mistral3Config(
        vision_config=PIXTRAL, text_config=text("mistral", head_dim=16), image_token_index=257,
        vision_feature_layer=-1, spatial_merge_size=2,
    )  # fmt: skip
    patch = {"height": 7, "width": 7}
    reader = quick_images("Pixtral", patch_size=patch, size={"longest_edge": 84})
    kind = class_of("PixtralProcessor")
    return Tiny(config, kind(reader, tok, patch_size=7, spatial_merge_size=2), "[IMG]")


def pixtral() -> Tiny:
    tok = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = tf.LlavaConfig(
        vision_config=PIXTRAL, text_config=text("mistral", head_dim=16), image_token_index=257,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    patch = {"height": 7, "width": 7}
    reader = quick_images("Pixtral", patch_size=patch, size={"longest_edge": 56})
    return Tiny(config, class_of("PixtralProcessor")(reader, tok, patch_size=7), "[IMG]")


def deepseek_vl_hybrid() -> Tiny:
    tok = tokenizer(image_token="<image_placeholder>")
    sam = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 128,
        "patch_size": 16, "output_channels": 8, "window_size": 4, "global_attn_indexes": [1],
        "mlp_dim": 48, "num_channels": 3,
    }  # fmt: skip
    config = tf.DeepseekVLHybridConfig(
        vision_config={**SIGLIP, "image_size": 56}, text_config=text("llama"),
        high_res_vision_config=sam,
        image_token_id=tok.convert_tokens_to_ids("<image_placeholder>"),
    )  # fmt: skip
    reader = image_processor(
        "DeepseekVLHybrid", size={"height": 56, "width": 56}, min_size=14,
        high_res_size={"height": 128, "width": 128},
    )  # fmt: skip
    whole = tf.DeepseekVLHybridProcessor(reader, tok, num_image_tokens=64)
    return Tiny(config, whole, "<image_placeholder>")


def aria() -> Tiny:
    tok = tokenizer(image_token="<|img|>")
    vision = {"model_type": "idefics3_vision", **SMALL, "image_size": 980, "patch_size": 70}
    config = tf.AriaConfig(
        vision_config=vision, projector_patch_to_query_dict={196: 8},
        text_config=text(
            "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, head_dim=16
        ),
        image_token_index=tok.convert_tokens_to_ids("<|img|>"),
    )  # fmt: skip
    reader = image_processor(
        "Aria", max_image_size=980, min_image_size=336, split_resolutions=[[980, 980]]
    )
    return Tiny(config, tf.AriaProcessor(reader, tok, size_conversion={980: 8}), "<|img|>")


def ovis2() -> Tiny:
    names = "<image> <IMG_ATOM> <IMG_START> <IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END>"
    tok = tokenizer(*names.split())
    encoder = {**SMALL, "vocab_size": 40, "hidden_stride": 2, "num_visual_indicator_tokens": 5}
    config = tf.Ovis2Config(
        vision_config=encoder, text_config=text("qwen2"), image_token_id=258,
        visual_indicator_token_ids=[259, 260, 261, 262, 263], vocab_size=400, hidden_size=64,
    )  # fmt: skip
    reader = image_processor("Ovis2", size=SQUARE, crop_to_patches=True, max_patches=4)
    return Tiny(config, tf.Ovis2Processor(reader, tok, image_seq_length=4), "<image>")


def paddleocr_vl() -> Tiny:
    tok = tokenizer("<|IMAGE_START|>", "<|IMAGE_END|>", image_token="<|IMAGE_PLACEHOLDER|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = tf.PaddleOCRVLConfig(
        vision_config={**SMALL, "image_size": 56, "spatial_merge_size": 2},
        text_config={**TEXT, "rope_parameters": rope, "head_dim": 16},
        image_token_id=tok.convert_tokens_to_ids("<|IMAGE_PLACEHOLDER|>"),
        vision_start_token_id=257, vision_end_token_id=258,
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor(
        "PaddleOCRVL", patch_size=7, merge_size=2, temporal_patch_size=1, size=size
    )
    return Tiny(
        config, tf.PaddleOCRVLProcessor(reader, tok),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    )  # fmt: skip


def llama4() -> Tiny:
    names = "<|image|> <|image_start|> <|image_end|> <|patch|> <|tile_x_separator|>"
    tok = tokenizer(*names.split(), "<|tile_y_separator|>")
    encoder = {
        **SMALL, "intermediate_size": 128, "image_size": 28, "vision_output_dim": 48,
        "projector_input_dim": 48,
        "projector_output_dim": 48, "pixel_shuffle_ratio": 0.5,
    }  # fmt: skip
    config = tf.Llama4Config(
        vision_config=encoder, image_token_index=260, boi_token_index=258, eoi_token_index=259,
        text_config=text(
            "llama4_text", head_dim=16, num_local_experts=4, intermediate_size_mlp=96,
            num_hidden_layers=4,
            attention_chunk_size=64,
        ),
    )  # fmt: skip
    reader = quick_images("Llama4", size=SQUARE, max_patches=4, resize_to_max_canvas=False)
    return Tiny(config, tf.Llama4Processor(reader, tok, patch_size=7), "<|image|>")


def cohere2_vision() -> Tiny:
    tok = tokenizer(
        image_token="<|IMG_PATCH|>", boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )  # fmt: skip
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    config = tf.Cohere2VisionConfig(
        vision_config=SIGLIP, text_config=text("cohere2", **windows), downsample_factor=2,
        image_token_id=tok.convert_tokens_to_ids("<|IMG_PATCH|>"), alignment_intermediate_size=64,
    )  # fmt: skip
    reader = quick_images("Cohere2Vision", size=SQUARE, max_patches=4, patch_size=7)
    reader.patch_size = 2
    return Tiny(config, tf.Cohere2VisionProcessor(reader, tok), "<|IMG_PATCH|>")


def smolvlm() -> Tiny:
    tiles = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
    tok = tokenizer(
        *tiles, image_token="<image>", fake_image_token="<fake_token_around_image>",
        end_of_utterance_token="<end_of_utterance>", global_image_token="<global-img>",
    )  # fmt: skip
    config = tf.SmolVLMConfig(
        vision_config=SMALL, text_config=text("llama"), scale_factor=2,
        image_token_id=tok.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    reader = image_processor(
        "SmolVLM", size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    whole = processor(tf.SmolVLMProcessor, reader, tok, video_processor=NoVideos(), image_seq_len=4)
    return Tiny(config, whole, "<image>")


def minicpmv4_6() -> Tiny:
    tok = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", image_start_token="<image>",
        image_end_token="</image>", slice_start_token="<slice>", slice_end_token="</slice>",
        image_id_start_token="<image_id>", image_id_end_token="</image_id>",
    )  # fmt: skip
    encoder = {**SMALL, "image_size": 112, "patch_size": 14, "insert_layer_id": 0}
    linear = {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "head_dim": 16,
    }  # fmt: skip
    config = tf.MiniCPMV4_6Config(
        vision_config=encoder, text_config=text("qwen3_5_text", **linear), insert_layer_id=0,
        image_token_id=tok.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video_pad|>"),
    )  # fmt: skip
    reader = image_processor("MiniCPMV4_6", scale_resolution=112, max_slice_nums=4, patch_size=14)
    whole = processor(
        tf.MiniCPMV4_6Processor, image_processor=reader, video_processor=NoVideos(), tokenizer=tok
    )
    return Tiny(config, whole, "<|image_pad|>")


def kimi_k25() -> Tiny:
    tok = tokenizer(
        "<|media_begin|>", "<|media_end|>", image_token="<|media_pad|>", video_token="<|video_pad|>"
    )
    latent = {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
        **MIXTURE,
    }  # fmt: skip
    encoder = {
        **SMALL, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2,
        "merge_kernel_size": [2, 2],
    }  # fmt: skip
    config = tf.Kimi_K25Config(
        vision_config=encoder, text_config=text("deepseek_v3", **latent), projection_hidden_size=32,
        image_token_id=tok.convert_tokens_to_ids("<|media_pad|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video_pad|>"),
    )  # fmt: skip
    size = {"max_height": 112, "max_width": 112}
    reader = quick_images("Kimi_K25", patch_size=7, merge_size=2, size=size)
    whole = processor(tf.Kimi_K25Processor, reader, tok, video_processor=NoVideos())
    # Hugging Face saves a name that no published checkpoint has
    renamed = ("language_model.model.blocks.", "language_model.model.layers.")
    return Tiny(config, whole, "<|media_begin|><|media_pad|><|media_end|>", renamed)


def lfm2_vl() -> Tiny:
    tok = tokenizer(
        image_token="<image>", image_start_token="<|image_start|>",
        image_end_token="<|image_end|>", image_thumbnail_token="<|img_thumbnail|>",
    )  # fmt: skip
    encoder = {
        "model_type": "siglip2_vision_model", **SMALL, "num_patches": 64, "vision_use_head": False,
    }  # fmt: skip
    config = tf.Lfm2VlConfig(
        vision_config=encoder, projector_hidden_size=48,
        text_config=text("lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3),
        image_token_id=tok.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    reader = quick_images(
        "Lfm2Vl", do_image_splitting=False, encoder_patch_size=7, min_image_tokens=1,
        max_image_tokens=16, downsample_factor=2, tile_size=56, max_num_patches=64,
    )  # fmt: skip
    return Tiny(config, tf.Lfm2VlProcessor(reader, tok), "<image>")


MORE: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        glm4v, glm4v_moe, glm46v, mistral3, pixtral, deepseek_vl_hybrid, aria, ovis2, paddleocr_vl,
        llama4, cohere2_vision, smolvlm, minicpmv4_6, kimi_k25, lfm2_vl,
    )
}  # fmt: skip
# their processors need an optional package
NEEDS = {"smolvlm": "num2words"}
