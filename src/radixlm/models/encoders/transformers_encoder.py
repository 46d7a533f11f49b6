"""Vision and audio encoders: the Hugging Face module of the checkpoint without its language model.

The class of config.json is built without decoder layers and loads its own weights; what is left is
the encoder, the projector and ``get_image_features``, which joins them. Where the class joins image
and text in its forward instead, that runs, with a stand-in for the language model that captures its
input embeddings.

Legend: N placeholders of one media, D model channels, L DeepStack layers.
"""

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from radixlm.arch.json_file import read_object
from radixlm.arch.media.config_json import architecture_of, generates_speech
from radixlm.arch.media.registry import PLAIN, layout_of, multimodal_spec
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import require_transformers, transformers_loading
from radixlm.models.encoders.custom import MODULES, build
from radixlm.models.encoders.layout_weights import config_of, fill, pretrained
from radixlm.models.encoders.vision_programs import use_programs
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report
from radixlm.wire.media import Media

log = logging.getLogger(__name__)

_METHODS = {
    "image": "get_image_features",
    "video": "get_video_features",
    "audio": "get_audio_features",
}
# the processor's name of an input -> the encoder's
_OLD_NAMES = {"image_patches": "pixel_values"}
_LISTS = ("num_local_patches", "patches_grid")  # inputs that an encoder takes as lists
# config keys for the number of decoder layers
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
# weights of the language model
_OF_TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head|embed_tokens)\.")
_AUTO = (
    *("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM"),
    "AutoModelForSeq2SeqLM",  # where Audio Flamingo is listed
)


class TransformersEncoder:
    """The encoders of one checkpoint, in float32 on a CPU."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        uses_class_forward: bool = False,
    ) -> None:
        """``uses_class_forward``: the class's forward joins what its encoders make. CheckpointError
        if the weights do not load; ConfigError without transformers."""
        self._device, self._dtype = device, dtype
        model, dim, self._scale = _load(folder, dtype)
        model = model.to(device).eval().requires_grad_(False)
        use_programs(model)
        self._model = model
        self._forward: _Extended | _Forward | None = None
        if uses_class_forward and hasattr(model, "embed_tokens_extend"):
            self._forward = _Extended(model, dim)
        elif uses_class_forward:
            self._forward = _Forward(model, dim)
        self._methods = {
            kind: getattr(model, name) for kind, name in _METHODS.items() if hasattr(model, name)
        }

    @torch.inference_mode()
    def encode(self, media: Media) -> Tensor:
        """float32 [1 + L, N, D]; ValueError for a kind without an encoder."""
        if self._forward is not None:
            return self._forward.rows(self._arguments(self._forward.model.forward, media))
        method = self._methods.get(media.kind)
        if method is None and media.kind == "image" and hasattr(self._model, "vision_model"):
            return self._projected(media)
        if method is None:
            raise ValueError(f"this model has no encoder for {media.kind}")
        output = method(**self._arguments(method, media))
        deep = getattr(output, "deepstack_features", None) or ()
        if deep and isinstance(deep[0][0], int):  # (layer before which they join, rows)
            layers = _by_layer({layer: _joined(rows) for layer, rows in deep})
        else:
            layers = [_joined(_pooled(output)), *(_joined(one) for one in deep)]
        layers[0] = layers[0] * self._scale
        return torch.stack([layer.float() for layer in layers])

    def _projected(self, media: Media) -> Tensor:
        """[1, N, D] where layers attend to the projected rows (Llama 3.2 Vision)."""
        model: Any = self._model
        output = model.vision_model(**self._arguments(model.vision_model.forward, media))
        return _joined(model.multi_modal_projector(output.last_hidden_state)).float()[None]

    def _arguments(self, method: Callable[..., Any], media: Media) -> dict[str, Any]:
        """The processor's outputs that ``method`` takes."""
        parameters = inspect.signature(method).parameters
        arguments = dict[str, Any]()
        if "sample" in parameters:  # VibeVoice: else noise is added to its features
            arguments["sample"] = False
        for name, array in media.inputs.items():
            name = name if name in parameters else name.removesuffix("_videos")
            name = _OLD_NAMES.get(name, name)
            if name in parameters:
                value = torch.from_numpy(array.read().copy()).to(self._device)
                value = value.to(self._dtype) if value.is_floating_point() else value
                arguments[name] = value.tolist() if name in _LISTS else value
        return arguments


class BoundaryTokenEncoder:
    """Adds zero rows to an encoder's output for the boundary tokens among its placeholders."""

    def __init__(self, encoder: TransformersEncoder, token: int) -> None:
        """``token``: the placeholder of the encoder's own rows."""
        self._encoder, self._token = encoder, token

    def encode(self, media: Media) -> Tensor:
        """float32 [1, N, D] for the N ``input_ids``; ValueError where the encoder's output
        does not fit them."""
        ids = media.inputs["input_ids"].read()[0]
        features = self._encoder.encode(media)
        is_image = torch.from_numpy(ids == self._token).to(features.device)
        if int(is_image.sum()) != features.shape[1]:
            raise ValueError(
                f"the encoder made {features.shape[1]} rows for {int(is_image.sum())} placeholders"
            )
        rows = features.new_zeros(features.shape[0], len(ids), features.shape[2])
        rows[:, is_image] = features
        return rows


