"""Tiny checkpoints of further vision-language models; see `tiny.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as tf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from radixlm.multimodal.checkpoint import NoVideos
from tests.fakes.unusual_configs import UNUSUAL_CONFIGS as UNUSUAL_SHAPES
from tests.multimodal.tiny import (
    PINPOINTS,
    SIGLIP,
    SQUARE,
    Tiny,
    image_processor,
    processor,
    text,
    tokenizer,
)
from tests.multimodal.tiny_more import quick_images

AREA = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def hunyuan_vl() -> Tiny:
    rope = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "mrope_section": [2, 3, 1, 2]}
    return _hunyuan({"rope_theta": 10000.0, **rope})


def hunyuan_vl_plain() -> Tiny:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 4, 1]}
    return _hunyuan(rope)


def _hunyuan(rope: dict[str, Any]) -> Tiny:
    tok = tokenizer(image_token="<image>", image_start_token="<im>", image_end_token="</im>")
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 7,
        "num_attention_heads": 2, "out_hidden_size": 64, "max_image_size": 112,
        "img_max_token_num": 64,
    }  # fmt: skip
    config = tf.HunYuanVLConfig(
        vision_config=encoder, text_config=text("hunyuan_vl_text", head_dim=16, rope_parameters=rope),  # noqa: E501
        image_token_id=tok.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
    )  # fmt: skip
    reader = image_processor(
        "HunYuanVL", patch_size=7, merge_size=2, temporal_patch_size=1, size=AREA
    )
    return Tiny(config, tf.HunYuanVLProcessor(reader, tok), "<im><image></im>")


def granite4_vision() -> Tiny:
    encoder = {**SIGLIP, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3}
    scales = {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "num_hidden_layers": 5,
    }  # fmt: skip
    former = {
        "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
        "cross_attention_frequency": 1, "use_qformer_text_input": False,
    }  # fmt: skip
    config = tf.Granite4VisionConfig(
        vision_config=encoder, text_config=text("granite4_vision_text", **scales),
        qformer_config=former, downsample_rate="1/2", deepstack_layer_map=[[1, 0], [-1, 2]],
        spatial_target_layers=[1, 2, 3, 4], image_token_id=257, image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    reader = image_processor(
        "LlavaNext", size=SQUARE, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
    )
    whole = tf.Granite4VisionProcessor(
        reader, tokenizer("<image>"), patch_size=7, vision_feature_select_strategy="full",
        downsample_rate="1/2",
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def _chameleon(**more: Any) -> Tiny:
    tok = tokenizer(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>")
    tok.sep_token = "<|end|>"
    words = {f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": 300 + i for i in range(32)}
    eye = {
        "embed_dim": 16, "num_embeddings": 32, "latent_channels": 16, "resolution": 16,
        "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
    }  # fmt: skip
    sizes = {key: value for key, value in text("chameleon", **more).items() if key != "model_type"}
    config = tf.ChameleonConfig(
        **sizes, vq_config=eye,
        vocabulary_map={"<image>": tok.convert_tokens_to_ids("<image>"), **words},
    )  # fmt: skip
    square = {"height": 16, "width": 16}
    reader = image_processor("Chameleon", size={"shortest_edge": 16}, crop_size=square)
    return Tiny(config, tf.ChameleonProcessor(reader, tok, image_seq_length=64), "<image>")


def chameleon() -> Tiny:
    return _chameleon()


def chameleon_swin() -> Tiny:
    return _chameleon(swin_norm=True, attention_bias=True)


def emu3() -> Tiny:
    marks = {"boi": "<|image start|>", "eoi": "<|image end|>", "image_wrapper": "<|image token|>"}
    tok = tokenizer(
        image_token="<image>", eof_token="<|extra_201|>", eol_token="<|extra_200|>",
        **{f"{name}_token": token for name, token in marks.items()},
    )  # fmt: skip
    tok.bos_token = "<|end|>"
    words = {f"<|visual token {i:06d}|>": 300 + i for i in range(32)}
    eye = {
        "codebook_size": 32, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "hidden_size": 32,
    }  # fmt: skip
    ends = ("<image>", "<|extra_200|>")
    held = text("emu3", **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos")})
    del held["model_type"]
    config = tf.Emu3Config(
        vq_config=eye, text_config=held,
        vocabulary_map={**{token: tok.convert_tokens_to_ids(token) for token in ends}, **words},
    )  # fmt: skip
    reader = image_processor("Emu3", min_pixels=32 * 32, max_pixels=64 * 64)
    return Tiny(config, tf.Emu3Processor(reader, tok), "<image>")


def apertus1p5() -> Tiny:
    marks = ("boi", "eoi", "image_wrapper", "eol", "boa", "eoa")
    tok = tokenizer(
        image_token="<|image|>", audio_token="<|audio|>",
        **{f"{mark}_token": f"<|{mark}|>" for mark in marks},
    )  # fmt: skip
    eye = {
        "codebook_size": 32, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [], "resolution": 16,
    }  # fmt: skip
    ear = {
        "model_type": "wavtokenizer_encoder", "codebook_size": 32, "codebook_dim": 16,
        "hidden_size": 16, "num_filters": 2, "num_lstm_layers": 1,
    }  # fmt: skip
    config = tf.Apertus1p5Config(
        vision_config=eye, audio_config=ear, image_token_offset=290, audio_token_offset=322,
        image_token_id=tok.image_token_id, audio_token_id=tok.audio_token_id,
        text_config=text("apertus1p5_text", vocab_size=400, output_vocab_size=290),
    )  # fmt: skip
    pixels = {"min_pixels": 16 * 16, "max_pixels": 64 * 64}
    reader = image_processor("Apertus1p5", size=pixels, spatial_factor=2)
    whole = tf.Apertus1p5Processor(reader, tf.WavTokenizerFeatureExtractor(), tok)
    return Tiny(config, whole, "<|image|>")


EYE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
FORMER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": 400, "encoder_hidden_size": 32,
}  # fmt: skip


def blip_2() -> Tiny:
    held = text("opt", ffn_dim=96, word_embed_proj_dim=64)
    config = tf.Blip2Config(
        vision_config=EYE, qformer_config=FORMER, text_config=held, num_query_tokens=20,
        image_token_index=257,
    )  # fmt: skip
    reader = image_processor("Blip", size=SQUARE)
    return Tiny(config, tf.Blip2Processor(reader, tokenizer("<image>"), num_query_tokens=20), "")


def instructblip() -> Tiny:
    config = tf.InstructBlipConfig(
        vision_config=EYE, qformer_config=FORMER, text_config=text("llama"), num_query_tokens=20,
        image_token_index=257,
    )  # fmt: skip
    whole = tf.InstructBlipProcessor(
        image_processor("Blip", size=SQUARE), tokenizer("<image>"), tokenizer(), num_query_tokens=20
    )
    return Tiny(config, whole, "")


def _speaking(*marks: str) -> Any:
    """A tokenizer whose placeholder tokens are ordinary words, one with a "_" prefix."""
    letters = tokenizer().backend_tokenizer
    words = dict(letters.get_vocab(False))
    words |= {mark: len(words) + i for i, mark in enumerate(marks)}
    made = Tokenizer(models.BPE(words, [], ignore_merges=True))
    made.normalizer, made.decoder = normalizers.Prepend("_"), letters.decoder
    apart = pre_tokenizers.Split(Regex("|".join(map(re.escape, marks))), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([apart, letters.pre_tokenizer])
    made.add_special_tokens(["<|end|>", "<s>", *(f"<0x0{i}>" for i in range(5))])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>"
    )


class FuyuProcessor(tf.FuyuProcessor):  # type: ignore[misc]
    """Renames its patches to the name that the model reads."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **{"return_legacy_image_output": False, **options})


