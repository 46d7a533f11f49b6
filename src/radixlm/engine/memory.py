"""How the memory is divided between weights and pools; makes the pools."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.rank_processes import topology_of
from radixlm.kernels.ops import kv
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel
from radixlm.models.dtype import resolve_dtypes
from radixlm.pools.capacity import (
    MemoryFacts,
    PoolSizes,
    WindowShare,
    pool_sizes,
    state_pages,
)
from radixlm.pools.state import StatePool, state_nbytes
from radixlm.pools.window_ratio import window_ratio
from radixlm.weights.dummy import checkpoint_dtype

MIN_TAIL = 4  # fewer tokens of a page are computed as fast as the page is copied

_OUT_OF_MEMORY_WORDS = ("can't allocate memory", "out of memory", "cannot allocate memory")


class MemoryNow(Record):
    """Bytes that were free before the weights were loaded, bytes that the weights took, and bytes
    that steps need (measured, where --mem-fraction-static is not set)."""

    free_bytes: int
    weight_bytes: int
    step_bytes: int = 0


class Pools(Record):
    """The KV pools: their sizes, and the second page space if there is one.

    page_size: tokens of a page, --page-size or more (see ``page_size_and_dtype``).
    min_tail: the fewest tokens of a cached page that a prefix hit copies, None where pages can only
        be shared whole.
    """

    sizes: PoolSizes
    page_size: int
    dtype: torch.dtype
    num_bytes: int
    window_tokens: int  # 0: there is one page space only
    states: StatePool | None = None  # with one, the second page space is for states
    min_tail: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.sizes.num_full * self.page_size

    @property
    def num_window_tokens(self) -> int | None:
        """Tokens that layers with a sliding window keep; None without a pool of theirs."""
        if not self.window_tokens or self.states is not None:
            return None
        return self.sizes.num_window * self.page_size


def trial_pools(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    attn: AttentionBackend,
    draft: LoadedDraft | None = None,
) -> Pools:
    """Pools of page 0 and one more, to profile steps before the memory is divided."""
    page_size, dtype = page_size_and_dtype(config, info, attn)
    for group in model.kv_groups:
        attn.make_pool(group, 2, page_size, dtype)
    _make_draft_pools(draft, 2 * topology_of(config).attn_dp, page_size, dtype)
    has_windows = _window_share(config, info, model, page_size) is not None
    return Pools(PoolSizes(1), page_size, dtype, 0, window_tokens=int(has_windows))


def page_size_and_dtype(
    config: ServerConfig, info: ModelInfo, attn: AttentionBackend
) -> tuple[int, torch.dtype]:
    """Page size and dtype of the KV cache; ConfigError if the backend does not support them.

    A --page-size that the backend's kernels do not read is served by the next larger one that they
    do: prefix hits count tokens, so that they are as long as with smaller pages."""
    wanted = config.memory.page_size or 1
    page_size = -(-wanted // attn.page_multiple) * attn.page_multiple
    if not attn.supports(page_size):
        raise ConfigError(
            f"--page-size {wanted}: attention backend {attn.name!r} works with "
            f"{attn.required_page_size}"
        )
    dtype = kv_dtype(config, info, torch.device(config.execute.device or "cpu"))
    if not attn.supports_dtype(dtype):
        asked = config.memory.kv_cache_dtype
        works = "bf16" if asked == "auto" else "auto"
        raise ConfigError(
            f"--kv-cache-dtype {asked}: attention backend {attn.name!r} has no {dtype}; "
            f"--kv-cache-dtype {works} works"
        )
    return page_size, dtype


def make_pools(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    attn: AttentionBackend,
    memory: MemoryNow,
    draft: LoadedDraft | None = None,
    agree: Callable[[Sequence[int]], list[int]] = list,
) -> Pools:
    """Divide the memory and allocate the pools, those of a draft model too. ``agree``: the smallest
    of each number over all ranks, which share page ids."""
    page_size, dtype = page_size_and_dtype(config, info, attn)
    facts = MemoryFacts(
        free_bytes=memory.free_bytes,
        weight_bytes=memory.weight_bytes,
        mem_fraction_static=config.memory.mem_fraction_static,
        max_total_tokens=config.memory.max_total_tokens,
        max_running=config.schedule.max_running_requests or 64,
        context_len=info.context_len,
        step_bytes=memory.step_bytes,
    )
    states = _make_states(config, info, model, facts, page_size, agree)
    if states is not None:
        taken = states.num_bytes
        facts = replace(facts, weight_bytes=facts.weight_bytes + taken)
    share = None if states is not None else _window_share(config, info, model, page_size)
    page_bytes = {"full": 0, "window": 0}
    for group in model.kv_groups:
        page_bytes[group.name] += attn.page_nbytes(group, page_size, dtype)
    attn_dp = topology_of(config).attn_dp
    for net, _ in draft.modules if draft else ():  # their pages are those of the full groups
        nbytes = sum(attn.page_nbytes(g, page_size, dtype) for g in net.kv_groups)
        page_bytes["full"] += attn_dp * nbytes
        branch_bytes = nbytes * draft.num_branch_pages(page_size) if draft else 0
        facts = replace(facts, weight_bytes=facts.weight_bytes + branch_bytes)
    if model.kv_groups or draft:
        sizes = pool_sizes(facts, page_bytes["full"], page_bytes["window"], page_size, share)
    else:  # without keys and values, pages take no memory
        tokens = config.memory.max_total_tokens or facts.context_len * facts.max_running
        sizes = PoolSizes(max(tokens, facts.context_len + 1) // page_size + 1)
    sizes = PoolSizes(*agree((sizes.num_full, sizes.num_window)))
    num_bytes = 0
    for group in model.kv_groups:
        in_window = share is not None and group.name == "window"
        count = sizes.num_window if in_window else sizes.num_full
        pool = attn.make_pool(group, count + 1, page_size, dtype)
        num_bytes += pool.nbytes_per_page * count
    num_bytes += _make_draft_pools(draft, attn_dp * (sizes.num_full + 1), page_size, dtype)
    window = max(g.window for g in model.kv_groups) if share is not None else 0
    if states is not None:
        sizes = PoolSizes(sizes.num_full, states.num_pages - 1)
        window, num_bytes = 1, num_bytes + states.num_bytes
    # a state stands at the end of a page, and rows of compressed groups are sums over tokens
    is_whole = states is not None or any(group.compress_ratio for group in model.kv_groups)
    min_tail = None if is_whole else min(MIN_TAIL, config.memory.page_size or 1)
    return Pools(sizes, page_size, dtype, num_bytes, window, states, min_tail)


def _make_draft_pools(
    draft: LoadedDraft | None, num_pages: int, page_size: int, dtype: torch.dtype
) -> int:
    """Allocate the pools of a draft model; their bytes."""
    if draft is None:
        return 0
    num_pages += draft.num_branch_pages(page_size)
    pools = [
        attn.make_pool(group, num_pages, page_size, dtype)
        for net, attn in draft.modules
        for group in net.kv_groups
    ]
    return sum(pool.nbytes_per_page * num_pages for pool in pools)


def _make_states(
    config: ServerConfig,
    info: ModelInfo,
    model: Model,
    facts: MemoryFacts,
    page_size: int,
    agree: Callable[[Sequence[int]], list[int]],
) -> StatePool | None:
    """The pool of recurrent layers' states, if the model has such layers, be it in other stages."""
    layers = [block.state.states for block in info.decoder.blocks if block.state is not None]
    if not layers:
        return None
    if isinstance(model, DecoderModel):
        layers = list(model.state_layers)
    dtype = torch.bfloat16 if config.memory.mamba_ssm_dtype == "bfloat16" else torch.float32
    page_bytes = max(1, state_nbytes(layers, dtype))
    count = state_pages(facts, page_bytes, config.memory.max_mamba_cache_size)
    (count,) = agree((count,))
    device = torch.device(config.execute.device or "cpu")
    return StatePool(layers, count + 1, page_size, dtype, device)


