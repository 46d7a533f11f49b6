"""Loads encoder weights that transformers cannot: of a checkpoint whose layout differs from the
class's (``arch/media/layout.py``), and quantized ones."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.arch.media.layout import CheckpointLayout
from radixlm.arch.names import is_beside, is_scale
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import transformers_loading
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.weights.folder import open_files, open_folder

_PACKED = (torch.int16, torch.int32)  # integers with several numbers each


def config_of(layout: CheckpointLayout, raw: Any, folder: Path, transformers: Any) -> Any:
    """The config of the class; CheckpointError where config.json does not make one."""
    try:
        values = layout.config(layout.completed(raw, folder))
        vision = values.get("vision_config") or {}
        # may be another encoder than that of the class
        if str(vision.get("model_type")).endswith("_vision_model"):
            values["vision_config"] = transformers.AutoConfig.for_model(**vision)
        return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: its encoders cannot be understood: {error}") from error


def pretrained(auto: Any, config: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(the model of transformers' ``auto`` class with the weights of its encoders, a report of the
    load). transformers needs other packages for quantized weights, and takes stored numbers for
    the weights where it knows no package: it never sees any."""
    for one in (config, config.get_text_config(decoder=True)):
        vars(one).pop("quantization_config", None)
    source: Path | None = folder
    weights = _dequantized_encoders(folder)
    if weights is not None:
        source, auto = None, auto._model_mapping[type(config)]
    with transformers_loading:
        loaded: tuple[Any, Any] = auto.from_pretrained(
            source,
            config=config,
            state_dict=weights,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # the language model has no layers here
            output_loading_info=True,
        )
    return loaded


def _dequantized_encoders(folder: Path) -> dict[str, Tensor] | None:
    """The tensors of the checkpoint's encoders as floats; None where they are floats already."""
    if checkpoint_quant(folder) is None:
        return None
    stored = open_files(folder, "auto", None)
    dtypes = (stored.dtype(name) for name in stored.sizes() if is_beside(name))
    if not any(dtype.itemsize == 1 or dtype in _PACKED for dtype in dtypes):
        return None
    source = open_folder(folder, "auto")
    sizes = source.sizes().items()
    names = [name for name, size in sizes if size and is_beside(name) and not is_scale(name)]
    return {name: source.read(name).clone() for name in names}


def _add_norms(model: Any, dtype: torch.dtype) -> None:
    """A norm behind each of the two linear layers of LLaVA's projector, as Yi-VL has them."""
    projector = model.multi_modal_projector
    first, second = projector.linear_1, projector.linear_2
    projector.act = nn.Sequential(nn.LayerNorm(first.out_features, dtype=dtype), projector.act)
    projector.linear_2 = nn.Sequential(second, nn.LayerNorm(second.out_features, dtype=dtype))


def _add_output_norm(model: Any, dtype: torch.dtype) -> None:
    """A norm behind Qwen2-VL's encoder, as Sarashina2-Vision has it."""
    norm = nn.LayerNorm(model.config.text_config.hidden_size, dtype=dtype)
    model.visual.merger = nn.Sequential(model.visual.merger, norm)


def _move_norm(model: Any, dtype: torch.dtype) -> None:
    """The norm of PaddleOCR-VL's projector behind the merging of patches, as in Keye-VL 1.5."""
    projector = model.projector
    norm = nn.LayerNorm(projector.linear_1.in_features, dtype=dtype)
    projector.pre_norm, projector.linear_1 = nn.Identity(), nn.Sequential(norm, projector.linear_1)


def _shape_projector(model: Any, dtype: torch.dtype) -> None:
    """Another width, no biases or a norm in front, as ``projector_shape`` of the config says."""
    projector, shape = model.multi_modal_projector, model.config.projector_shape
    inputs, outputs = projector.linear_1.in_features, projector.linear_2.out_features
    first = nn.Linear(inputs, shape["inner"], bias=shape["bias"], dtype=dtype)
    projector.linear_2 = nn.Linear(shape["inner"], outputs, bias=shape["bias"], dtype=dtype)
    norm = nn.LayerNorm(inputs, shape["norm_eps"], dtype=dtype) if "norm_eps" in shape else None
    projector.linear_1 = first if norm is None else nn.Sequential(norm, first)


# key of a layout's config -> what it changes of the class's model
_CHANGES = {
    "has_projector_norms": _add_norms,
    "has_output_norm": _add_output_norm,
    "has_merged_norm": _move_norm,
    "projector_shape": _shape_projector,
}


def _has_vision_encoder(names: Iterable[str]) -> bool:
    return any(name.startswith("vision_tower.") for name in names)


def fill(
    model: Any,
    layout: CheckpointLayout,
    folder: Path,
    dtype: torch.dtype,
    extra: Path | None = None,
) -> dict[str, list[Any]]:
    """Load the encoders' tensors into ``model``, first those of the folder ``extra``. Returns
    missing keys and those of a wrong shape, as transformers reports them."""
    for key, change in _CHANGES.items():
        if getattr(getattr(model, "config", None), key, False):
            change(model, dtype)
    loaded = dict[str, Tensor]()
    parameters = model.state_dict()
    for place in (extra, folder) if extra is not None else (folder,):
        source = open_folder(place, "auto")
        for name in source.sizes():
            new = layout.renamed(name)
            parts = source.read(name).chunk(len(new)) if new else ()
            for key, part in zip(new, parts, strict=True):
                shape = parameters[key].shape if key in parameters else part.shape
                is_row = part.shape == (1, *shape)  # a table of positions, of a batch of one
                part = part[0] if is_row else part
                if re.match(layout.paired, key):
                    half = int(model.config.vision_config.head_dim) // 2
                    pairs = part.reshape(-1, half, 2, *part.shape[1:])
                    part = pairs.transpose(1, 2).reshape(part.shape)
                loaded[key] = part.to(dtype)
    if _has_vision_encoder(parameters) and not _has_vision_encoder(loaded):
        message = "holds no weights of its vision encoder, nor does a folder of the encoder's name"
        raise CheckpointError(f"{folder}: {message} inside it or extra it")
    wrong = {k: v for k, v in loaded.items() if k in parameters and v.shape != parameters[k].shape}
    fitting = {k: v.clone() for k, v in loaded.items() if k in parameters and k not in wrong}
    model.load_state_dict(fitting, strict=False)
    unused = re.compile(layout.unused)
    missing = [name for name in parameters if name not in loaded and not unused.match(name)]
    return {
        "missing_keys": missing,
        "mismatched_keys": [(k, v.shape, parameters[k].shape) for k, v in wrong.items()],
    }
