"""Further tiny checkpoints of vision-language models; see `tiny.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from radixlm.multimodal.checkpoint import NoVideos
from tests.multimodal.tiny import (
    SMALL,
    SQUARE,
    TEXT,
    Tiny,
    image_processor,
    processor,
    text,
    tokenizer,
)
from tests.multimodal.tiny_more import _glm
from tests.multimodal.tiny_vision import PUBLISHED as SEEING_PUBLISHED


def mllama() -> Tiny:
    tok = tokenizer("<|python_tag|>", bos_token="<|begin|>")
    tok.bos_token = "<|begin|>"
    tok.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    encoder = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 48, "image_size": 28, "patch_size": 7, "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 1], "vision_output_dim": 96,
    }  # fmt: skip
    config = tf.MllamaConfig(
        vision_config=encoder, image_token_index=tok.convert_tokens_to_ids("<|image|>"),
        text_config=text(
            "mllama_text_model", num_hidden_layers=4, cross_attention_layers=[1, 3],
            vocab_size=tok.convert_tokens_to_ids("<|image|>"), pad_token_id=0, bos_token_id=257,
        ),
    )  # fmt: skip
    reader = image_processor("Mllama", size=SQUARE, max_image_tiles=4)
    return Tiny(config, tf.MllamaProcessor(reader, tok), "<|image|>")


def internvl_chat(language: str = "qwen2") -> Tiny:
    """Saved by its class in transformers, then renamed by `as_internvl_chat`."""
    tok = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>",
        end_image_token="</img>", video_token="<video>",
    )  # fmt: skip
    encoder = {**SMALL, "image_size": [28, 28], "patch_size": [7, 7], "attention_bias": True}
    config = tf.InternVLConfig(
        vision_config=encoder, text_config=text(language), downsample_ratio=0.5,
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"), tie_word_embeddings=False,
    )  # fmt: skip
    reader = image_processor("GotOcr2", size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4,  # noqa: E501
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])  # fmt: skip
    whole = processor(
        tf.InternVLProcessor, reader, tok, video_processor=NoVideos(), image_seq_length=4
    )
    return Tiny(config, whole, "<IMG_CONTEXT>")


def as_internvl_chat(folder: Path) -> None:
    """The published names and config."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {"image_size": 28, "patch_size": 7, "qkv_bias": True, "qk_normalization": False}
    write(folder, {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 28,
        "max_dynamic_patch": 4, "min_dynamic_patch": 1, "select_layer": -1, "ps_version": "v2",
        "use_thumbnail": True, "llm_config": config["text_config"], "vision_config": vision,
    })  # fmt: skip
    old = load_file(folder / "model.safetensors")
    new = {_INTERNVL.get(name, name): old[name] for name in old if "encoder.layer" not in name}
    for i in range(2):
        theirs, ours = f"vision_tower.encoder.layer.{i}.", f"vision_model.encoder.layers.{i}."
        for kind in ("weight", "bias"):
            qkv = [old[f"{theirs}attention.{one}_proj.{kind}"] for one in "qkv"]
            new[f"{ours}attn.qkv.{kind}"] = torch.cat(qkv)
            new[f"{ours}attn.proj.{kind}"] = old[f"{theirs}attention.projection_layer.{kind}"]
            new[f"{ours}norm1.{kind}"] = old[f"{theirs}layernorm_before.{kind}"]
            new[f"{ours}norm2.{kind}"] = old[f"{theirs}layernorm_after.{kind}"]
            for fc in ("fc1", "fc2"):
                new[f"{ours}mlp.{fc}.{kind}"] = old[f"{theirs}mlp.{fc}.{kind}"]
        new[f"{ours}ls1"], new[f"{ours}ls2"] = old[theirs + "lambda_1"], old[theirs + "lambda_2"]
    save_file(new, folder / "model.safetensors")


_INTERNVL = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for kind in ("weight", "bias")
        for theirs, ours in (
            (
                "vision_tower.embeddings.patch_embeddings.projection",
                "vision_model.embeddings.patch_embedding",
            ),
            ("multi_modal_projector.layer_norm", "mlp1.0"),
            ("multi_modal_projector.linear_1", "mlp1.1"),
            ("multi_modal_projector.linear_2", "mlp1.3"),
        )
    },
}


