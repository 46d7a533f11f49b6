"""The audio encoder of an encoder-decoder model (Whisper): the Hugging Face module."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import require_transformers
from radixlm.models.encoders.layout_weights import pretrained
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report
from radixlm.wire.media import Media

# config keys for the number of decoder layers
_LAYER_KEYS = ("decoder_layers", "decoder_num_hidden_layers")


class SpeechEncoder:
    """The encoder. CheckpointError if its weights do not load; ConfigError without transformers."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        transformers: Any = require_transformers("multimodal", "a model with audio input")
        try:
            model, report = self._load(transformers, folder, dtype)
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{folder}: its encoder cannot be loaded: {error}") from error
        check_report(report, folder, "the encoder", lambda name: ".encoder." in f".{name}")
        check_numbers(model.get_encoder(), folder, "the encoder")
        self._encoder = model.get_encoder().to(device).eval().requires_grad_(False)
        self._parameters = inspect.signature(self._encoder.forward).parameters
        self._device, self._dtype = device, dtype

    @staticmethod
    def _load(transformers: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        config = transformers.AutoConfig.from_pretrained(folder)
        for key in _LAYER_KEYS:
            if hasattr(config, key):
                setattr(config, key, 0)
        return pretrained(transformers.AutoModelForSpeechSeq2Seq, config, folder, dtype)

    @torch.inference_mode()
    def encode(self, media: Media) -> Tensor:
        """float32 [1, N, D] of a clip's mel bands."""
        arguments = {}
        for name, array in media.inputs.items():
            if name in self._parameters:
                value = torch.from_numpy(array.read().copy()).to(self._device)
                arguments[name] = value.to(self._dtype) if value.is_floating_point() else value
        rows: Tensor = self._encoder(**arguments).last_hidden_state
        return rows.flatten(0, 1)[None].float()
