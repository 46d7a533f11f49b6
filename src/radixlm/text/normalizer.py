"""What the patterns of a tokenizer.json may cost, told from the file."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_GROWTH = 4096
# a repeated group: matching may take exponential time
_REPEATED = re.compile(r"\)[*+{]")


def growth(normalizer: Any) -> float:
    """At most how many times longer a normalizer's ``Replace`` steps make a text."""
    factor = 1.0
    for step in _steps(normalizer):
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern") or {}, str(step.get("content", ""))
            text = pattern.get("String") if isinstance(pattern, Mapping) else None
            # an expression, and an empty text, may match between all characters
            most = len(content) / len(text) if text else 1 + len(content) if content else 1
            factor *= max(1.0, most)
    return factor


def has_repeated_groups(*parts: Any) -> bool:
    """Whether regular expressions of normalizers or pre-tokenizers repeat a group."""
    patterns = (step.get("pattern") for part in parts for step in _steps(part))
    texts = (p.get("Regex") for p in patterns if isinstance(p, Mapping))
    return any(isinstance(text, str) and _REPEATED.search(text) for text in texts)


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence, those of nested ones too."""
    if isinstance(part, Mapping):
        yield part
        for name in ("normalizers", "pretokenizers"):
            for inner in part.get(name) or ():
                yield from _steps(inner)
