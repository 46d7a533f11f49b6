"""The methods of quantization: one row for each ``quant_method`` that config.json may name.

The check of config.json, the choices of ``--quantization``, the parser of ``quantization_config``
and the loader read this table. A new method is a row here, a parser in ``quant/``, a TensorSource
in ``weights/`` if tensors are stored in a new way, and a format in ``kernels/ops/`` if numbers are.
"""

import re
from typing import NamedTuple


class QuantMethod(NamedTuple):  # no Record: the options read this table before msgspec is imported
    """``parse``: "module:function" that reads a ``quantization_config``, or the record of a method
    whose tensors tell all. ``flags``: values of ``--quantization`` for checkpoints of the method.
    ``tensors``: regular expression of the end of the names of tensors that are read together with
    their weight (scales, zero points)."""

    name: str
    parse: str
    flags: tuple[str, ...] = ()
    tensors: str = ""


FP8_FLAGS = (
    *("fp8", "w8a8_fp8", "fbgemm_fp8", "mxfp8", "compressed-tensors", "modelopt", "modelopt_fp8"),
)
_FP8_SCALES = (
    r"\.(weight_scale(_inv)?|weight_scale_2|(input|activation)_scale(_ub)?|qscale_(act|weight)"
    r"|(kv|[qkv])_scale|([qkv]_proj\.|prob_)output_scale)"
    r"|(gate_up|gate|up|down)_proj_((input|weight|activation)_)?scale(_inv|_2)?"
)
_FP4_FLAGS = ("modelopt_fp4", "nvfp4", "petit_nvfp4")
_MODELOPT_FLAGS = (*FP8_FLAGS, *_FP4_FLAGS, "modelopt_mixed")
_GPTQ_TENSORS = r"\.(qweight|qzeros|scales|g_idx)"
_COMPRESSED_TENSORS = (
    r"\.(weight_(packed|shape|zero_point|g_idx|global_scale)|input_(zero_point|global_scale))"
)
_GPTQ_FLAGS = ("gptq", "gptq_marlin", "marlin", "moe_wna16")
_QUANT = "radixlm.quant"

METHODS = {
    method.name: method
    for method in (
        QuantMethod("fp8", f"{_QUANT}.fp4:parse_fp8", FP8_FLAGS, _FP8_SCALES),
        QuantMethod("fbgemm_fp8", f"{_QUANT}.fp8:Fp8Quant", FP8_FLAGS),
        QuantMethod("mxfp8", f"{_QUANT}.fp8:parse_mxfp8", FP8_FLAGS),
        QuantMethod("modelopt", f"{_QUANT}.fp4:parse_modelopt", _MODELOPT_FLAGS),
        *(QuantMethod(name, f"{_QUANT}.fp4:parse_modelopt", _FP4_FLAGS) for name in _FP4_FLAGS),
        QuantMethod("mxfp4", f"{_QUANT}.fp4:Fp4Quant", ("mxfp4",), "_scales"),
        QuantMethod(
            "compressed-tensors",
            f"{_QUANT}.compressed_tensors:parse",
            ("compressed-tensors",),
            _COMPRESSED_TENSORS,
        ),
        QuantMethod(
            "awq",
            f"{_QUANT}.integers:parse_awq",
            ("awq", "awq_marlin", "moe_wna16"),
            _GPTQ_TENSORS,
        ),
        QuantMethod("gptq", f"{_QUANT}.integers:parse_gptq", _GPTQ_FLAGS),
        QuantMethod("auto-round", f"{_QUANT}.integers:parse_auto_round", ("auto-round",)),
        QuantMethod("qoq", f"{_QUANT}.integers:parse_qoq", ("qoq",)),
        QuantMethod("quark", f"{_QUANT}.quark:parse_quark", ("quark",)),
        QuantMethod("w4afp8", f"{_QUANT}.widened:W4AFp8Quant", ("w4afp8",)),
        QuantMethod("bitnet", f"{_QUANT}.widened:parse_bitnet", ("bitnet",)),
        QuantMethod("hqq", f"{_QUANT}.widened:HqqQuant", ("hqq",)),
        QuantMethod("torchao", f"{_QUANT}.widened:TorchAoQuant", ("torchao",)),
        QuantMethod("w8a8_int8", f"{_QUANT}.integers:parse_w8a8", ("w8a8_int8",)),
        QuantMethod("blockwise_int8", f"{_QUANT}.integers:parse_blockwise", ("blockwise_int8",)),
        QuantMethod("bitsandbytes", f"{_QUANT}.widened:BitsAndBytesQuant", ("bitsandbytes",)),
        QuantMethod("gguf", f"{_QUANT}.checkpoint:StoredQuant", ("gguf",)),
    )
}
# other names of ``quant_method``
ALIASES = {
    "awq_marlin": "awq",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "gptq_marlin": "gptq",
    "modelopt_fp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "intel/auto-round": "auto-round",
    "marlin": "gptq",
    "ptpc_fp8": "fp8",
    "w8a8_fp8": "fp8",
}
# vectors of a table, which are never floats
TABLES = frozenset("aqlm exl2 exl3 higgs spqr vptq".split())
# methods of other engines; floats of such a checkpoint are served, other weights are refused
_UNREAD = frozenset(
    "deepspeedfp eetq experts_int8 fouroversix fp_quant gemma gptq_marlin_24 ipex metal "
    "moe_wna16 quanto sinq".split()
)
KNOWN_METHODS = _UNREAD | TABLES | METHODS.keys() | ALIASES.keys()
SCALE_TENSORS = re.compile(
    "(?:" + "|".join(m.tensors for m in METHODS.values() if m.tensors) + ")$"
)

# Quantizing a float checkpoint while it loads: option -> format of kernels/ops. w4a8 sums integers,
# which is several times faster than int4, and rounding activations to 8 bits adds little error to
# that of 4 bit weights.
ONLINE_INTEGERS = {
    "w8a8_int8": "w8a8",
    "int8wo": "int8wo",
    "int8dq": "w8a8",
    "int4wo-32": "w4a8-32",
    "int4wo-64": "w4a8-64",
    "int4wo-128": "w4a8-128",
    "int4wo-256": "w4a8-128",  # finer than what is asked for
}
TORCHAO_FP8 = {  # a scale for each row is finer than one for the tensor and costs nothing
    "fp8dq-per_tensor": "fp8",
    "fp8dq-per_row": "fp8",
}
ROUNDED = {"bitsandbytes": "nf4", "fp8wo": "fp8wo"}  # no kernel multiplies them (quant/rounded.py)
FP4 = {"mxfp4": "fp4-32", "quark_mxfp4": "fp4-32", "nvfp4_online": "fp4-16"}  # on a CPU
ONLINE_FORMATS = {
    **ONLINE_INTEGERS,
    **FP4,
    "fp8": "fp8",
    "w8a8_fp8": "fp8",
    "mxfp8": "fp8",  # a scale for each row, where mxfp8 has one for 32 inputs
    **TORCHAO_FP8,
    **ROUNDED,
}
UNQUANTIZED = "unquant"  # --quantization of weights as the checkpoint has them
CHECKPOINT_FLAGS = tuple(dict.fromkeys(flag for m in METHODS.values() for flag in m.flags))


def methods_of_flag(flag: str) -> tuple[str, ...]:
    """The methods whose checkpoints ``--quantization flag`` accepts."""
    return tuple(method.name for method in METHODS.values() if flag in method.flags)