def fuyu() -> Tiny:
    tok = _speaking("|SPEAKER|", "|NEWLINE|")
    config = tf.FuyuConfig(
        text_config=text("persimmon", qk_layernorm=True, num_key_value_heads=4, hidden_act="relu2"),
        patch_size=14, image_token_id=256,
    )  # fmt: skip
    reader = quick_images(
        "Fuyu", size={"height": 56, "width": 84}, patch_size={"height": 14, "width": 14}
    )
    return Tiny(config, FuyuProcessor(reader, tok), "")


SAM = {
    "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 64, "patch_size": 1, "window_size": 7, "global_attn_indexes": [1], "mlp_dim": 24,
}  # fmt: skip


def deepseek_ocr2() -> Tiny:
    held = text(
        "deepseek_ocr2_text", num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"],
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
        num_key_value_heads=4, routed_scaling_factor=1.5,
    )  # fmt: skip
    eye = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    encoder = {"sam_config": {**SAM, "downsample_channels": [16, 32]}, "encoder_config": eye}
    config = tf.DeepseekOcr2Config(vision_config=encoder, text_config=held, image_token_id=257)
    reader = image_processor("DeepseekOcr2", size={"height": 64, "width": 64}, tile_size=48)
    whole = tf.DeepseekOcr2Processor(reader, tokenizer("<image>"), patch_size=1)
    return Tiny(config, whole, "<image>")


