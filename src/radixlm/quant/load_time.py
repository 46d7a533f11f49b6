"""Quantise a float checkpoint while it loads: ``--quantization`` int8wo, w8a8_int8, int4wo-<group>
and the same names of ``--torchao-config``."""

from __future__ import annotations

from radixlm.base.errors import ConfigError
from radixlm.kernels.ops.quantised import GROUPS
from radixlm.quant.scheme import Scheme, UnquantizedScheme

# user's name -> format of kernels/ops/quantised
NAMES = {
    "int8wo": "int8wo",
    "w8a8_int8": "w8a8",
    "int8dq": "w8a8",
    # Sums of integers: several times faster, and the rounding of activations to 8 bits is small
    # beside that of weights to 4.
    "int4wo-32": "w4a8-32",
    "int4wo-64": "w4a8-64",
    "int4wo-128": "w4a8-128",
}


def make_scheme(quantization: str | None, torchao_config: str = "") -> Scheme:
    """The scheme that the two options name; ConfigError if they disagree or are not built."""
    if quantization and torchao_config and quantization != torchao_config:
        raise ConfigError(
            f"--quantization {quantization} and --torchao-config {torchao_config} contradict each "
            "other; give one of them"
        )
    name = quantization or torchao_config
    if not name:
        return UnquantizedScheme()
    if name not in NAMES:
        flag = "--quantization" if quantization else "--torchao-config"
        raise ConfigError(f"{flag} {name} is not available; choose one of: {', '.join(NAMES)}")
    return QuantizeAtLoad(NAMES[name])


class QuantizeAtLoad(UnquantizedScheme):
    """Loads floats and packs integers; the float copy lives as long as its layer loads."""

    head_fmt = "int8wo"  # logits and token rows suffer most: never fewer than 8 bits

    def __init__(self, fmt: str) -> None:
        self._fmt = fmt

    def fmt(self, in_features: int) -> str:
        """The asked format, or the nearest finer one that fits the number of inputs."""
        kind, _, asked = self._fmt.partition("-")
        if not asked:
            return self._fmt
        fitting = (g for g in reversed(GROUPS) if g <= int(asked) and in_features % g == 0)
        group = next(fitting, None)
        if group is None:
            return "w8a8" if kind == "w4a8" else "int8wo"
        return f"{kind}-{group}"
