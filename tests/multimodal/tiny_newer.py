"""More tiny checkpoints of vision-language models; see `tiny.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from radixlm.multimodal.checkpoint import NoVideos, class_of
from tests.multimodal.tiny import (
    SMALL,
    SQUARE,
    Tiny,
    image_processor,
    processor,
    text,
    tokenizer,
)
from tests.multimodal.tiny_more import quick_images
from tests.multimodal.tiny_newest import NEWEST, NEWEST_NEEDS
from tests.multimodal.tiny_vision import VISION

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16,
}  # fmt: skip
AREA = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def qianfan_ocr() -> Tiny:
    tok = tokenizer(
        "<image>", context_image_token="<IMG_CONTEXT>", start_image_token="<img>",
        end_image_token="</img>",
    )  # fmt: skip
    encoder = {**SMALL, "image_size": [28, 28], "patch_size": [7, 7], "drop_path_rate": 0.1}
    config = tf.QianfanOCRConfig(
        vision_config=encoder, text_config=text("qwen3", head_dim=16), image_seq_length=4,
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )  # fmt: skip
    reader = image_processor(
        "GotOcr2", size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
    )
    whole = tf.QianfanOCRProcessor(reader, tok, image_seq_length=4)
    # Hugging Face saves a name that no published checkpoint has
    renamed = ("language_model.model.encoder.layers.", "language_model.model.layers.")
    return Tiny(config, whole, "<image>", renamed)


def lfm3_vl() -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "patch_size": 7, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }  # fmt: skip
    config = tf.Lfm3VlConfig(
        vision_config=encoder, projector_hidden_size=48, text_config=text(
            "lfm3", num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"]
        ), image_token_id=257, video_token_id=258, vision_start_token_id=259,
        vision_end_token_id=260,
    )  # fmt: skip
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=AREA
    )
    whole = processor(tf.Lfm3VlProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|vision_start|><|image_pad|><|vision_end|>")


def hyperclovax_vision_v2() -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>")
    encoder = {
        "model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "num_heads": 2,
        "patch_size": 7, "out_hidden_size": 48, "intermediate_size": 48, "window_size": 28,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    scales = {"logits_scaling": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 2.0}
    config = tf.HyperCLOVAXVisionV2Config(
        vision_config=encoder, text_config=text("hyperclovax", **scales), image_token_id=257,
        video_token_id=258,
    )  # fmt: skip
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=AREA
    )
    whole = processor(tf.HyperCLOVAXVisionV2Processor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<vision><|image_pad|></vision>")


def minicpm_ocr() -> Tiny:
    tok = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", image_start_token="<image>",
        image_end_token="</image>", slice_start_token="<slice>", slice_end_token="</slice>",
        image_id_start_token="<image_id>", image_id_end_token="</image_id>",
    )  # fmt: skip
    encoder = {**SMALL, "image_size": 112, "patch_size": 14, "insert_layer_id": 0}
    config = tf.MiniCPMOcrConfig(
        vision_config=encoder, text_config=text("qwen3_5_text", **LINEAR), insert_layer_id=0,
        image_token_id=tok.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video_pad|>"),
    )  # fmt: skip
    reader = quick_images("MiniCPMOcr", scale_resolution=56, max_slice_nums=4, patch_size=14)
    whole = processor(
        tf.MiniCPMOcrProcessor, image_processor=reader, video_processor=NoVideos(), tokenizer=tok
    )
    return Tiny(config, whole, "<|image_pad|>")


def minicpmv4_7() -> Tiny:
    tok = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", image_start_token="<image>",
        image_end_token="</image>", slice_start_token="<slice>", slice_end_token="</slice>",
        image_id_start_token="<image_id>", image_id_end_token="</image_id>",
    )  # fmt: skip
    ids = {
        "image_token_id": "<|image_pad|>", "image_start_id": "<image>", "image_end_id": "</image>",
        "slice_start_id": "<slice>", "slice_end_id": "</slice>",
    }  # fmt: skip
    encoder = {**SMALL, "image_size": 112, "patch_size": 14, "insert_layer_id": 0}
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    config = tf.MiniCPMV4_7Config(
        vision_config=encoder, insert_layer_id=0, video_token_id=398,
        text_config=text("qwen3_5_text", rope_parameters=rope, **LINEAR),
        newline_id=tok("\n")["input_ids"][0],
        **{key: tok.convert_tokens_to_ids(token) for key, token in ids.items()},
    )  # fmt: skip
    reader = image_processor("MiniCPMV4_6", scale_resolution=56, max_slice_nums=6, patch_size=14)
    whole = processor(
        tf.MiniCPMV4_7Processor, image_processor=reader, video_processor=NoVideos(), tokenizer=tok
    )
    return Tiny(config, whole, "<|image_pad|>")


def gemma4_unified() -> Tiny:
    names = {f"{name}_token": f"<{name}>" for name in "image audio boi eoi boa eoa".split()}
    tok = tokenizer(**names)
    ids = {f"{name}_token_id": tok.convert_tokens_to_ids(f"<{name}>") for name in
           ("image", "audio", "boi", "eoi", "boa")}  # fmt: skip
    held: dict[str, Any] = text(
        "gemma4_unified_text", head_dim=16, global_head_dim=32, num_hidden_layers=4,
        sliding_window=96, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
        num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=30.0,
    )  # fmt: skip
    encoder = {
        "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 64,
        "output_proj_dims": 48,
    }  # fmt: skip
    config = tf.Gemma4UnifiedConfig(
        text_config=held, vision_config=encoder, audio_config=None, video_token_id=390, **ids
    )
    reader = quick_images("Gemma4Unified", patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    whole = processor(
        tf.Gemma4UnifiedProcessor, tf.Gemma4UnifiedAudioFeatureExtractor(), reader, tok, NoVideos(),
        image_seq_length=70,
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def step3p7() -> Tiny:
    names = "<im_patch> <im_start> <im_end> <patch_start> <patch_end> <patch_newline>"
    tok = tokenizer(*names.split())
    encoder = {
        "hidden_size": 32, "mlp_ratio": 1.5, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 7, "max_position_embeddings": 64,
    }  # fmt: skip
    held = text(
        "step3p5", head_dim=16, num_hidden_layers=4, sliding_window=32,
        layer_types=["full_attention", "sliding_attention"] * 2, num_sliding_attention_heads=6,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, share_expert_dim=24, pad_token_id=0,
    )  # fmt: skip
    config = tf.Step3p7Config(vision_config=encoder, text_config=held, image_token_id=257)
    reader = quick_images(
        "Step3p7", size={"height": 56, "width": 56}, patch_size=28, vision_patch_size=7
    )
    return Tiny(config, tf.Step3p7Processor(reader, tok), "<im_patch>")


def granite_docling() -> Tiny:
    tiles = [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
    tok = tokenizer(
        *tiles, "<fake_token_around_image>", "<global-img>", image_token="<image>",
    )  # fmt: skip
    encoder = {
        **SMALL, "num_hidden_layers": 4, "out_hidden_size": 64, "scale_factor": 2,
        "deepstack_visual_indexes": [1, 3],
    }  # fmt: skip
    scales = {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    }  # fmt: skip
    config = tf.GraniteDoclingConfig(
        vision_config=encoder, text_config=text("granite_docling_text", **scales),
        image_token_id=tok.convert_tokens_to_ids("<image>"), density_router_hidden_size=16,
        pad_token_id=None,
    )  # fmt: skip
    reader = image_processor("GraniteDocling", size=SQUARE, max_patches=4)
    return Tiny(config, tf.GraniteDoclingProcessor(reader, tok, image_seq_len=4), "<image>")


def cosmos3_edge() -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    encoder = {
        **{key: value for key, value in SMALL.items() if key != "image_size"}, "num_patches": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = tf.Cosmos3EdgeConfig(
        vision_config=encoder, projector_hidden_size=48, image_token_id=257, video_token_id=398,
        text_config=text(
            "cosmos3_edge_text", head_dim=16, rope_parameters=rope, hidden_act="relu2",
        ), vision_start_token_id=259, vision_end_token_id=260,
    )  # fmt: skip
    reader = image_processor(
        "Cosmos3Edge", patch_size=7, merge_size=2, temporal_patch_size=1, size=AREA
    )
    whole = processor(tf.Cosmos3EdgeProcessor, reader, tok, video_processor=NoVideos())
    whole.return_mm_token_type_ids = True  # its generate needs it
    return Tiny(config, whole, "<|vision_start|><|image_pad|><|vision_end|>")


MUSE_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "patch_size": 7, "pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64,
}  # fmt: skip


def _muse(kind: str, **more: Any) -> Tiny:
    names = "<|patch|> <|video|> <|image_start|> <|image_end|> <|vid_frame_separator|>"
    tok = tokenizer(*names.split(), "<|vid_start|>", "<|vid_end|>", "<|audio|>")
    sizes = {"out_hidden_size": 128, "projector_hidden_size": 48}
    config = getattr(tf, f"{kind}Config")(
        vision_config=MUSE_TOWER, image_token_id=257, video_token_id=398, **sizes, **more
    )
    reader = quick_images("MuseGlimmer", patch_size=7, max_image_tokens=16)
    whole = processor(
        class_of(f"{kind}Processor"), image_processor=reader, video_processor=NoVideos(),
        tokenizer=tok, **({"feature_extractor": NoVideos()} if kind == "MuseSpark" else {}),
    )  # fmt: skip
    return Tiny(config, whole, "<|patch|>")


def muse_glimmer() -> Tiny:
    held = text("muse_glimmer_text", head_dim=16, num_hidden_layers=4, sliding_window=32)
    return _muse("MuseGlimmer", text_config={**held, "output_multiplier": 0.7})


def muse_spark() -> Tiny:
    held = text("muse_spark_text", head_dim=16, num_hidden_layers=4, sliding_window=32)
    held |= {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_hidden_size": 40,
        "moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_multiplier": 0.7,
    }  # fmt: skip
    audio_config = {"hidden_sizes": [16] * 4, "depths": [1] * 4, "out_hidden_size": 64}
    return _muse("MuseSpark", text_config=held, audio_config=audio_config, audio_token_id=264)


NEWER: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        qianfan_ocr, lfm3_vl, hyperclovax_vision_v2, minicpm_ocr, gemma4_unified,
        step3p7, muse_glimmer, muse_spark,
        granite_docling, minicpmv4_7, cosmos3_edge,
    )
} | NEWEST | VISION  # fmt: skip
# their processors need an optional package; Fuyu's works with torchvision's images only
NEWER_NEEDS = NEWEST_NEEDS | {
    "fuyu": "torchvision",
    "apertus1p5": "transformers.models.apertus1p5",
}