def deepseek_ocr2_published() -> Tiny:
    return deepseek_ocr2()


def deepseek_ocr() -> Tiny:
    """In the class with its encoders, and a window that covers all tokens."""
    held = text(
        "unlimited_ocr_text", num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, sliding_window=4096,
        num_key_value_heads=4,
    )  # fmt: skip
    eye = {**EYE, "image_size": 112, "intermediate_size": 128}
    sam = {**SAM, "downsample_channels": [16, 32], "mlp_dim": 64, "window_size": 14}
    encoder = {"sam_config": sam, "encoder_config": eye}
    config = tf.UnlimitedOcrConfig(vision_config=encoder, text_config=held, image_token_id=257)
    reader = quick_images(
        "UnlimitedOcr", size={"height": 64, "width": 64}, tile_size=40, max_patches=9
    )
    whole = tf.UnlimitedOcrProcessor(reader, tokenizer("<image>"), patch_size=1)
    return Tiny(config, whole, "<image>")


def qwen4() -> Tiny:
    tok = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    own = {**UNUSUAL_SHAPES["Qwen4ExpForCausalLM"], "rope_parameters": rope, "eos_token_id": 256}
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 64, "intermediate_size": 48,
        "num_position_embeddings": 64,
    }  # fmt: skip
    config = tf.Qwen4ExpConfig(
        vision_config=encoder, text_config=text("qwen4_exp_text", **{"num_hidden_layers": 3, **own}),  # noqa: E501
        image_token_id=257, video_token_id=258, vision_start_token_id=259, vision_end_token_id=260,
    )  # fmt: skip
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=AREA
    )
    whole = processor(tf.Qwen3VLProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|vision_start|><|image_pad|><|vision_end|>")


def _molmo2(**more: Any) -> Tiny:
    marks = "<im_patch> <im_col> <im_start> <low_res_im_start> <frame_start> <im_end> <frame_end>"
    tok = tokenizer("<|image|>", *marks.split(), "<im_low>", "<|video|>")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    eye = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "image_size": [28, 28],
        "patch_size": 7, **sizes,
    }  # fmt: skip
    hand = {
        "vision_feature_layer": [2, 1], "hidden_size": 32, "intermediate_size": 48,
        "text_hidden_size": 64, **sizes,
    }  # fmt: skip
    held = text("molmo2_text", head_dim=16, vocab_size=380, additional_vocab_size=20, **more)
    config = tf.Molmo2Config(
        vision_config=eye, adapter_config=hand, text_config=held, image_patch_id=258,
        image_start_token_id=260, low_res_image_start_token_id=261, image_end_token_id=263,
        frame_start_token_id=262, frame_end_token_id=264,
    )  # fmt: skip
    reader = quick_images("Molmo2", size=SQUARE, patch_size=7, max_crops=4, overlap_margins=[1, 1])
    whole = processor(tf.Molmo2Processor, reader, NoVideos(), tok)
    return Tiny(config, whole, "<|image|>")


