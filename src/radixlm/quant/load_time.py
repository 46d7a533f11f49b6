"""The quantization scheme, by ``--quantization``, ``--torchao-config`` and the checkpoint."""

from radixlm.arch.quant_methods import (
    CHECKPOINT_FLAGS,
    ONLINE_FORMATS,
    ROUNDED,
    UNQUANTIZED,
    methods_of_flag,
)
from radixlm.base.errors import ConfigError
from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.rounded import RoundedScheme
from radixlm.quant.scheme import OnlineQuantScheme, Scheme


def make_scheme(
    quantization: str | None,
    torchao_config: str = "",
    checkpoint: StoredQuant | None = None,
    load_format: str = "auto",
) -> Scheme:
    """The scheme that the options name, else that of the checkpoint; ConfigError if they
    contradict each other or are not built."""
    if quantization == UNQUANTIZED:
        quantization = None
    if load_format == "bitsandbytes" and quantization not in (None, load_format):
        raise ConfigError(
            f"--load-format bitsandbytes and --quantization {quantization} contradict each other; "
            "give --load-format auto"
        )
    if load_format == "bitsandbytes" and not torchao_config:
        quantization = load_format
    if quantization and torchao_config and quantization != torchao_config:
        raise ConfigError(
            f"--quantization {quantization} and --torchao-config {torchao_config} contradict each "
            "other; give one of them"
        )
    name = quantization or torchao_config
    if checkpoint is not None and (not name or checkpoint.matches_flag(name)):
        return checkpoint.scheme()
    if not name:
        return Scheme()
    if name in ONLINE_FORMATS:
        fmt = ONLINE_FORMATS[name]
        return RoundedScheme(fmt) if name in ROUNDED else OnlineQuantScheme(fmt)
    available = ", ".join(ONLINE_FORMATS)
    if name in CHECKPOINT_FLAGS:
        wanted = " or ".join(methods_of_flag(name))
        if checkpoint is None:
            hint = f"; to quantize floats choose one of: {available}"
        else:
            hint = f" but with {checkpoint.method}, which is read without --quantization"
        raise ConfigError(
            f"--quantization {name}: the checkpoint is not quantized with {wanted}{hint}"
        )
    flag = "--quantization" if quantization else "--torchao-config"
    raise ConfigError(f"{flag} {name} is not available; choose one of: {available}")
