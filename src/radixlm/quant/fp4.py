"""Checkpoints in floats of 4 bits: MXFP4 and NVFP4; those that mix them with other numbers, and
sparse ones."""

from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.fp8 import Fp8Quant, mxfp8, with_block
from radixlm.quant.scheme import Scheme
from radixlm.quant.widened import MixedScheme

# ModelOpt's names of algorithms that store weights alike
_NVFP4 = frozenset("NVFP4 NVFP4_AWQ W4A16_NVFP4 W4A8_NVFP4_FP8 MODELOPT_FP4 PETIT_NVFP4".split())
_FP8 = frozenset("FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO MODELOPT_FP8".split())


class Fp4Quant(StoredQuant):
    """e2m1 with a scale for each group of 16 or 32 inputs: the tensors say which."""

    source: ClassVar[str] = "radixlm.weights.fp4_source:Fp4Source"


class SparseQuant(StoredQuant):
    """Values and a mask, read as dense weights."""

    source: ClassVar[str] = "radixlm.weights.sparse_source:SparseSource"


class MixedQuant(StoredQuant):
    """Several kinds of numbers in one checkpoint; of those in integers or 4 bit floats layers keep
    what is stored, 8 bit floats are dequantized. ``parts``: the innermost source first. ``fmt``:
    of kernels/ops/fp8.py, in which layers keep 8 bit floats after all."""

    parts: tuple[StoredQuant, ...]
    fmt: str = ""
    source: ClassVar[str] = "radixlm.weights.fp4_source:open_mixed"

    def scheme(self) -> Scheme:
        return MixedScheme(self.fmt) if self.fmt else super().scheme()


def parse_fp8(config: Mapping[str, Any]) -> StoredQuant:
    """Of FP8 as DeepSeek and Hugging Face write it, experts maybe in floats of 4 bits;
    ``weight_block_size`` null: a scale each row or tensor."""
    fp8 = with_block("fp8", config.get("weight_block_size"))
    has_fp4 = config.get("expert_dtype") == "fp4" or str(config.get("moe_quant_algo")) in _NVFP4
    return MixedQuant("fp8", (fp8, Fp4Quant("fp8")), fp8.fmt) if has_fp4 else fp8


def parse_modelopt(config: Mapping[str, Any]) -> StoredQuant | None:
    """Of NVIDIA ModelOpt, also under the names of its kernels; None for algorithms other than FP8,
    MXFP8, NVFP4 and a mixture of them."""
    nested = config.get("quantization")
    stated = nested if isinstance(nested, dict) else config
    algorithm = str(stated.get("quant_algo") or config.get("quant_method")).upper()
    fp8, fp4 = Fp8Quant("modelopt"), Fp4Quant("modelopt")
    if algorithm in ("MIXED_PRECISION", "MODELOPT_MIXED"):
        return MixedQuant("modelopt", (fp8, fp4))
    if algorithm in _NVFP4:
        return fp4
    if algorithm == "MXFP8":
        return mxfp8("modelopt")
    return fp8 if algorithm in _FP8 else None