def molmo2() -> Tiny:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    return _molmo2(rope_parameters=rope, rope_scaling_layers=[1])


def molmo2_after() -> Tiny:
    return _molmo2(qk_norm_type="olmo", norm_after=True, attention_bias=True)


def as_hunyuan_ocr(folder: Path) -> None:
    """The text model's keys at the top level, and the rope under its old name."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    whole = {**raw.pop("text_config"), **raw}
    rope = whole.pop("rope_parameters")
    sections = rope.pop("mrope_section")
    whole["rope_theta"] = rope.pop("rope_theta")
    whole["rope_scaling"] = {**rope, "xdrope_section": sections, "type": "xdrope"}
    del whole["rope_scaling"]["rope_type"]
    path.write_text(json.dumps(whole))


SAM_SIZES = {
    "width": 16, "layers": 2, "heads": 2, "patch_size": 1, "output_channels": 8,
    "downsample_channels": [16, 32], "global_attn_indexes": [1],
}  # fmt: skip


def as_deepseek_ocr(folder: Path) -> None:
    """Its published config; its tensor names are the published ones already."""
    clip = {"width": 32, "layers": 2, "heads": 2, "image_size": 112, "patch_size": 7}
    widths = {"clip-l-14-224": clip, "sam_vit_b": SAM_SIZES}
    _as_published_ocr(folder, "DeepseekOCRForCausalLM", widths)


def as_deepseek_ocr2(folder: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    sam = {**SAM_SIZES, "mlp_ratio": 1.5, "window_size": 7}
    _as_published_ocr(
        folder, "DeepseekOCR2ForCausalLM", {"qwen2-0-5b": {"dim": 32, **sizes}, "sam_vit_b": sam}
    )


def _as_published_ocr(folder: Path, architecture: str, widths: dict[str, Any]) -> None:
    path = folder / "config.json"
    text = json.loads(path.read_text())["text_config"]
    for key in ("mlp_layer_types", "layer_types", "sliding_window", "model_type", "head_dim"):
        text.pop(key, None)
    text |= {"first_k_dense_replace": 1, "use_mla": False, "kv_lora_rank": None, "v_head_dim": 0}
    whole = {
        "architectures": [architecture], "model_type": "deepseek_vl_v2", "language_config": text,
        "vision_config": {"image_size": 64, "width": widths}, "tile_tag": "2D",
        "projector_config": {"projector_type": "linear"}, "global_view_pos": "head",
    }  # fmt: skip
    path.write_text(json.dumps(whole))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink()


VISION: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        hunyuan_vl, hunyuan_vl_plain, granite4_vision, chameleon, chameleon_swin, emu3, apertus1p5,
        blip_2, instructblip, fuyu, deepseek_ocr2, deepseek_ocr2_published, deepseek_ocr, qwen4,
        molmo2, molmo2_after,
    )
}  # fmt: skip
# families that take one image a prompt
ONE_IMAGE = ("blip_2", "instructblip", "fuyu", "molmo2", "molmo2_after")
# checkpoints with other names than their class in transformers
PUBLISHED: dict[str, Callable[[Path], None]] = {
    "hunyuan_vl": as_hunyuan_ocr, "deepseek_ocr": as_deepseek_ocr,
    "deepseek_ocr2_published": as_deepseek_ocr2,
}  # fmt: skip