def write(folder: Path, config: dict[str, Any]) -> None:
    """Replace the config, and remove the processor's."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").unlink(missing_ok=True)


def gemma4_bidirectional() -> Tiny:
    """An image has more tokens than the window; the full layers see all of them."""
    return gemma4(
        use_bidirectional_attention="vision", sliding_window=20, num_kv_shared_layers=1,
        num_hidden_layers=5,
        layer_types=[*["sliding_attention", "full_attention"] * 2, "full_attention"],
    )  # fmt: skip


def gemma4(**changes: Any) -> Tiny:
    names = {f"{name}_token": f"<{name}>" for name in "image audio boi eoi boa eoa".split()}
    tok = tokenizer(**names)
    ids = {f"{name}_token_id": tok.convert_tokens_to_ids(f"<{name}>") for name in
           ("image", "audio", "boi", "eoi", "boa")}  # fmt: skip
    held = text(
        "gemma4_text",
        **{
            "head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 400,
            "num_kv_shared_layers": 2, **changes,
        },
    )  # fmt: skip
    encoder = {
        **SMALL, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
        "position_embedding_size": 64, "pooling_kernel_size": 3,
    }  # fmt: skip
    config = tf.Gemma4Config(
        text_config=held, vision_config=encoder, audio_config=None, video_token_id=390, **ids
    )
    reader = image_processor("Gemma4", patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    whole = processor(
        tf.Gemma4Processor, tf.Gemma4AudioFeatureExtractor(), reader, tok, NoVideos(),
        image_seq_length=70,
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def _qwen3_5(kind: str, **more: Any) -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    held = {
        **TEXT, "rope_parameters": rope, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, **more,
    }  # fmt: skip
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 64, "intermediate_size": 48,
        "num_position_embeddings": 64,
    }  # fmt: skip
    config = getattr(tf, f"{kind}Config")(
        vision_config=encoder, text_config=held, image_token_id=257, video_token_id=258,
        vision_start_token_id=259, vision_end_token_id=260,
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size
    )
    whole = processor(tf.Qwen3VLProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|vision_start|><|image_pad|><|vision_end|>")


def qwen3_5() -> Tiny:
    return _qwen3_5("Qwen3_5")


def qwen3_5_moe() -> Tiny:
    return _qwen3_5(
        "Qwen3_5Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    )  # fmt: skip


def intern_s2_preview() -> Tiny:
    return qwen3_5_moe()


def as_intern_s2_preview(folder: Path) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"architectures": ["InternS2PreviewForConditionalGeneration"]}
    raw["model_type"] = raw["vision_config"]["model_type"] = "intern_s2_preview"
    path.write_text(json.dumps(raw))


def glm_ocr() -> Tiny:
    return _glm("GlmOcr", "Glm46V", head_dim=16)


def exaone4_5() -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>")
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "num_key_value_heads": 1, "patch_size": 7,
        "out_hidden_size": 64, "intermediate_size": 48, "window_size": 28,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = tf.Exaone4_5_Config(
        vision_config=encoder, image_token_id=257, video_token_id=258, text_config=text(
            "exaone4", sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        ),
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size
    )
    whole = processor(tf.Exaone4_5_Processor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<vision><|image_pad|></vision>")


def video_llama3() -> Tiny:
    tok = tokenizer(image_token="<image>", video_token="<video>")
    config = tf.VideoLlama3Config(
        vision_config={**SMALL}, text_config=text("qwen2"),
        image_token_id=tok.convert_tokens_to_ids("<image>"),
        video_token_id=tok.convert_tokens_to_ids("<video>"),
    )  # fmt: skip
    size = {"shortest_edge": 14 * 14, "longest_edge": 84 * 84}
    reader = image_processor("VideoLlama3", patch_size=7, merge_size=1, size=size)
    whole = processor(tf.VideoLlama3Processor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<image>")


LATER: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        mllama,
        internvl_chat,
        gemma4,
        gemma4_bidirectional,
        qwen3_5,
        qwen3_5_moe,
        intern_s2_preview,
        glm_ocr,
        exaone4_5,
        video_llama3,
    )
}
# checkpoints with other names than their class in transformers
PUBLISHED: dict[str, Callable[[Path], None]] = {
    "internvl_chat": as_internvl_chat,
    "intern_s2_preview": as_intern_s2_preview,
} | SEEING_PUBLISHED
