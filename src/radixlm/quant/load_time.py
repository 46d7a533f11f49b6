"""Quantise a float checkpoint while it loads: ``--quantization`` int8wo, w8a8_int8, int4wo-<group>
and the same names of ``--torchao-config``."""

from __future__ import annotations

from radixlm.base.errors import ConfigError
from radixlm.quant.scheme import Scheme, UnquantizedScheme

# user's name -> format of kernels/ops/quantised
NAMES = {
    "int8wo": "int8wo",
    "w8a8_int8": "w8a8",
    "int8dq": "w8a8",
    "int4wo-32": "int4-32",
    "int4wo-64": "int4-64",
    "int4wo-128": "int4-128",
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
        if not self._fmt.startswith("int4-"):
            return self._fmt
        asked = int(self._fmt.removeprefix("int4-"))
        fitting = (g for g in (128, 64, 32) if g <= asked and in_features % g == 0)
        group = next(fitting, None)
        return "int8wo" if group is None else f"int4-{group}"
