"""Tiny random checkpoints of vision-language models, each with its processor."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from radixlm.multimodal.checkpoint import NoVideos, class_of

TEXT = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **SMALL}
SIGLIP = {"model_type": "siglip_vision_model", **SMALL}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, **SMALL, "image_size": 112}
SQUARE = {"height": 28, "width": 28}
PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56]]


@dataclass(frozen=True)
class Tiny:
    """A config, its processor, and the placeholder of an image. `renamed`: prefixes of saved and of
    published tensor names."""

    config: Any
    processor: Any
    placeholder: str
    renamed: tuple[str, str] | None = None


def text(kind: str, **more: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": kind, **more}


def tokenizer(*special: str, **named: str) -> Any:
    """Bytes and the special tokens; `named` ones become attributes of the tokenizer."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", *special, *named.values()])
    extra = {"extra_special_tokens": named} if named else {}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>", **extra
    )


def image_processor(name: str, **options: Any) -> Any:
    """An image processor; one that works on Pillow and numpy where there is one."""
    kind = class_of(f"{name}ImageProcessorPil") or class_of(f"{name}ImageProcessor")
    return kind(**options)


def processor(kind: Any, *parts: Any, **options: Any) -> Any:
    """A processor whose video processor may be a stub."""

    class Bare(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    Bare.__name__ = kind.__name__
    return Bare(*parts, **options)


def llava() -> Tiny:
    tok = tokenizer("<image>")
    config = tf.LlavaConfig(
        vision_config=CLIP, text_config=text("llama"), image_token_index=257,
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    )  # fmt: skip
    return Tiny(config, _llava_processor(tok), "<image>")


def _llava_processor(tok: Any) -> Any:
    return tf.LlavaProcessor(
        image_processor("CLIP", size={"shortest_edge": 28}, crop_size=SQUARE), tok, patch_size=7,
        vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def vip_llava() -> Tiny:
    config = tf.VipLlavaConfig(
        vision_config={**CLIP, "num_hidden_layers": 4}, text_config=text("llama"),
        image_token_index=257, vision_feature_layers=[-2, -3],
    )  # fmt: skip
    return Tiny(config, _llava_processor(tokenizer("<image>")), "<image>")


def llava_next() -> Tiny:
    config = tf.LlavaNextConfig(
        vision_config=CLIP, text_config=text("mistral"), image_token_index=257,
        image_grid_pinpoints=PINPOINTS[1:], vision_feature_layer=-2,
    )  # fmt: skip
    reader = image_processor(
        "LlavaNext", size={"shortest_edge": 28}, crop_size=SQUARE,
        image_grid_pinpoints=PINPOINTS[1:],
    )  # fmt: skip
    whole = tf.LlavaNextProcessor(
        reader, tokenizer("<image>"), patch_size=7, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def llava_onevision() -> Tiny:
    config = tf.LlavaOnevisionConfig(
        vision_config=SIGLIP, text_config=text("qwen2"), image_token_index=257,
        video_token_index=258, image_grid_pinpoints=PINPOINTS, vision_feature_layer=-1,
        vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    reader = image_processor("LlavaOnevision", size=SQUARE, image_grid_pinpoints=PINPOINTS)
    whole = processor(
        tf.LlavaOnevisionProcessor, reader, tokenizer("<image>", "<video>"),
        video_processor=NoVideos(), num_image_tokens=16, vision_feature_select_strategy="full",
        image_token="<image>", video_token="<video>",
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def _qwen(kind: str, encoder: dict[str, Any], **more: Any) -> Tiny:
    """A Qwen VL model: patches of 7 merged two by two, multimodal ropes."""
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if kind.startswith("Qwen3"):
        rope["mrope_interleaved"] = True
    shared = {"num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = getattr(tf, f"{kind}Config")(
        vision_config={"depth": 2, "hidden_size": 32, **shared, **encoder},
        text_config={**TEXT, "rope_parameters": rope, **more}, image_token_id=257,
        video_token_id=258, vision_start_token_id=259, vision_end_token_id=260,
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size
    )
    name = "Qwen3VL" if kind.startswith("Qwen3") else kind
    whole = processor(class_of(f"{name}Processor"), reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|vision_start|><|image_pad|><|vision_end|>")


def qwen2_vl() -> Tiny:
    return _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2})


def qwen2_5_vl() -> Tiny:
    encoder = {"out_hidden_size": 64, "intermediate_size": 48, "window_size": 28}
    return _qwen("Qwen2_5_VL", {**encoder, "fullatt_block_indexes": [1]})


DEEP = {
    "depth": 3, "out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip


def qwen3_vl() -> Tiny:
    return _qwen("Qwen3VL", DEEP, head_dim=16, num_hidden_layers=3)


def qwen3_vl_moe() -> Tiny:
    return _qwen(
        "Qwen3VLMoe", DEEP, head_dim=16, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def internvl() -> Tiny:
    tok = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>",
        end_image_token="</img>", video_token="<video>",
    )  # fmt: skip
    config = tf.InternVLConfig(
        vision_config={**SMALL, "image_size": [28, 28], "patch_size": [7, 7]},
        text_config=text("qwen2"), downsample_ratio=0.5,
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )  # fmt: skip
    whole = processor(
        tf.InternVLProcessor, _tiles(), tok, video_processor=NoVideos(), image_seq_length=4
    )
    return Tiny(config, whole, "<IMG_CONTEXT>")


def _tiles() -> Any:
    return image_processor(
        "GotOcr2", size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
    )


def aya_vision() -> Tiny:
    names = "<image> <|START_OF_IMG|> <|END_OF_IMG|> <|IMG_PATCH|> <|IMG_LINE_BREAK|> TILE"
    tok = tokenizer(*names.split(), "TILE_GLOBAL")
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    config = tf.AyaVisionConfig(
        vision_config=SIGLIP, text_config=text("cohere2", **windows), vision_feature_layer=-1,
        image_token_index=tok.convert_tokens_to_ids("<|IMG_PATCH|>"), downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
    )  # fmt: skip
    whole = tf.AyaVisionProcessor(_tiles(), tok, patch_size=7, img_size=28, downsample_factor=2)
    return Tiny(config, whole, "<image>")


def idefics2() -> Tiny:
    latents = {
        "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
        "resampler_head_dim": 16, "num_key_value_heads": 1,
    }  # fmt: skip
    config = tf.Idefics2Config(
        vision_config={**SMALL, "image_size": 56}, perceiver_config=latents,
        text_config=text("mistral"), image_token_id=257,
    )  # fmt: skip
    size = {"shortest_edge": 28, "longest_edge": 56}
    reader = image_processor("Idefics2", size=size, do_image_splitting=False)
    tok = tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>")
    return Tiny(config, tf.Idefics2Processor(reader, tok, image_seq_len=4), "<image>")


def idefics3() -> Tiny:
    tiles = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
    tok = tokenizer(
        *tiles, image_token="<image>", fake_image_token="<fake_token_around_image>",
        end_of_utterance_token="<end_of_utterance>", global_image_token="<global-img>",
    )  # fmt: skip
    config = tf.Idefics3Config(
        vision_config=SMALL, text_config=text("llama"), scale_factor=2,
        image_token_id=tok.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    size, most = {"longest_edge": 56}, {"longest_edge": 28}
    reader = image_processor("Idefics3", size=size, max_image_size=most)
    return Tiny(config, tf.Idefics3Processor(reader, tok, image_seq_len=4), "<image>")


def got_ocr2() -> Tiny:
    tok = tokenizer("<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
    encoder = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 256,
        "patch_size": 4, "output_channels": 16, "window_size": 16, "global_attn_indexes": [1],
        "mlp_dim": 48,
    }  # fmt: skip
    config = tf.GotOcr2Config(
        vision_config=encoder,
        text_config=text("qwen2"),
        image_token_index=257,
        image_seq_length=256,
    )
    reader = image_processor("GotOcr2", size={"height": 256, "width": 256})
    return Tiny(config, tf.GotOcr2Processor(reader, tok), "<imgpad>")


def janus() -> Tiny:
    tok = tokenizer(
        image_token="<image_placeholder>", boi_token="<begin_of_image>",
        eoi_token="<end_of_image>",
    )  # fmt: skip
    codes = {
        "embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4,
        "projection_dim": 16, "image_token_embed_dim": 64, "num_hidden_layers": 1,
    }  # fmt: skip
    encoder = {**SMALL, "projection_dim": 64, "depth": 2, "mlp_ratio": 2, "num_image_tokens": 16}
    config = tf.JanusConfig(
        vision_config=encoder, vq_config=codes, text_config=text("llama"),
        image_token_id=tok.convert_tokens_to_ids("<image_placeholder>"),
    )  # fmt: skip
    whole = tf.JanusProcessor(image_processor("Janus", size=SQUARE, min_size=14), tok)
    whole.num_image_tokens = 16
    return Tiny(config, whole, "<image_placeholder>")


def deepseek_vl() -> Tiny:
    tok = tokenizer(image_token="<image_placeholder>")
    config = tf.DeepseekVLConfig(
        vision_config=SIGLIP, text_config=text("llama"),
        image_token_id=tok.convert_tokens_to_ids("<image_placeholder>"),
    )  # fmt: skip
    reader = image_processor("DeepseekVL", size=SQUARE, min_size=14)
    return Tiny(
        config, tf.DeepseekVLProcessor(reader, tok, num_image_tokens=16), "<image_placeholder>"
    )


def lighton_ocr() -> Tiny:
    tok = tokenizer(
        image_token="<|image_pad|>", image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    )  # fmt: skip
    config = tf.LightOnOcrConfig(
        vision_config=PIXTRAL, text_config=text("qwen3", head_dim=16), spatial_merge_size=2,
        image_token_id=tok.convert_tokens_to_ids("<|image_pad|>"),
    )  # fmt: skip
    patch = {"height": 7, "width": 7}
    reader = image_processor("Pixtral", patch_size=patch, size={"longest_edge": 84})
    whole = tf.LightOnOcrProcessor(reader, tok, patch_size=7, spatial_merge_size=2)
    return Tiny(config, whole, "<|image_pad|>")


def gemma3() -> Tiny:
    tok = tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    config = tf.Gemma3Config(
        vision_config=SIGLIP, mm_tokens_per_image=4, text_config={
            **text("gemma3_text", head_dim=16, num_hidden_layers=3, query_pre_attn_scalar=16),
            "sliding_window": 24, "sliding_window_pattern": 3, "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention",
            ],
        }, image_token_index=tok.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tok.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tok.convert_tokens_to_ids("<end_of_image>"),
    )  # fmt: skip
    whole = tf.Gemma3Processor(image_processor("Gemma3", size=SQUARE), tok, image_seq_length=4)
    return Tiny(config, whole, "<start_of_image>")


def paligemma() -> Tiny:
    tok = tokenizer("<image>", image_token="<image>")
    config = tf.PaliGemmaConfig(
        vision_config=SIGLIP, text_config=text("gemma", head_dim=16), projection_dim=64,
        image_token_index=257,
    )  # fmt: skip
    tok.bos_token = "<|end|>"
    reader = image_processor("Siglip", size=SQUARE)
    reader.image_seq_length = 16
    return Tiny(config, tf.PaliGemmaProcessor(reader, tok), "<image>")


FAMILIES: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        llava, vip_llava, llava_next, llava_onevision, qwen2_vl, qwen2_5_vl, qwen3_vl,
        qwen3_vl_moe, internvl, aya_vision, idefics2, idefics3, got_ocr2, janus, deepseek_vl,
        lighton_ocr, gemma3, paligemma,
    )
}  # fmt: skip


def save(tiny: Tiny, folder: Path) -> Any:
    """Write the checkpoint with random weights; returns its Hugging Face model."""
    torch.manual_seed(0)
    auto = tf.AutoModelForImageTextToText
    for other in (tf.AutoModelForMultimodalLM, tf.AutoModelForSeq2SeqLM):
        if type(tiny.config) not in auto._model_mapping:
            auto = other
    model = auto.from_config(tiny.config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08)
            elif weight.shape == (1,):  # a gate, closed at initialisation
                weight.fill_(0.7)
    model.generation_config = tf.GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(folder)
    if tiny.renamed is not None:
        _rename(folder / "model.safetensors", *tiny.renamed)
    _save_processor(tiny.processor, folder)
    return model


def _rename(path: Path, old: str, new: str) -> None:
    tensors = load_file(path)
    named = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(named, path, {"format": "pt"})


def _save_processor(whole: Any, folder: Path) -> None:
    """Save each part and the options of the whole, because a stub cannot be saved."""
    kind = type(whole)
    parts = kind.get_attributes()
    held: dict[str, Any] = {}  # published folders keep audio and image options in one file
    for part in parts:
        if not isinstance(getattr(whole, part), NoVideos):
            beside = part.endswith("_tokenizer")
            getattr(whole, part).save_pretrained(folder / part if beside else folder)
            path = folder / "preprocessor_config.json"
            if path.exists() and part != "tokenizer":
                held |= json.loads(path.read_text())
                path.write_text(json.dumps(held))
    maker = kind.__bases__[0] if kind.__module__ == __name__ else kind
    names = inspect.signature(maker.__init__).parameters
    options = {
        name: getattr(whole, name)
        for name in names
        if name not in ("self", "args", "kwargs", "chat_template", *parts)
        and isinstance(getattr(whole, name, None), int | str | float | list | dict)
    }
    described = {**options, "processor_class": kind.__name__}
    (folder / "processor_config.json").write_text(json.dumps(described))
