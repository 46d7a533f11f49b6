"""Tiny random checkpoints with audio encoders; see tiny.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf
from transformers.audio_utils import mel_filter_bank

from radixlm.multimodal.audio import resample
from radixlm.multimodal.checkpoint import NoVideos
from tests.multimodal.tiny import TEXT, Tiny, image_processor, processor, text, tokenizer
from tests.multimodal.tiny_later import gemma4
from tests.multimodal.tiny_vision import apertus1p5

# a small Whisper: clips of two seconds, padded to the full length
WHISPER = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "d_model": 32, "max_source_positions": 100,
}  # fmt: skip


ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 16,
}  # fmt: skip


def _feature_extractor() -> tf.WhisperFeatureExtractor:
    return tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)


def qwen2_audio() -> Tiny:
    tok = tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    config = tf.Qwen2AudioConfig(
        audio_config=WHISPER, text_config=text("qwen2"), audio_token_index=257
    )
    whole = tf.Qwen2AudioProcessor(_feature_extractor(), tok)
    return Tiny(config, whole, "<|audio_bos|><|AUDIO|><|audio_eos|>")


def apertus1p5_sounds() -> Tiny:
    tiny = apertus1p5()
    return Tiny(tiny.config, tiny.processor, "<|audio|>")


def _omni_tokens() -> tuple[Any, dict[str, int]]:
    """The tokenizer, and the token ids in configs."""
    tok = tokenizer(
        image_token="<|IMAGE|>", audio_token="<|AUDIO|>", video_token="<|VIDEO|>",
        vision_bos_token="<|vision_bos|>", vision_eos_token="<|vision_eos|>",
        audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    )  # fmt: skip
    return tok, {
        name: tok.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "audio_token_index": "AUDIO", "image_token_index": "IMAGE",
            "video_token_index": "VIDEO", "audio_start_token_id": "audio_bos",
            "audio_end_token_id": "audio_eos", "vision_start_token_id": "vision_bos",
            "vision_end_token_id": "vision_eos",
        }.items()
    }  # fmt: skip


def _omni_eyes() -> Any:
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    return image_processor("Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size)


def qwen2_5_omni() -> Tiny:
    tok, ids = _omni_tokens()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "out_hidden_size": 64,
        "intermediate_size": 48, "window_size": 28, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**WHISPER, "n_window": 25, "output_dim": 64}, vision_config=encoder,
        text_config={**TEXT, "rope_parameters": rope}, **ids,
    )  # fmt: skip
    whole = processor(
        tf.Qwen2_5OmniProcessor, image_processor=_omni_eyes(), video_processor=NoVideos(),
        feature_extractor=_feature_extractor(), tokenizer=tok,
    )  # fmt: skip
    return Tiny(config, whole, "<|audio_bos|><|AUDIO|><|audio_eos|>")


def voxtral() -> Tiny:
    tok = tokenizer("[AUDIO]", "[BEGIN_AUDIO]")
    audio_config = {**ENCODER, "intermediate_size": 128, "max_source_positions": 100}
    config = tf.VoxtralConfig(
        audio_config=audio_config, text_config=text("llama"), audio_token_id=257
    )
    return Tiny(config, tf.VoxtralProcessor(_feature_extractor(), tok), "[BEGIN_AUDIO][AUDIO]")


def glmasr() -> Tiny:
    tok = tokenizer("<|pad|>")
    config = tf.GlmAsrConfig(
        audio_config={**ENCODER, "intermediate_size": 128, "max_position_embeddings": 100},
        text_config=text("llama"), audio_token_id=257,
    )  # fmt: skip
    return Tiny(config, tf.GlmAsrProcessor(_feature_extractor(), tok), "<|pad|>")


def audio_flamingo() -> Tiny:
    tok = tokenizer("<sound>")
    config = tf.AudioFlamingo3Config(
        audio_config={**ENCODER, "intermediate_size": 48, "max_source_positions": 100},
        text_config=text("qwen2"), audio_token_id=257,
    )  # fmt: skip
    return Tiny(config, tf.AudioFlamingo3Processor(_feature_extractor(), tok), "<sound>")


def music_flamingo() -> Tiny:
    marks = "<|sound_bos|>", "<|sound_eos|>"
    tok = tokenizer("<sound>", *marks)
    encoder = {"model_type": "audioflamingo3_encoder", "intermediate_size": 48, **ENCODER}
    config = tf.MusicFlamingoConfig(
        audio_config={**encoder, "max_source_positions": 100},
        text_config=text("qwen2"), audio_token_id=257, audio_bos_token_id=258,
        audio_eos_token_id=259,
    )  # fmt: skip
    return Tiny(config, tf.MusicFlamingoProcessor(_feature_extractor(), tok), "<sound>")


CHUNKED = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "d_model": 32, "downsample_hidden_size": 8, "output_dim": 64, "n_window_infer": 200,
}  # fmt: skip


def qwen3_asr() -> Tiny:
    tok = tokenizer(
        audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    config = tf.Qwen3ASRConfig(
        audio_config=CHUNKED, text_config=text("qwen3", head_dim=16, tie_word_embeddings=True),
        audio_token_id=257, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    whole = tf.Qwen3ASRProcessor(tf.Qwen3ASRFeatureExtractor(feature_size=16), tok)
    return Tiny(config, whole, "<|audio_start|><|audio_pad|><|audio_end|>")


def qwen3_omni(is_whole: bool = True) -> Tiny:
    tok, ids = _omni_tokens()
    rope = {"rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 7, "out_hidden_size": 64,
        "intermediate_size": 48, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    held = {
        **TEXT, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", **rope},
    }  # fmt: skip
    named = {f"{kind}_token_id": ids[f"{kind}_token_index"] for kind in ("audio", "image", "video")}
    thinker = {
        "audio_config": {**CHUNKED, "n_window": 50}, "vision_config": encoder, "text_config": held,
        **named, **{name: ids[name] for name in ids if name.endswith("_id")},
    }  # fmt: skip
    config = tf.Qwen3OmniMoeThinkerConfig(**thinker)
    if is_whole:
        config = tf.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    whole = processor(
        tf.Qwen3OmniMoeProcessor, image_processor=_omni_eyes(), video_processor=NoVideos(),
        feature_extractor=_feature_extractor(), tokenizer=tok,
    )  # fmt: skip
    return Tiny(config, whole, "<|audio_bos|><|AUDIO|><|audio_eos|>")


def qwen3_omni_thinker() -> Tiny:
    return qwen3_omni(is_whole=False)


class GraniteParts:
    """Parts of Granite Speech's processor without torchaudio; mel features by torch alone."""

    audio_token = "<|audio|>"
    model: Any = None  # audio clips of several lengths are encoded one by one

    def __init__(self, tok: Any) -> None:
        self.tokenizer, self.audio_processor = tok, self
        self.filters = mel_filter_bank(257, 8, 0.0, 8000.0, 16_000, norm=None, mel_scale="htk")

    def save_pretrained(self, folder: Path) -> None:
        held = {"melspec_kwargs": {"n_mels": 8, "sample_rate": 16_000}, "sampling_rate": 16_000}
        held |= {"projector_window_size": 15, "projector_downsample_rate": 5}
        (folder / "preprocessor_config.json").write_text(json.dumps(held))

    @staticmethod
    def get_attributes() -> list[str]:
        return ["tokenizer", "audio_processor"]

    def bands(self, audio: np.ndarray[Any, Any]) -> torch.Tensor:
        wave = torch.from_numpy(audio)
        made = torch.stft(wave, 512, 160, 400, torch.hann_window(400), return_complex=True)
        logs = (made.abs() ** 2).T @ torch.from_numpy(self.filters).float()
        logs = logs.clip(1e-10).log10()
        logs = torch.maximum(logs, logs.max() - 8) / 4 + 1
        return logs[: len(logs) // 2 * 2].reshape(1, -1, 16)


def granite_speech(plus: bool = False) -> Tiny:
    tok = tokenizer("<|audio|>")
    held = text(
        "granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7,
        attention_multiplier=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    audio = {
        "input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 8,
        "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 5,
    }  # fmt: skip
    joins = {
        "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 48, "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
    }  # fmt: skip
    if plus:  # the projector reads the inputs of the first layer beside the last outputs
        audio["cat_hidden_layers"], joins["encoder_hidden_size"] = [0], 64
    kind = tf.GraniteSpeechPlusConfig if plus else tf.GraniteSpeechConfig
    config = kind(
        text_config=held, encoder_config=audio, projector_config=joins, audio_token_index=257,
        has_lora_adapter=False,
    )  # fmt: skip
    return Tiny(config, GraniteParts(tok), "<|audio|>")


def granite_speech_plus() -> Tiny:
    return granite_speech(plus=True)


class NemotronParts:
    """The audio part of Nemotron's processor, whose image part needs torchvision."""

    audio_token = "<so_embedding>"

    def __init__(self, tok: Any) -> None:
        self.tokenizer = tok
        self.feature_extractor = tf.ParakeetFeatureExtractor(feature_size=16)

    @staticmethod
    def get_attributes() -> list[str]:
        return ["tokenizer", "feature_extractor"]


def nemotron_omni() -> Tiny:
    tok = tokenizer("<so_embedding>", "<so_start>", "<so_end>", "<image>")
    held = {
        **TEXT, "layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 16,
        "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
    }  # fmt: skip
    held.pop("num_hidden_layers")
    audio_config = {
        **ENCODER, "intermediate_size": 48, "subsampling_conv_channels": 8,
        "projection_hidden_size": 48, "projection_bias": False,
    }  # fmt: skip
    eyes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 7,
        "image_size": 28, "video_temporal_patch_size": 2,
    }  # fmt: skip
    config = tf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=held, audio_config=audio_config, vision_config=eyes, audio_token_id=257,
        image_token_id=260, vision_hidden_size=32, projector_hidden_size=48,
    )  # fmt: skip
    return Tiny(config, NemotronParts(tok), "<so_embedding>")


