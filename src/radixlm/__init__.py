"""RadixLM: a language-model serving engine."""

from typing import Any

from radixlm.base.lazy import load

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_LAZY = {
    "Engine": "radixlm.entrypoints.offline:Engine",
    "SamplingParams": "radixlm.wire.sampling_params:SamplingParams",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: ``import radixlm`` stays quick."""
    if name in _LAZY:
        return load(_LAZY[name])
    raise AttributeError(f"module 'radixlm' has no attribute {name!r}")
