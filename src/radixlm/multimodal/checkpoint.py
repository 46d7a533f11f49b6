"""Loads the processor of a checkpoint folder, also where torchvision is not installed.

Classes that transformers offers with torchvision only get its functions from
``torchvision_functions.py``. Image processors that work on Pillow and numpy are preferred.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from radixlm.arch.json_file import object_or_empty
from radixlm.arch.media.config_json import Raw, deepstack_layers, flattened
from radixlm.arch.media.layout import CheckpointLayout
from radixlm.arch.media.registry import layout_of, row_of
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import load, require_transformers
from radixlm.multimodal.audio_processors import load_audio_processor, single_audio_processor
from radixlm.multimodal.image_processors import load_custom_processor

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_NOT_OPTIONS = ("processor_class", "auto_map", "chat_template", "processor_type")
_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_tokenizer")
_ERRORS = (ImportError, ValueError, TypeError, AttributeError, OSError)


class NoVideos:
    """In place of a video processor; the attributes are those that processors read of it."""

    merge_size = 2
    temporal_patch_size = 2
    slice_mode = False
    downsample_mode = "16x"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError("the checkpoint names no video processor")


def load_processor(folder: Path, on_pillow: bool = False) -> Any:
    """CheckpointError where it cannot be made; ConfigError without transformers. ``on_pillow``: its
    image processor is the class that works on Pillow and numpy, where there is one."""
    transformers = _transformers()
    processor = _load(folder, transformers)
    images = getattr(processor, "image_processor", None)
    if on_pillow and images is not None:
        kind = class_of(type(images).__name__.removesuffix("Fast") + "Pil")
        if kind is not None:
            processor.image_processor = kind.from_dict(images.to_dict())
    return processor


def _load(folder: Path, transformers: Any) -> Any:
    raw = object_or_empty(folder / "config.json")
    custom = load_custom_processor(raw, folder, transformers)
    if custom is not None:
        return custom
    layout = layout_of(row_of(raw))
    declared = str(object_or_empty(folder / _FILES[0]).get("processor_class"))
    if layout is not None and layout.processor and not hasattr(transformers, declared):
        try:
            return _of_layout(layout, raw, folder, transformers)
        except ImportError as error:
            raise _cannot(folder, error) from error
    audio = load_audio_processor(raw, folder, transformers)
    if audio is not None:
        return audio
    try:
        return single_audio_processor(raw, transformers.AutoProcessor.from_pretrained(folder))
    except _ERRORS as error:
        processor = _of_parts(folder, transformers)
        if processor is None:
            raise _cannot(folder, error) from error
        return single_audio_processor(raw, processor)


def load_image_processor(folder: Path, on_pillow: bool = False) -> Any:
    """The image processor alone; errors and ``on_pillow`` as of ``load_processor``."""
    transformers = _transformers()
    try:
        return _image_processor(folder, transformers, "pil" if on_pillow else None)
    except _ERRORS as error:
        message = f"{folder}: its image processor cannot be made: {error}"
        raise CheckpointError(message) from error


def num_deep_layers(folder: Path) -> int:
    """How many layers of the decoder get features of their own from the encoder (DeepStack)."""
    raw = flattened(object_or_empty(folder / "config.json"))
    if layers := deepstack_layers(raw):
        return len([layer for layer in layers if layer])
    vision = raw.get("vision_config") or {}
    return len(vision.get("deepstack_visual_indexes") or ())


def _transformers() -> Any:
    return require_transformers("multimodal", "a model with media input")


def _cannot(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder}: its processor cannot be made: {error}")


def _unchecked(kind: Any) -> Any:
    """A processor class that accepts parts of any class, ``NoVideos`` too."""

    class Unchecked(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    Unchecked.__name__ = kind.__name__  # the name decides which config files it reads
    return Unchecked


def _of_layout(layout: CheckpointLayout, raw: Raw, folder: Path, transformers: Any) -> Any:
    """The processor of a class of transformers, with the layout's options. CheckpointError where
    the tokenizer lacks the layout's tokens."""
    raw = layout.completed(raw, folder)
    processor, image_processor = layout.processor, layout.image_processor
    if layout.processors is not None:
        processor, image_processor = layout.processors(raw)
    images = _image_class(image_processor + "ImageProcessor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    _add_tokens(layout, tokenizer, folder)
    kind = _unchecked(class_of(processor))
    parts = {
        "image_processor": images(**layout.image_options(raw)),
        "tokenizer": tokenizer,
        "video_processor": _layout_videos(layout, raw),
        **{part: getattr(transformers, name)() for part, name in layout.parts.items()},
    }
    made = kind(**{name: parts[name] for name in kind.get_attributes()}, **layout.options(raw))
    if getattr(made, "image_token_id", None) is None:
        made.image_token_id = getattr(tokenizer, "image_token_id", None)
    return made


def _add_tokens(layout: CheckpointLayout, tokenizer: Any, folder: Path) -> None:
    """Set each token and its id as attributes of the tokenizer, from which processors read them."""
    for attribute, token in layout.tokens.items():
        if layout.adds_tokens:
            tokenizer.add_tokens([token], special_tokens=True)
        token_id = tokenizer.convert_tokens_to_ids(token)
        is_video = attribute.startswith("video")
        if not is_video and (token_id is None or token_id == tokenizer.unk_token_id):
            raise CheckpointError(f"{folder}: its tokenizer has no token {token!r}")
        for key, value in ((attribute, token), (attribute + "_id", token_id)):
            if key not in vars(tokenizer):
                object.__setattr__(tokenizer, key, value)


def _layout_videos(layout: CheckpointLayout, raw: Raw) -> Any:
    """``NoVideos`` where the layout has none."""
    if layout.video_processor is None:
        return NoVideos()
    name, options = layout.video_processor(raw)
    kind = class_of(name)
    return NoVideos() if kind is None else kind(**options)


def _of_parts(folder: Path, transformers: Any) -> Any | None:
    """The declared processor, part by part, without the check of their classes; None where the
    folder declares none that is known."""
    files = [object_or_empty(folder / name) for name in _FILES]
    name = next((f["processor_class"] for f in files if f.get("processor_class")), None)
    kind = class_of(name) if isinstance(name, str) else None
    if kind is None:
        return None
    parts = {}
    for part in kind.get_attributes():
        if part == "video_processor":
            parts[part] = _video_processor(folder)
        elif part == "tokenizer":
            parts[part] = transformers.AutoTokenizer.from_pretrained(folder)
        elif part == "image_processor":
            parts[part] = _image_processor(folder, transformers)
        elif part == "feature_extractor":
            parts[part] = transformers.AutoFeatureExtractor.from_pretrained(folder)
        else:
            return None
    options = {k: v for k, v in files[0].items() if k not in (*_NOT_OPTIONS, *_PARTS)}
    return _unchecked(kind)(**parts, **options)


def class_of(name: str) -> Any | None:
    """A class of transformers by its name. One that transformers offers with torchvision only gets
    the functions of ``torchvision_functions.py`` where torchvision is not installed. ImportError
    where another package is missing."""
    transformers = importlib.import_module("transformers")
    exported = getattr(transformers, name, None)
    is_missing = exported is not None and vars(type(exported)).get("is_dummy", False)
    if not is_missing or transformers.is_torchvision_available():
        return exported
    imported = load("radixlm.multimodal.torchvision_functions:imported_as_torchvision")
    with imported():
        return getattr(importlib.import_module(exported.__module__), name)


def _image_processor(folder: Path, transformers: Any, backend: str | None = None) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    except (ImportError, ValueError, TypeError, AttributeError):
        options = object_or_empty(folder / _FILES[0]).get("image_processor") or object_or_empty(
            folder / _FILES[1]
        )
        name = str(options.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
        return _image_class(name).from_dict(options)


def _image_class(name: str) -> Any:
    """The class that works on Pillow and numpy where there is one. ImportError where neither can be
    imported."""
    found = class_of(name + "Pil") or class_of(name)
    if found is None:
        raise ImportError(f"transformers has no {name or 'image processor of this type'}")
    return found


def _video_processor(folder: Path) -> Any:
    """The folder's video processor; ``NoVideos`` where it has none. Older folders have one file for
    images and videos, which names the image processor."""
    for name in ("video_preprocessor_config.json", _FILES[0], _FILES[1]):
        options = object_or_empty(folder / name)
        options = options.get("video_processor") or options
        declared = options.get("video_processor_type")
        is_guess = declared is None and name == _FILES[1]
        if is_guess:
            images = str(options.get("image_processor_type"))
            declared = images.removesuffix("Fast").replace("ImageProcessor", "VideoProcessor")
        if isinstance(declared, str) and (kind := class_of(declared)) is not None:
            try:
                return kind.from_dict(options)
            except ValueError:  # options of images alone, such as ERNIE's without time
                if not is_guess:
                    raise
    return NoVideos()
