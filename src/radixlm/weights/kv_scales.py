"""Scales of a KV cache in 8 bit floats: a number for K and one for V of each layer, by which they
are divided before they are stored."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from radixlm.arch.spec import Attention, AttentionExtras, Decoder
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import replace
from radixlm.weights.source import TensorSource

Scales = Mapping[int, tuple[float, float]]  # layer -> of K, of V
# ModelOpt and compressed-tensors, Quark, and one number for both
_NAME = re.compile(
    r"\.(\d+)\.(?:\w*(?:att|mixer)\w*\.)+(?:\w+\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$"
)
_FLAG = "--quantization-param-path"


def checkpoint_scales(source: TensorSource) -> Scales:
    """Those of a checkpoint; a layer with one of both has it for K and V. Numbers below 0 stand for
    none. CheckpointError for a tensor that is not one number."""
    found: dict[int, dict[str, float]] = {}
    for name in source.sizes():
        if (match := _NAME.search(name)) is None:
            continue
        tensor = source.read(name)
        if tensor.numel() != 1 or not tensor.is_floating_point():
            raise CheckpointError(f"{name} is {list(tensor.shape)}, not one number for its layer")
        value = float(tensor.float())
        if value > 0 and math.isfinite(value):
            found.setdefault(int(match[1]), {})[match[2] or match[3]] = value
    return {layer: _pair(layer_scales) for layer, layer_scales in found.items()}


def _pair(scales: Mapping[str, float]) -> tuple[float, float]:
    either = max(scales.values())
    both = scales.get("kv", either)
    return scales.get("k", both), scales.get("v", both)


def file_scales(file: Path, num_layers: int, model_type: str, rank: int, num_ranks: int) -> Scales:
    """Those of a JSON file as vLLM and SGLang read it:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor":
    {"<rank>": {"<layer>": <number for K and V>, ...}}}}

    ConfigError for a file that is not read, of another model, or without a layer or rank."""
    try:
        stated = json.loads(file.read_bytes())
        cache = stated["kv_cache"]
        ranks = {int(key): value for key, value in cache["scaling_factor"].items()}
        dtype, named = cache["dtype"], stated.get("model_type")
    except OSError as error:
        raise ConfigError(f"{_FLAG} {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wanted = (
            '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1.0, ...}}}}'
        )
        raise ConfigError(f"{_FLAG} {file}: {error!r:.80}; its form is {wanted}") from error
    if dtype != "float8_e4m3fn":
        raise ConfigError(f"{_FLAG} {file}: kv_cache.dtype is {dtype!r:.40}, not 'float8_e4m3fn'")
    if named not in (None, model_type):
        raise ConfigError(
            f"{_FLAG} {file}: model_type is {named!r:.40}, the model's {model_type!r}"
        )
    if sorted(ranks) not in ([0], list(range(num_ranks))):
        raise ConfigError(
            f"{_FLAG} {file}: kv_cache.scaling_factor has ranks {sorted(ranks)}; --tp-size "
            f"{num_ranks} needs 0 to {num_ranks - 1}, or 0 alone for all"
        )
    by_layer = ranks.get(rank, ranks[0])
    scales: dict[int, tuple[float, float]] = {}
    for layer in range(num_layers):
        value = by_layer.get(str(layer)) if isinstance(by_layer, dict) else None
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            where = f"kv_cache.scaling_factor of layer {layer}"
            raise ConfigError(f"{_FLAG} {file}: {where} is {value!r:.40}, not a positive number")
        scales[layer] = float(value), float(value)
    return scales


def with_kv_scales(decoder: Decoder, scales: Scales) -> tuple[Decoder, int]:
    """The decoder with K and V divided by their scales before they are stored, with what undoes
    that in scores and outputs; and the number of such layers."""
    blocks, count = list(decoder.blocks), 0
    for layer, block in enumerate(blocks):
        mixer = block.mixer
        if not isinstance(mixer, Attention):
            continue
        extras = mixer.extras or AttentionExtras()
        k, v = scales.get(layer if extras.kv_from is None else extras.kv_from, (1.0, 1.0))
        if (k, v) == (1.0, 1.0):
            continue
        extras = replace(
            extras, k_scale=extras.k_scale / k, v_scale=extras.v_scale / v, out_scale=v
        )
        mixer = replace(mixer, extras=extras, scale=mixer.softmax_scale * k)
        blocks[layer], count = replace(block, mixer=mixer), count + 1
    return replace(decoder, blocks=tuple(blocks)), count
