"""How large the pool of window layers is beside that of full layers."""

from radixlm.base.errors import ConfigError


def window_ratio(
    swa_full_tokens_ratio: float,
    hybrid_kvcache_ratio: float | None,
    window_tokens: int,
    context_tokens: int,
) -> float:
    """Tokens of the window pool for each token of the full pool, in (0, 1].

    ``--hybrid-kvcache-ratio`` h, where given, goes before ``--swa-full-tokens-ratio``: 0 makes both
    pools hold the same tokens, 1 gives each request of a whole context just its window.
    """
    if hybrid_kvcache_ratio is None:
        if not 0 < swa_full_tokens_ratio <= 1:
            raise ConfigError(
                f"--swa-full-tokens-ratio is {swa_full_tokens_ratio}, needs to be above 0 and at "
                "most 1 (0.8 is the default)"
            )
        return swa_full_tokens_ratio
    if not 0 <= hybrid_kvcache_ratio <= 1:
        raise ConfigError(f"--hybrid-kvcache-ratio is {hybrid_kvcache_ratio}, needs 0 to 1")
    share = min(1.0, window_tokens / context_tokens)
    return 1 - hybrid_kvcache_ratio * (1 - share)
