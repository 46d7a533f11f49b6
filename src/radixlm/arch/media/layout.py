"""Checkpoints whose encoders have other config keys and tensor names than the Hugging Face class
with the same layers: how one becomes the other, and what their processor is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.json_file import object_or_empty
from radixlm.arch.media.config_json import Raw
from radixlm.base.record import Record

# (pattern of a checkpoint's tensor name, the class's name); the first pattern that fits counts
Rules = tuple[tuple[str, str], ...]
Options = Callable[[Raw], dict[str, Any]]


def _no_options(raw: Raw) -> dict[str, Any]:
    return {}


def with_pixels(raw: Raw, folder: Path) -> Raw:
    """For ``completed``: config.json with preprocessor_config.json as ``pixels``."""
    return {**raw, "pixels": object_or_empty(folder / "preprocessor_config.json")}


class CheckpointLayout(Record):
    """One layout; ``Raw`` is the checkpoint's config.json after ``completed``."""

    # the config of the class: its model_type, the encoders' keys and a stub of the text model
    config: Options
    # tensor names of the encoders; "[a|b|c]" in a replacement cuts the rows into equal parts. ():
    # transformers knows the names
    names: Rules = ()
    # pattern of the class's tensors that the checkpoint does not have
    unused: str = r"$."
    # pattern of those whose rows are for interleaved RoPE, where the class rotates halves
    paired: str = r"$."
    # config.json with what is taken from elsewhere in the folder
    completed: Callable[[Raw, Path], Raw] = lambda raw, folder: raw
    # another folder with weights of the encoders
    extra_weights: Callable[[Raw, Path], Path | None] = lambda raw, folder: None

    # class of the processor; "": the folder's own is used
    processor: str = ""
    # class of the image processor, without "ImageProcessor"
    image_processor: str = ""
    # (processor, image_processor) where config.json decides
    processors: Callable[[Raw], tuple[str, str]] | None = None
    # arguments of the processor and of the image processor
    options: Options = _no_options
    image_options: Options = _no_options
    # class of the video processor and its arguments
    video_processor: Callable[[Raw], tuple[str, dict[str, Any]]] | None = None
    # attribute of the processor -> class, for what it needs besides
    parts: Mapping[str, str] = {}
    # attribute of the tokenizer -> token
    tokens: Mapping[str, str] = {}
    # the tokenizer gets those of ``tokens`` that it lacks
    adds_tokens: bool = False

    def renamed(self, name: str) -> list[str]:
        """The class's names of a checkpoint's tensor; [] if it is not one of the encoders'."""
        for pattern, replacement in self.names:
            if re.match(pattern, name):
                new = re.sub(pattern, replacement, name, count=1)
                choice = re.search(r"\[(.*?)\]", new)
                parts = choice.group(1).split("|") if choice else [""]
                return [re.sub(r"\[.*?\]", part, new, count=1) for part in parts]
        return []


def stub(hidden_size: int) -> dict[str, Any]:
    """Config of a text model without layers, of which only the width counts."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2, "vocab_size": 2}
    return {"model_type": "llama", "num_hidden_layers": 0, **sizes, **heads}
