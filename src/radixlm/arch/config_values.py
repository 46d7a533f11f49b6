"""Values of a config.json that must be known names: dtypes, layer types, quantization methods.
An unknown name would otherwise be read as float32, full attention or no quantization."""

from collections.abc import Mapping
from typing import Any

from radixlm.arch.quant_methods import KNOWN_METHODS
from radixlm.base.errors import CheckpointError
from radixlm.base.nearest import suggestion

DTYPES = frozenset(
    "auto float32 float64 float16 bfloat16 float double half float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int8 uint8 int16 int32 int64".split()
)
LAYER_TYPES = frozenset(
    "full_attention sliding_attention chunked_attention window_attention indexed_attention "
    "compressed_sparse_attention heavily_compressed_attention minimax_m3_sparse conv moe hybrid "
    "hybrid_sliding reference_sliding_attention linear_attention sparse dense mamba mamba2 "
    "attention deepseek_sparse_attention qwen_sparse_attention recurrent mlp".split()
) | {""}  # as GLM-5 Next publishes its delta nets


def check_config_values(values: Mapping[str, Any], source: str) -> None:
    """CheckpointError for a name that neither RadixLM nor Hugging Face knows."""
    if (name := values.get("dtype")) is not None:  # torch_dtype is another name of it
        _known(str(name).removeprefix("torch."), DTYPES, f"'dtype' = {name!r:.80}", source)
    kinds = values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise CheckpointError(f"{source}: 'layer_types' = {kinds!r:.80} must be a list of names")
    for place, kind in enumerate(kinds or ()):
        _known(kind, LAYER_TYPES, f"'layer_types'[{place}] = {kind!r:.80}", source)
    stated = values.get("quantization_config") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{source}: 'quantization_config' = {stated!r:.80} must be an object")
    if method := stated.get("quant_method"):
        name = method.lower() if isinstance(method, str) else method
        _known(name, KNOWN_METHODS, f"quantization_config 'quant_method' = {method!r:.80}", source)


def _known(word: object, words: frozenset[str], what: str, source: str) -> None:
    if not isinstance(word, str) or word not in words:
        near = suggestion(str(word), sorted(words))
        raise CheckpointError(f"{source}: {what} is unknown{near}")
