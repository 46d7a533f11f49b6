"""Vision and audio towers: the Hugging Face module of the checkpoint, without its language model.

The class of config.json is made with no decoder layer and loads its own weights; what is left is
the tower, the projector and the rule by which they are joined (``get_image_features``).

Legend: N rows of one media, D model channels, L layers of the decoder with rows of their own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.wire.media import Media

log = logging.getLogger(__name__)

_METHODS = {"image": "get_image_features", "video": "get_video_features"}
# decoder layers, and the lists that must be as long as there are
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


class HfTower:
    """The towers of one checkpoint, in float32 on a CPU."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """CheckpointError if the weights do not load; ConfigError without transformers."""
        self._device = device
        model = _load(folder, dtype).to(device).eval().requires_grad_(False)
        self._methods = {
            kind: getattr(model, name) for kind, name in _METHODS.items() if hasattr(model, name)
        }
        self._dtype = dtype

    @torch.inference_mode()
    def rows(self, media: Media) -> Tensor:
        """float32 [1 + L, N, D]; ValueError for a kind that the checkpoint has no tower for."""
        method = self._methods.get(media.kind)
        if method is None:
            raise ValueError(f"this model has no tower for {media.kind}")
        made = method(**self._arguments(method, media))
        rows = _joined(getattr(made, "pooler_output", made))
        deep = getattr(made, "deepstack_features", None)
        layers = [rows, *(_joined(one) for one in deep or ())]
        return torch.stack([layer.float() for layer in layers])

    def _arguments(self, method: Callable[..., Any], media: Media) -> dict[str, Tensor]:
        """What the processor has made and the method asks for."""
        known = inspect.signature(method).parameters
        given = {}
        for name, array in media.inputs.items():
            if name in known:
                value = torch.from_numpy(array.read().copy()).to(self._device)
                given[name] = value.to(self._dtype) if value.is_floating_point() else value
        return given


def _joined(rows: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """[N, D] of one tensor of any rank, or of one for each picture."""
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    try:
        import transformers  # noqa: PLC0415  (2 s that text models need not wait)
    except ImportError:
        raise ConfigError("a model with a vision tower needs transformers: install it") from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        _without_layers(config.get_text_config())
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, config=config, dtype=dtype
        )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its towers cannot be loaded: {error}") from error
    inner: torch.nn.Module = getattr(model, "model", model)
    for name in ("language_model", "lm_head"):  # an embedding is left in it
        if hasattr(inner, name):
            delattr(inner, name)
    return inner


def _without_layers(config: Any) -> None:
    for key in _LAYER_KEYS:
        if hasattr(config, key):
            setattr(config, key, 0)
    values: Mapping[str, Any] = config.to_dict()
    for key in values:
        if key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            setattr(config, key, [])