def kv_dtype(config: ServerConfig, info: ModelInfo, device: torch.device) -> torch.dtype:
    """The dtype of --kv-cache-dtype, or that of the weights: 16 bits for a 16-bit model."""
    if config.memory.kv_cache_dtype != "auto":
        return kv.BY_FLAG[config.memory.kv_cache_dtype]
    stored = checkpoint_dtype(info.folder)
    compute, weight = resolve_dtypes(config.model.dtype, device, stored)
    wanted = weight or stored
    return wanted if wanted in (torch.bfloat16, torch.float16, torch.float32) else compute


def _window_share(
    config: ServerConfig, info: ModelInfo, model: Model, page_size: int
) -> WindowShare | None:
    """How window layers share the memory; None where all layers keep the whole length."""
    windows = [g.window for g in model.kv_groups if g.name == "window"]
    if not windows or len(windows) == len(model.kv_groups):
        return None
    ratio = window_ratio(
        config.memory.swa_full_tokens_ratio,
        config.memory.hybrid_kvcache_ratio,
        max(windows),
        info.context_len,
    )
    chunk = config.schedule.chunked_prefill_size or 2048
    step = info.context_len if chunk < 0 else min(chunk, info.context_len)
    # a request locks the window of its cached prefix until its own has passed it
    locked = -(-max(windows) // page_size)
    return WindowShare(ratio, locked + -(-(max(windows) + step) // page_size) + 3)


@contextmanager
def needs_memory(what: str, advice: str) -> Iterator[None]:
    """Turn an allocation failure into a ConfigError with ``advice``."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"no memory for {what}: {advice} ({first:.300})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of the host or of the device has failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error).lower() for words in _OUT_OF_MEMORY_WORDS)
