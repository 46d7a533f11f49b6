"""Small tokenizers of every kind, as folders like those of real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    '{"name": "Ann", "age": 12, "tags": ["a", "b"], "ok": true, "none": null, "x": -1.5e3}',
    "def main():\n    return [i for i in range(10)]\n\n\tprint('done')",
    "Grüße aus Köln, naïve café, 你好世界, 今日は, Привет мир, 😀😃 🎉",
    "yes no true false null 0 1 2 3 4 5 6 7 8 9 hello there, this is what it is.",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("byte_level", "byte_fallback", "metaspace", "wordpiece", "bpe_suffix", "words")


def byte_level(vocab_size: int = 600) -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("é!")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece BPE with byte fallback, as in Llama 2 and Mistral."""
    words = [
        "▁Hello",
        "▁wor",
        "ld",
        "▁",
        "▁▁",
        "a",
        "b",
        "e",
        "o",
        "l",
        ".",
        ",",
        "▁the",
        "你",
        "é",
    ]
    words += ["th", "he", "▁t", '"', "{", "}", ":", "1", "2"]
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with the metaspace decoder, as in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece, as in BERT."""
    words = ["[UNK]", "hello", "wor", "##ld", "##s", ".", "n", "##'t", "do", "'", "t", "!", "a"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", *SPECIAL])
    return tokenizer


def bpe_suffix() -> Tokenizer:
    """BPE with an end-of-word suffix, as in CLIP and the first GPT."""
    vocab = {
        word: index for index, word in enumerate(["a", "b", "ab</w>", "a</w>", "b</w>", "<u>"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> Tokenizer:
    """Whole words and no decoder; the text is joined with spaces."""
    vocab = {word: index for index, word in enumerate(["[UNK]", "one", "two", "three", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def build(kind: str) -> Tokenizer:
    """The tokenizer called ``kind`` (one of KINDS)."""
    makers = {
        "byte_level": byte_level,
        "byte_fallback": byte_fallback,
        "metaspace": metaspace,
        "wordpiece": wordpiece,
        "bpe_suffix": bpe_suffix,
        "words": words,
    }
    return makers[kind]()


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    values.update(config)
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder
