"""Tiny random Whisper checkpoints: byte tokens, Whisper's special tokens, windows of two
seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.multimodal.tiny import tokenizer

LANGUAGES = ("en", "de", "ja")
WINDOW_S = 2
START, TEXT_ONLY = "<|startoftranscript|>", "<|notimestamps|>"
TIMES = tuple(f"<|{i * 0.02:.2f}|>" for i in range(WINDOW_S * 50 + 1))
TOKENS = (
    START, *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", TEXT_ONLY,
)  # fmt: skip
SUPPRESSED, FIRST_SUPPRESSED = [5, 9, 17], [32, 256]


def whisper_tokenizer() -> Any:
    tok = tokenizer(*TOKENS)
    tok.add_tokens(list(TIMES))  # as published, without special tokens
    return tok


def save_whisper(folder: Path, **config: Any) -> Any:
    """Write a checkpoint like OpenAI's; returns its Hugging Face model."""
    tok = whisper_tokenizer()
    ids = {token: tok.convert_tokens_to_ids(token) for token in (*TOKENS, "<|end|>")}
    held = {
        "vocab_size": len(tok), "num_mel_bins": 16, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 64, "d_model": 32, "max_source_positions": WINDOW_S * 50,
        "max_target_positions": 128, "decoder_start_token_id": ids[START],
        "eos_token_id": ids["<|end|>"], "pad_token_id": ids["<|end|>"],
        "bos_token_id": ids["<|end|>"], "suppress_tokens": None, "begin_suppress_tokens": None,
        **config,
    }  # fmt: skip
    torch.manual_seed(0)
    model = tf.WhisperForConditionalGeneration(tf.WhisperConfig(**held)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
    model.generation_config = tf.GenerationConfig(
        eos_token_id=ids["<|end|>"], pad_token_id=ids["<|end|>"],
        decoder_start_token_id=ids[START], suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=FIRST_SUPPRESSED, is_multilingual=True, max_length=120,
        no_timestamps_token_id=ids[TEXT_ONLY], max_initial_timestamp_index=20,
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        prev_sot_token_id=ids["<|startofprev|>"],
    )  # fmt: skip
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    raw = json.loads(path.read_text()) | {"processor_class": "WhisperProcessor"}
    path.write_text(json.dumps(raw))
    return model