def gemma4_sounds() -> Tiny:
    seen = gemma4()
    audio_config = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 8], "attention_chunk_size": 4,
        "attention_context_left": 5, "output_proj_dims": 48,
    }  # fmt: skip
    raw = {**seen.config.to_dict(), "audio_config": audio_config}
    return Tiny(tf.Gemma4Config(**raw), seen.processor, "<audio>")


def gemma3n() -> Tiny:
    """Its vision encoder is a large one from timm; a small unused one replaces it."""
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
    audio = {
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
        text_config=held, audio_config=audio, vision_config=eyes, audio_soft_tokens_per_image=20,
        vision_soft_tokens_per_image=4,
        **{name: tok.convert_tokens_to_ids(token) for name, token in ids.items()},
    )  # fmt: skip
    extractor = tf.Gemma3nAudioFeatureExtractor(feature_size=16)
    whole = processor(
        tf.Gemma3nProcessor, extractor, image_processor("Siglip", size={"height": 28, "width": 28}), tok,  # noqa: E501
        audio_seq_length=20, image_seq_length=4,
    )  # fmt: skip
    return Tiny(config, whole, "<audio>")


def vibevoice_asr() -> Tiny:
    tok = tokenizer("<|box_start|>", "<|object_ref_start|>", "<|object_ref_end|>")
    encoder = {
        "model_type": "vibevoice_acoustic_tokenizer_encoder", "num_filters": 4,
        "downsampling_ratios": [8, 8, 5, 10], "depths": [1] * 5, "layer_scale_init_value": 0.5,
    }  # fmt: skip
    config = tf.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config={**encoder, "hidden_size": 16},
        semantic_tokenizer_encoder_config={**encoder, "hidden_size": 24},
        text_config=text("qwen2"), audio_token_id=257, audio_bos_token_id=258,
        audio_eos_token_id=259, acoustic_tokenizer_chunk_size=16_000,
    )  # fmt: skip
    whole = tf.VibeVoiceAsrProcessor(tf.VibeVoiceAcousticTokenizerFeatureExtractor(), tok)
    return Tiny(config, whole, "<|object_ref_start|><|box_start|><|object_ref_end|>")


def moss_transcribe() -> Tiny:
    tok = tokenizer("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
    config = tf.MossTranscribeDiarizeConfig(
        audio_config={**ENCODER, "intermediate_size": 48, "max_source_positions": 100},
        text_config=text("qwen3", head_dim=16), audio_token_id=257, audio_chunk_size=32_000,
    )  # fmt: skip
    reader = tf.MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=2)
    whole = tf.MossTranscribeDiarizeProcessor(reader, tok, time_marker_every_seconds=1)
    return Tiny(config, whole, "<|audio_start|><|audio_pad|><|audio_end|>")


AUDIO: dict[str, Callable[[], Tiny]] = {
    made.__name__: made
    for made in (
        apertus1p5_sounds,
        qwen2_audio,
        qwen2_5_omni,
        gemma3n,
        voxtral,
        glmasr,
        audio_flamingo,
        music_flamingo,
        qwen3_asr,
        qwen3_omni,
        qwen3_omni_thinker,
        granite_speech,
        granite_speech_plus,
        nemotron_omni,
        gemma4_sounds,
        vibevoice_asr,
        moss_transcribe,
    )
}
NEEDS = {"gemma3n": "timm", "apertus1p5_sounds": "transformers.models.apertus1p5"}
AudioClips = list[np.ndarray[Any, Any]]


