"""Memory that runs out while the engine is built, as an error that names the flag."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from radixlm.base.errors import ConfigError

_SIGNS = ("can't allocate memory", "out of memory", "cannot allocate memory")


@contextmanager
def needs_memory(what: str, advice: str) -> Iterator[None]:
    """ConfigError with ``advice`` when there is no memory for ``what``."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"no memory for {what}: {advice} ({first:.300})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of the host or of the device says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error).lower() for sign in _SIGNS)
