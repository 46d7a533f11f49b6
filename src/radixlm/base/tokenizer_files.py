"""The files that hold a tokenizer."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether one of the files is a tokenizer."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZER_FILES)
