"""How large the pools are: what the scheduler counts with and the executor allocates."""

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record


class WindowPool(Record):
    """Pages of the layers that attend only to the last ``window_tokens`` tokens.

    ``num_pages`` counts page 0, the null page, like ``PoolLayout.num_pages``.
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


class PoolLayout(Record):
    """Sizes of one replica's pools.

    Page ids are ``0 .. num_pages - 1``; page 0 is the null page that padding writes to, so
    ``num_pages - 1`` pages can be given out. ``windows`` is empty where all layers share one group
    (no window layers, or ``--disable-hybrid-swa-memory``).
    """

    page_size: int
    num_pages: int
    num_slots: int
    windows: tuple[WindowPool, ...] = ()

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"--page-size is {self.page_size}, needs at least 1")
        if self.num_pages < 2:
            raise ConfigError(
                f"the KV pool has {self.num_pages} pages of {self.page_size} tokens, needs 2: "
                "raise --mem-fraction-static or --max-total-tokens"
            )
        if self.num_slots < 1:
            raise ConfigError(f"--max-running-requests is {self.num_slots}, needs at least 1")

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, the null page not counted."""
        return (self.num_pages - 1) * self.page_size
