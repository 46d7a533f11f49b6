"""Processors of checkpoints that came with code of their own, from a class of transformers; see
``arch/families/media_layouts.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.families.media_layouts import Original
from radixlm.arch.families.media_layouts_llava import LAYOUTS
from radixlm.arch.families.media_layouts_more import architecture_of
from radixlm.base.errors import CheckpointError


def original_of(raw: Mapping[str, Any]) -> Original | None:
    """The layout of a config.json, if it is one of these."""
    found = LAYOUTS.get(architecture_of(raw))
    return found if found is not None and found.processor else None


def _videos(original: Original, raw: Mapping[str, Any], transformers: Any) -> Any | None:
    """The video processor; None where it needs a package that is not installed."""
    if original.videos is None:
        return None
    name, options = original.videos(raw)
    try:
        return getattr(transformers, name)(**options)
    except ImportError:
        return None


def make_processor(
    original: Original, raw: Mapping[str, Any], folder: Path, transformers: Any, no_videos: Any
) -> Any:
    """CheckpointError where the tokenizer lacks the tokens of images."""
    raw = original.completed(raw, folder)
    processor, reader_name = original.processor, original.reader
    if original.classes is not None:
        processor, reader_name = original.classes(raw)
    kind, name = getattr(transformers, processor), reader_name + "ImageProcessor"
    reader = getattr(transformers, name + "Pil", None) or getattr(transformers, name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for attribute, token in (original.tokens or {}).items():
        if original.adds_tokens:
            tokenizer.add_tokens([token], special_tokens=True)
        place = tokenizer.convert_tokens_to_ids(token)
        is_video = attribute.startswith("video")
        if not is_video and (place is None or place == tokenizer.unk_token_id):
            raise CheckpointError(f"{folder}: its tokenizer has no token {token!r}")
        for key, value in ((attribute, token), (attribute + "_id", place)):
            if key not in vars(tokenizer):
                object.__setattr__(tokenizer, key, value)

    class Bare(kind):  # type: ignore[valid-type, misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    Bare.__name__ = kind.__name__
    parts = {
        "image_processor": reader(**original.reader_options(raw)),
        "tokenizer": tokenizer,
        "video_processor": _videos(original, raw, transformers) or no_videos,
        **{part: getattr(transformers, name)() for part, name in (original.parts or {}).items()},
    }
    known = {name: parts[name] for name in kind.get_attributes()}
    made = Bare(**known, **original.options(raw))
    if getattr(made, "image_token_id", None) is None:
        made.image_token_id = getattr(tokenizer, "image_token_id", None)
    return made