class _Captured(Exception):
    """Carries the input embeddings out of a forward pass."""


class _ZeroEmbedding(nn.Module):
    """An embedding table of zeros."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dim), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.new_zeros(*ids.shape, self.weight.shape[1])


class _StandIn(nn.Module):
    """In place of the language model: raises its input embeddings."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed_tokens = _ZeroEmbedding(dim)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_per_layer_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Not needed here: the decoder computes its own."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> NoReturn:
        raise _Captured(inputs_embeds)


class _Forward:
    """Runs the class's forward up to its language model."""

    def __init__(self, model: nn.Module, dim: int) -> None:
        self.model = model
        model.language_model = _StandIn(dim).to(next(model.parameters()).device)

    def rows(self, arguments: dict[str, Tensor]) -> Tensor:
        """float32 [1, N, D] for the N ``input_ids``. One token is appended: some classes treat a
        single token as a decoding step."""
        ids = torch.nn.functional.pad(arguments["input_ids"], (0, 1))
        try:
            self.model(**{**arguments, "input_ids": ids})
        except _Captured as captured:
            embeds: Tensor = captured.args[0]
            return embeds[:, :-1].float()
        raise ValueError("the class of the checkpoint does not call its language model")


class _Extended:
    """Runs the embedding of a class that has its encoders there (Phi-4-multimodal)."""

    def __init__(self, model: Any, dim: int) -> None:
        self.model, self._dim = model.embed_tokens_extend, dim

    def rows(self, arguments: dict[str, Tensor]) -> Tensor:
        """float32 [1, N, D] for the N ``input_ids``."""
        ids = arguments["input_ids"]
        nothing = torch.zeros(*ids.shape, self._dim, device=ids.device)
        rows: Tensor = self.model(**arguments, inputs_embeds=nothing)
        return rows.float()


def _pooled(output: Any) -> Any:
    """The features: an attribute of an output object, or the output itself."""
    for name in ("pooler_output", "last_hidden_state"):
        features = getattr(output, name, None)
        if features is not None:
            mask = getattr(output, "attention_mask", None)  # of audio: which rows are no padding
            return features if mask is None else features[mask.bool()]
    return output


def _joined(rows: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """[N, D] from one tensor of any rank, or from one for each image."""
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _by_layer(rows: dict[int, Tensor]) -> list[Tensor]:
    """Input embeddings, then what DeepStack layers add, in order of the layers."""
    first = rows.pop(0) if 0 in rows else torch.zeros_like(next(iter(rows.values())))
    return [first, *(rows[layer] for layer in sorted(rows))]


def _load(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, int, float]:
    """(the model without its language model, that one's width, its ``embed_scale``)."""
    transformers: Any = require_transformers("multimodal", "a model with a vision encoder")
    try:
        raw = read_object(folder / "config.json")
        spec = multimodal_spec(architecture_of(raw), raw) or PLAIN
        if generates_speech(raw):
            log.info("%s: the parts that generate speech are not loaded", folder)
        layout = layout_of(spec)
        if layout is not None and spec.custom in MODULES:
            return (*build(spec.custom, layout, raw, folder, dtype), 1.0)
        if layout is not None:
            config = config_of(layout, raw, folder, transformers)
        else:
            config = _config(transformers, spec.hf_model_type, folder)
        _without_layers(config.get_text_config())
        auto = _auto(transformers, config)
        if layout is not None and layout.names:
            with transformers_loading:
                model = auto.from_config(config, dtype=dtype)
            inner: Any = getattr(model, "model", model)
            report: Any = fill(inner, layout, folder, dtype, layout.extra_weights(raw, folder))
        else:
            model, report = pretrained(auto, config, folder, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its encoders cannot be loaded: {error}") from error
    unread = re.compile(f"{_OF_TEXT.pattern}|^(?:{layout.unused})" if layout else _OF_TEXT.pattern)
    check_report(report, folder, "the encoders", lambda name: unread.search(name) is None)
    inner = getattr(model, "model", model)
    unused = ["lm_head", *(["embed_tokens"] if hasattr(inner, "embed_tokens_extend") else [])]
    if not hasattr(inner, "get_image_tokens"):  # else images are tokens, which it embeds
        unused.append("language_model")
    for name in unused:
        if hasattr(inner, name):
            delattr(inner, name)
    check_numbers(inner, folder, "the encoders")
    return inner, int(config.get_text_config().hidden_size), spec.embed_scale


def _config(transformers: Any, model_type: str, folder: Path) -> Any:
    """``model_type``: of the class, where the folder's config.json names another; else ""."""
    if not model_type:
        return transformers.AutoConfig.from_pretrained(folder)
    return type(transformers.AutoConfig.for_model(model_type)).from_pretrained(folder)


def _auto(transformers: Any, config: Any) -> Any:
    """The auto class that maps the config's class."""
    for name in _AUTO:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"transformers has no model with encoders for {config.model_type!r}")


def _without_layers(config: Any) -> None:
    for key in _LAYER_KEYS:
        if hasattr(config, key):
            setattr(config, key, 0)
    values: Mapping[str, Any] = config.to_dict()
    for key in values:
        if key in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"):
            setattr(config, key, [])
