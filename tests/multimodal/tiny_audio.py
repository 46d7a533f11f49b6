"""Tiny random checkpoints behind towers that hear; see tiny.py."""

from __future__ import annotations

from collections.abc import Callable

import transformers as tf

from radixlm.multimodal.checkpoint import NoVideos
from tests.multimodal.tiny import TEXT, Tiny, pictures, processor, text, tokenizer

# two mel bins' worth of Whisper: clips of two seconds, padded to the full length
WHISPER = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "d_model": 32, "max_source_positions": 100,
}  # fmt: skip


def _ears() -> tf.WhisperFeatureExtractor:
    return tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)


def qwen2_audio() -> Tiny:
    tok = tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    config = tf.Qwen2AudioConfig(
        audio_config=WHISPER, text_config=text("qwen2"), audio_token_index=257
    )
    whole = tf.Qwen2AudioProcessor(_ears(), tok)
    return Tiny(config, whole, "<|audio_bos|><|AUDIO|><|audio_eos|>")


def qwen2_5_omni() -> Tiny:
    tok = tokenizer(
        image_token="<|IMAGE|>", audio_token="<|AUDIO|>", video_token="<|VIDEO|>",
        vision_bos_token="<|vision_bos|>", vision_eos_token="<|vision_eos|>",
        audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "out_hidden_size": 64,
        "intermediate_size": 48, "window_size": 28, "fullatt_block_indexes": [1],
    }  # fmt: skip
    ids = {
        name: tok.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "audio_token_index": "AUDIO", "image_token_index": "IMAGE",
            "video_token_index": "VIDEO", "audio_start_token_id": "audio_bos",
            "audio_end_token_id": "audio_eos", "vision_start_token_id": "vision_bos",
            "vision_end_token_id": "vision_eos",
        }.items()
    }  # fmt: skip
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**WHISPER, "n_window": 25, "output_dim": 64}, vision_config=tower,
        text_config={**TEXT, "rope_parameters": rope}, **ids,
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = pictures("Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size)
    whole = processor(
        tf.Qwen2_5OmniProcessor, image_processor=reader, video_processor=NoVideos(),
        feature_extractor=_ears(), tokenizer=tok,
    )  # fmt: skip
    return Tiny(config, whole, "<|audio_bos|><|AUDIO|><|audio_eos|>")


def gemma3n() -> Tiny:
    """Its tower that sees is timm's and large: a small one stands there and is not asked."""
    names = {f"{name}_token": f"<{name}>" for name in "image audio boi eoi boa eoa".split()}
    tok = tokenizer(**names)
    ids = {
        "image_token_id": "<image>", "audio_token_id": "<audio>", "boi_token_id": "<boi>",
        "eoi_token_id": "<eoi>", "boa_token_id": "<boa>", "eoa_token_id": "<eoa>",
    }  # fmt: skip
    held = text(
        "gemma3n_text", head_dim=16, num_hidden_layers=4, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=257, laurel_rank=8, num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], intermediate_size=[96] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=32,
    )  # fmt: skip
    ears = {
        "hidden_size": 32, "input_feat_size": 16, "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 2, "conf_attention_chunk_size": 4,
        "conf_attention_context_left": 5, "conf_attention_context_right": 0,
        "sscp_conv_channel_size": [8, 8], "vocab_size": 8, "vocab_offset": 392,
        "conf_reduction_factor": 2,
    }  # fmt: skip
    eyes = {
        "model_type": "gemma3n_vision", "architecture": "test_resnet", "hidden_size": 32,
        "vocab_size": 8, "vocab_offset": 384, "model_args": None,
    }  # fmt: skip
    config = tf.Gemma3nConfig(
        text_config=held, audio_config=ears, vision_config=eyes, audio_soft_tokens_per_image=20,
        vision_soft_tokens_per_image=4,
        **{name: tok.convert_tokens_to_ids(token) for name, token in ids.items()},
    )  # fmt: skip
    hears = tf.Gemma3nAudioFeatureExtractor(feature_size=16)
    whole = processor(
        tf.Gemma3nProcessor, hears, pictures("Siglip", size={"height": 28, "width": 28}), tok,
        audio_seq_length=20, image_seq_length=4,
    )  # fmt: skip
    return Tiny(config, whole, "<audio>")


AUDIO: dict[str, Callable[[], Tiny]] = {
    made.__name__: made for made in (qwen2_audio, qwen2_5_omni, gemma3n)
}
NEEDS = {"gemma3n": "timm"}
