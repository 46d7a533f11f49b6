"""Quantize a float checkpoint while it loads: ``--quantization`` int8wo, w8a8_int8, int4wo-<group>,
fp8 and the names of ``--torchao-config``. Checkpoints in 8 bit floats are widened while they are
read and come this way too, back to the numbers that they had."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import BLOCK, fake_quantize_weight, is_fp8
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.kernels.ops.quantized import GROUPS
from radixlm.quant.checkpoint import BY_BLOCK, BY_ROW, GGUF, StoredQuant
from radixlm.quant.integers import ASKED, IntegerQuant
from radixlm.quant.param import Param
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.quant.scheme import Scheme, UnquantizedScheme

# user's name -> format of kernels/ops/quantized
NAMES = {
    "int8wo": "int8wo",
    "w8a8_int8": "w8a8",
    "int8dq": "w8a8",
    # Sums of integers: several times faster, and the rounding of activations to 8 bits is small
    # beside that of weights to 4.
    "int4wo-32": "w4a8-32",
    "int4wo-64": "w4a8-64",
    "int4wo-128": "w4a8-128",
    "fp8": BY_ROW,
    "w8a8_fp8": BY_ROW,
    "fp8dq-per_row": BY_ROW,
    "fp8dq-per_tensor": BY_ROW,  # a scale a row is finer and costs nothing
}
# ``--quantization`` of checkpoints that are quantized already: they say themselves how
FROM_FP8 = ("fp8", "w8a8_fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
FROM_CHECKPOINT = (*dict.fromkeys((*FROM_FP8, GGUF, *ASKED)),)
_SAMPLE_ROWS = 64
_MOST_CHANGE = 0.01  # of weights that were 8 bit floats before; others change by 0.025


def make_scheme(
    quantization: str | None,
    torchao_config: str = "",
    checkpoint: StoredQuant | None = None,
) -> Scheme:
    """The scheme that the two options name, else that of the checkpoint; ConfigError if they
    disagree or are not built."""
    if quantization and torchao_config and quantization != torchao_config:
        raise ConfigError(
            f"--quantization {quantization} and --torchao-config {torchao_config} contradict each "
            "other; give one of them"
        )
    name = quantization or torchao_config
    kept = None if checkpoint is None else _kept(name, checkpoint)
    if kept is not None:
        return kept
    if not name:
        return UnquantizedScheme()
    if name in FROM_CHECKPOINT and name not in NAMES:
        raise ConfigError(f"--quantization {name}: the checkpoint {_what_it_is(name, checkpoint)}")
    if name not in NAMES:
        flag = "--quantization" if quantization else "--torchao-config"
        raise ConfigError(f"{flag} {name} is not available; choose one of: {', '.join(NAMES)}")
    return OnlineQuantScheme(NAMES[name])


def _kept(name: str, checkpoint: StoredQuant) -> Scheme | None:
    """The scheme that keeps the checkpoint's numbers, where the option does not ask for others."""
    if isinstance(checkpoint, IntegerQuant):
        return PrequantizedScheme() if not name or checkpoint.matches_flag(name) else None
    if checkpoint.method == GGUF:
        return PrequantizedScheme() if not name or name == GGUF else None
    return PrequantizedFp8Scheme(checkpoint.fmt) if not name or name in FROM_FP8 else None


def _what_it_is(name: str, checkpoint: StoredQuant | None) -> str:
    """Why an option that names a kind of checkpoint does not fit, and what would."""
    if name == GGUF:
        what = "is no GGUF file with weights of 4 bits"
    elif name == "compressed-tensors":
        what = "has no 8 bit floats and no integers of compressed-tensors"
    elif name in ASKED:
        what = f"is not of {' or '.join(ASKED[name])}"
    else:
        what = "has no 8 bit floats"
    if checkpoint is None:
        return f"{what}; to quantize floats choose one of: {', '.join(NAMES)}"
    return f"{what} but of {checkpoint.method}, which is read without --quantization"


class OnlineQuantScheme(UnquantizedScheme):
    """Loads floats and packs integers; the float copy lives as long as its layer loads."""

    def __init__(self, fmt: str) -> None:
        self._fmt = fmt
        # Logits and token rows suffer most: integers of 8 bits at least, floats of 16.
        self.head_fmt = "" if is_fp8(fmt) else "int8wo"

    def fmt(self, in_features: int) -> str:
        """The asked format, or the nearest finer one that fits the number of inputs."""
        if self._fmt == BY_BLOCK:
            return BY_BLOCK if in_features % BLOCK == 0 else BY_ROW
        kind, _, asked = self._fmt.partition("-")
        if not asked:
            return self._fmt
        fitting = (g for g in reversed(GROUPS) if g <= int(asked) and in_features % g == 0)
        group = next(fitting, None)
        if group is None:
            return "w8a8" if kind == "w4a8" else "int8wo"
        return f"{kind}-{group}"


class PrequantizedFp8Scheme(OnlineQuantScheme):
    """For checkpoints in 8 bit floats: layers that they keep in more bits stay so."""

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        value = params["weight"].value
        assert value is not None, "a parameter was used before it was loaded"
        if is_fp8_exact(value, self.fmt(value.shape[1])):
            return super().pack(kernels, params, gate_act)
        return UnquantizedScheme().pack(kernels, params, gate_act)


def is_fp8_exact(weight_OI: Tensor, fmt: str) -> bool:
    """Whether a weight holds numbers of ``fmt``, by a part of it."""
    rows = BLOCK if fmt == BY_BLOCK else _SAMPLE_ROWS
    part = weight_OI[:rows].float()
    change = (fake_quantize_weight(part, fmt) - part).norm()
    return bool(change <= _MOST_CHANGE * part.norm())
