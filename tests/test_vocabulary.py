"""The code base uses the terms of the field: words that it once used in their place stay out.

docs/glossary.md has the terms. The test reads identifiers, comments and strings of src, csrc, bench
and scripts, and the docs. ALLOWED has words of checkpoints and libraries, SKIPPED files of data.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# old word -> what to say instead
WORDS = {
    "picture": "image",
    "film": "video",
    "ears": "audio processor, audio encoder",
    "hears": "takes audio",
    "hearing": "audio",
    "sight": "vision, visible images",
    "seeing": "vision",
    "tower": "vision encoder, audio encoder",
    "lineup": "decode batch",
    "newcomer": "the new request",
    "kin": "and others, family",
    "house": "code base, or nothing",
    "books": "bookkeeping",
    "drawer": "sampler",
    "wish": "command, request",
    "scribe": "transcriber",
    "face": "API",
    "twin": "copy",
    "culprit": "poison request",
}
PLURALS = {word + "s": word for word in WORDS if not word.endswith("s")}
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# no document defines these
CODES = re.compile(r"\b(?:NH|MI|OA|SC|KV|SP)-\d\d\b")
ALLOWED = re.compile(
    r"[Hh]ugging ?[Ff]aces?|HuggingFace"  # a name
    r"|\w*_tower\b[\w.]*"  # keys of checkpoints and attributes of transformers' classes
)
SKIPPED = {"src/radixlm/bench/datasets.py"}  # words of a text to benchmark with
SUFFIXES = {".py", ".cpp", ".h", ".md", ".txt", ""}


def _files() -> list[Path]:
    folders = ("src/radixlm", "csrc", "bench", "scripts", "docs")
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    found += sorted(ROOT.glob("*.md"))
    return [
        path
        for path in found
        if path.suffix in SUFFIXES
        and not {"assets", "results", "__pycache__"} & set(path.parts)
        and str(path.relative_to(ROOT)) not in SKIPPED
    ]


FILES = _files()


def _folder(path: Path) -> str:
    """The folder of the repository, or the package of src/radixlm, in which a file lies."""
    folders = [part for part in path.relative_to(ROOT).parts[:-1] if part not in ("src", "radixlm")]
    return folders[0] if folders else ""


def _old_words(path: Path) -> list[str]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        text = ALLOWED.sub(" ", line)
        pieces = [piece.lower() for piece in PIECE.findall(text)]
        words = [PLURALS.get(piece, piece) for piece in pieces]
        at = f"{path.relative_to(ROOT)}:{number}"
        found += [f"{at}: {word}: say {WORDS[word]}" for word in words if word in WORDS]
        found += [f"{at}: {code}" for code in CODES.findall(text)]
    return found


@pytest.mark.parametrize("first", sorted({_folder(path) for path in FILES}))
def test_old_words_stay_out(first: str) -> None:
    found = [word for path in FILES if _folder(path) == first for word in _old_words(path)]
    assert not found, found
