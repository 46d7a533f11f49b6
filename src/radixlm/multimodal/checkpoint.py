"""The processor of a checkpoint folder, also where torchvision is not installed.

Several processors of Hugging Face cannot be made without a video processor, which needs
torchvision. They are made here with a stand-in that reads no videos; images are then read by
Pillow.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Any

from radixlm.arch.families.composite_newer import joined_layers
from radixlm.arch.families.media_layouts_audio import unwrapped
from radixlm.arch.json_file import object_or_empty
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.multimodal.audio_processors import load_audio_processor, single_audio_processor
from radixlm.multimodal.image_processors import load_custom_processor
from radixlm.multimodal.original import make_processor, original_of

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_NOT_OPTIONS = ("processor_class", "auto_map", "chat_template", "processor_type")
_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_tokenizer")


class NoVideos:
    """Stands for a video processor."""

    merge_size = 2
    temporal_patch_size = 2
    slice_mode = False
    downsample_mode = "16x"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError("videos need torchvision")


def load_processor(folder: Path) -> Any:
    """CheckpointError if the folder has none that can be made, ConfigError without transformers."""
    try:
        import transformers  # noqa: PLC0415  (2 s that text models need not wait)
    except ImportError:
        raise ConfigError("images need transformers and Pillow: install them") from None
    transformers.logging.set_verbosity_error()
    raw = object_or_empty(folder / "config.json")
    reader = load_custom_processor(raw, folder, transformers)
    if reader is not None:
        return reader
    original = original_of(raw)
    declared = str(object_or_empty(folder / _FILES[0]).get("processor_class"))
    if original is not None and not hasattr(transformers, declared):
        try:
            return make_processor(original, raw, folder, transformers, NoVideos())
        except ImportError as error:
            raise CheckpointError(f"{folder}: its processor cannot be made: {error}") from error
    ears = load_audio_processor(raw, folder, transformers)
    if ears is not None:
        return ears
    try:
        return single_audio_processor(raw, transformers.AutoProcessor.from_pretrained(folder))
    except (ImportError, ValueError, TypeError, AttributeError, OSError) as error:
        made = _by_hand(folder, transformers)
        if made is None:
            raise CheckpointError(f"{folder}: its processor cannot be made: {error}") from error
        return single_audio_processor(raw, made)


def load_image_processor(folder: Path) -> Any:
    """Of a folder whose texts are read apart; errors as of ``load_processor``."""
    try:
        import transformers  # noqa: PLC0415  (2 s that text models need not wait)
    except ImportError:
        raise ConfigError("images need transformers and Pillow: install them") from None
    transformers.logging.set_verbosity_error()
    try:
        return _image_processor(folder, transformers)
    except (ImportError, ValueError, TypeError, AttributeError, OSError) as error:
        message = f"{folder}: its image processor cannot be made: {error}"
        raise CheckpointError(message) from error


def _by_hand(folder: Path, transformers: Any) -> Any | None:
    """The processor of its parts, without the check of their classes."""
    found = [object_or_empty(folder / name) for name in _FILES]
    name = next((f["processor_class"] for f in found if f.get("processor_class")), None)
    kind = _class(name, transformers) if isinstance(name, str) else None
    if kind is None:
        return None

    class Bare(kind):  # type: ignore[valid-type, misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    Bare.__name__ = kind.__name__
    parts = {}
    for part in kind.get_attributes():
        if part == "video_processor":
            parts[part] = NoVideos()
        elif part == "tokenizer":
            parts[part] = transformers.AutoTokenizer.from_pretrained(folder)
        elif part == "image_processor":
            parts[part] = _image_processor(folder, transformers)
        elif part == "feature_extractor":
            parts[part] = transformers.AutoFeatureExtractor.from_pretrained(folder)
        else:
            return None
    options = {k: v for k, v in found[0].items() if k not in (*_NOT_OPTIONS, *_PARTS)}
    return Bare(**parts, **options)


def _class(name: str, transformers: Any) -> Any | None:
    """A processor's class; from its own module where the package shows a stand-in for what it
    holds to be missing."""
    found = getattr(transformers, name, None)
    with contextlib.suppress(ImportError):
        if found is not None and hasattr(found, "get_attributes"):
            return found
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Processor")).lower()
    try:
        module = importlib.import_module(f"transformers.models.{snake}.processing_{snake}")
    except ImportError:
        return None
    return getattr(module, name, None)


def _image_processor(folder: Path, transformers: Any) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder)
    except (ImportError, ValueError, TypeError, AttributeError):
        held = object_or_empty(folder / _FILES[0]).get("image_processor") or object_or_empty(
            folder / _FILES[1]
        )
        name = str(held.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
        return getattr(transformers, f"{name}Pil").from_dict(held)


def num_deep_layers(folder: Path) -> int:
    """How many layers of the decoder get rows of their own from the encoder (DeepStack)."""
    raw = unwrapped(object_or_empty(folder / "config.json"))
    if layers := joined_layers(raw):
        return len([layer for layer in layers if layer])
    vision = raw.get("vision_config") or {}
    return len(vision.get("deepstack_visual_indexes") or ())