def _voxtral_inputs(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, torch.Tensor]:
    """Its class reads chats with a package of Mistral's: placeholders of whole windows, its own mel
    features."""
    whole, window = tiny.processor, 2 * 16_000
    features = whole._retrieve_input_features(
        audios, 200, sampling_rate=16_000, padding=True, truncation=False,
        pad_to_multiple_of=window, return_tensors="pt",
    )  # fmt: skip
    for audio in audios:
        count = -(-len(audio) // window) * 25
        text = text.replace("[BEGIN_AUDIO][AUDIO]", "[BEGIN_AUDIO]" + "\0" * count, 1)
    ids = whole.tokenizer([text.replace("\0", "[AUDIO]")], return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "input_features": features}


def _apart(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, torch.Tensor]:
    """For a processor that takes one audio clip a text: joined texts and arrays."""
    pieces = text.split(tiny.placeholder)
    texts = [piece + tiny.placeholder for piece in pieces[:-1]]
    made = [
        tiny.processor(text=[one], audio=[audio], return_tensors="pt")
        for one, audio in zip(texts, audios, strict=True)
    ]
    rest = tiny.processor.tokenizer([pieces[-1]], return_tensors="pt")["input_ids"]
    longest = max(one["input_features"].shape[-1] for one in made)
    ids = torch.cat([*(one["input_ids"] for one in made), rest], 1)
    padded = {
        name: torch.cat([F.pad(one[name], (0, longest - one[name].shape[-1])) for one in made])
        for name in ("input_features", "input_features_mask")
    }
    return {"input_ids": ids, **padded}


def _granite_inputs(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, torch.Tensor]:
    bands = [tiny.processor.bands(audio) for audio in audios]
    counts = [-(-band.shape[1] // 15) * 3 for band in bands]
    for count in counts:
        text = text.replace("<|audio|>", "\0" * count, 1)
    text = text.replace("\0", "<|audio|>")
    ids = tiny.processor.tokenizer([text], return_tensors="pt")["input_ids"]
    inner = tiny.processor.model.model
    return _embedded(inner, ids, [{"input_features": band} for band in bands])


def _embedded(
    model: Any, ids: torch.Tensor, given: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Outputs of clips that are encoded one by one, at their placeholders, because padding in a
    batch changes them."""
    with torch.no_grad():
        made = [model.get_audio_features(**one).pooler_output for one in given]
        embeds = model.get_input_embeddings()(torch.where(ids == 257, 0, ids))
        embeds[ids == 257] = torch.cat([one.reshape(-1, one.shape[-1]) for one in made])
    return {"input_ids": ids, "inputs_embeds": embeds}


def _nemotron_inputs(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, torch.Tensor]:
    """The class counts placeholders by a method of its processor, which needs no image."""
    whole = tiny.processor
    reads = tf.models.nemotron_h_omni.processing_nemotron_h_omni
    count = reads.NemotronH_Omni_Reasoning_V3Processor._estimate_audio_num_embeddings
    held = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=8)
    for audio in audios:
        places = "\0" * count(held, len(audio))
        text = text.replace("<so_embedding>", f"<so_start>{places}<so_end>", 1)
    ids = whole.tokenizer([text.replace("\0", "<so_embedding>")], return_tensors="pt")
    made = [
        whole.feature_extractor([one], sampling_rate=16_000, return_tensors="pt") for one in audios
    ]
    given = [
        {"input_features": one["input_features"], "input_features_mask": one["attention_mask"]}
        for one in made
    ]
    return _embedded(whole.model, ids["input_ids"], given)


def _finer(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, torch.Tensor]:
    """For a processor of clips with 24,000 samples a second."""
    clips = [resample(audio, 16_000, 24_000) for audio in audios]
    made: dict[str, torch.Tensor] = tiny.processor(text=[text], audio=clips, return_tensors="pt")
    return made


def _vibevoice_inputs(tiny: Tiny, text: str, audios: AudioClips) -> dict[str, Any]:
    """Without the noise that the class adds to its features."""
    return {**_finer(tiny, text, audios), "sample": False}


_INPUTS = {
    "apertus1p5": _finer,
    "vibevoice_asr": _vibevoice_inputs,
    "nemotron_h_omni": _nemotron_inputs,
    "voxtral": _voxtral_inputs,
    "audioflamingo3": _apart,
    "musicflamingo": _apart,
    "glmasr": _apart,
    "qwen3_asr": _apart,
    "granite_speech": _granite_inputs,
    "granite_speech_plus": _granite_inputs,
}


def inputs_of(tiny: Tiny, text: str, audios: AudioClips, **more: Any) -> Any:
    """Inputs of Hugging Face's model for a text with audio (and images, by name)."""
    own = _INPUTS.get(str(tiny.config.model_type))
    if own is not None:
        made = own(tiny, text, audios)  # all tokens count, whatever the padding id is
        return {"attention_mask": torch.ones_like(made["input_ids"]), **made}
    return tiny.processor(text=[text], return_tensors="pt", audio=audios, **more)
