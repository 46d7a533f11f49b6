"""``--dtype`` -> the dtype of activations and the dtype of stored weights."""

import torch

from radixlm.base.errors import ConfigError

NAMES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def resolve_dtypes(
    flag: str, device: torch.device, checkpoint: torch.dtype = torch.float32
) -> tuple[torch.dtype, torch.dtype | None]:
    """(compute dtype, weight dtype); weight dtype None keeps the checkpoint's.

    A CPU computes in float32 whatever the weights are: its 16-bit arithmetic is slower and less
    exact. ``checkpoint`` is the dtype that config.json states; it decides "auto" elsewhere.
    """
    if flag != "auto" and flag not in NAMES:
        known = ", ".join(["auto", *NAMES])
        raise ConfigError(f"--dtype {flag!r} is unknown; choose one of: {known}")
    weight = None if flag == "auto" else NAMES[flag]
    if device.type == "cpu":
        return torch.float32, weight
    return weight or checkpoint, weight or checkpoint
