"""How large the pools are: what the scheduler counts with and the executor allocates."""

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record


class WindowPool(Record):
    """Pages of the layers that attend only to the last ``window_tokens`` tokens.

    ``num_pages`` counts page 0, the null page that padding writes to.
    """

    num_pages: int
    window_tokens: int

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ConfigError(
                f"the window pool has {self.num_pages} pages, needs 2: "
                "raise --swa-full-tokens-ratio"
            )
        if self.window_tokens < 1:
            raise ConfigError(f"a window of {self.window_tokens} tokens, needs at least 1")
