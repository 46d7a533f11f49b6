"""Image embeddings of CLIP-like models: the Hugging Face module without its text part."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import require_transformers, transformers_loading
from radixlm.models.encoders.vision_programs import use_programs
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report
from radixlm.wire.media import Media


class ImageEmbedder:
    """In float32. CheckpointError if the weights do not load; ConfigError without transformers."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        transformers: Any = require_transformers("multimodal", "a model with a vision encoder")
        try:
            with transformers_loading:
                model, report = transformers.AutoModel.from_pretrained(
                    folder,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,  # our own check names the file
                    output_loading_info=True,
                )
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{folder}: its encoder cannot be loaded: {error}") from error
        check_report(report, folder, "the encoder", lambda name: not name.startswith("text_"))
        for name in ("text_model", "text_projection"):
            if hasattr(model, name):
                delattr(model, name)
        check_numbers(model, folder, "the encoder")
        self._model: Any = model.to(device).eval().requires_grad_(False)
        use_programs(self._model)

    @torch.inference_mode()
    def encode(self, media: Media) -> Tensor:
        """float32 [1, 1, D]."""
        given = {}
        for name, array in media.inputs.items():
            value = torch.from_numpy(array.read().copy()).to(self._device)
            given[name] = value.float() if value.is_floating_point() else value
        output = self._model.get_image_features(**given)
        output = output if isinstance(output, Tensor) else output.pooler_output
        return output.float()[None]
