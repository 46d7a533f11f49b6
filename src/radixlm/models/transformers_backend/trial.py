"""A trial of a Hugging Face model at start: how many layers attend, with which heads, windows and
chunks; and whether keys and values are all that the model keeps from one token to the next.

Legend: T tokens of the trial, H query heads, K KV heads, C channels of K, V of V.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.spec import Attention, AttentionExtras, Block, Decoder, Norm
from radixlm.attention.reference import QueryBlock, attend
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.models.kv_groups import kv_groups, pool_places
from radixlm.step.batch import AttentionSite, ForwardBatch

log = logging.getLogger(__name__)

CUTS = (7, 4, 1, 1)  # tokens of the trial, step by step
# the largest difference of logits that rounding explains, over their spread
TOLERANCE = {torch.float32: 1e-3}
COARSE = 0.3  # of 16-bit dtypes, with which a token may choose another expert
MISMATCH = (
    "its logits differ (by {:.2g} of their spread) between one pass and token by token over a KV "
    "cache: it keeps another state, or numbers its positions in another way"
)
FAILURES = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, NotImplementedError, CheckpointError),
)


class Call(Record):
    """One call of the attention function; the model makes it in every step."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None

    def spec(self) -> Attention:
        """The attention's record."""
        extras = AttentionExtras(v_dim=self.v_dim, attention_chunk_size=self.chunk)
        has_extras = self.v_dim != self.head_dim or self.chunk
        return Attention(
            self.heads, self.kv_heads, self.head_dim, None, scale=self.scale,
            window=self.window, extras=extras if has_extras else None,
        )  # fmt: skip


def sites_of(calls: Sequence[Call], sizes: Decoder) -> tuple[Decoder, tuple[AttentionSite, ...]]:
    """The description and the sites of a model whose steps make these calls."""
    norm = Norm(1e-6)
    blocks = tuple(Block(call.spec(), None, norm) for call in calls)
    decoder = Decoder(
        sizes.vocab, sizes.dim, blocks, norm, max_positions=sizes.max_positions, pool=sizes.pool
    )
    places = pool_places(decoder, kv_groups(decoder))
    sites = []
    for index, call in enumerate(calls):
        group, row = places[index]
        sites.append(
            AttentionSite(
                row, group, call.heads, call.kv_heads, call.head_dim, call.v_dim, call.scale,
                call.window, call.softcap, call.sinks, chunk=call.chunk,
            )
        )  # fmt: skip
    return decoder, tuple(sites)


class Mask(Tensor):
    """Stands for a mask during a trial and carries its pattern to the attention."""

    window: int
    mask_chunk: int


def probe_mask(mask_function: Callable[..., Any], size: int | None) -> tuple[int, int]:
    """(window, chunk) of a mask of transformers, 0 for none; CheckpointError if it is another."""
    n = size or 8
    q_Q = torch.tensor([0, 1, n - 1, n, n + 1, 2 * n, 3 * n - 1, 3 * n])
    k_N = torch.arange(3 * n + 2) if n <= 512 else torch.cat([*_near(q_Q, n)])
    zero, q, k = torch.tensor(0), q_Q[:, None], k_N[None]
    mask_QN = torch.as_tensor(mask_function(zero, zero, q, k)).expand(len(q_Q), len(k_N))
    before = k <= q
    if torch.equal(mask_QN, before):
        return 0, 0
    if torch.equal(mask_QN, before & (k > q - n)):
        return n, 0
    if torch.equal(mask_QN, before & (k // n == q // n)):
        return 0, n
    raise CheckpointError("its attention mask is neither causal, nor a window or a chunk")


def _near(q_Q: Tensor, n: int) -> Iterator[Tensor]:
    for step in (-2 * n, -n, 0, n):
        for near in (-1, 0, 1):
            yield (q_Q + step + near).clamp(min=0)


def mask_interface(
    *_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any
) -> Mask:
    """Replaces transformers' mask function during a trial."""
    mask = torch.empty(1, 1, 1, 1).as_subclass(Mask)
    mask.window, mask.mask_chunk = probe_mask(mask_function, local_size)
    return mask


def call_of(
    module: torch.nn.Module,
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Call:
    """The record of a call; CheckpointError for what no site can express.

    ``shapes``: (query heads, KV heads, channels) of k, then of v."""
    (heads, kv_heads, head_dim), (_, v_heads, v_dim) = shapes
    if v_heads != kv_heads or heads % kv_heads:
        raise CheckpointError(f"{heads} heads share {kv_heads} of keys and {v_heads} of values")
    if mask is not None and not hasattr(mask, "window"):  # what is made of a Mask has none
        raise CheckpointError(f"{type(module).__name__} adds another mask to the scores")
    if mask is None and not getattr(module, "is_causal", True):
        raise CheckpointError(f"{type(module).__name__} is not causal")
    sliding = options.get("sliding_window")
    window = int(sliding) if isinstance(sliding, int) and not isinstance(sliding, bool) else 0
    chunk = 0
    if mask is not None:
        assert isinstance(mask, Mask)
        window, chunk = mask.window or window, mask.mask_chunk
    scale, sinks = options.get("scaling"), options.get("s_aux")
    return Call(
        heads, kv_heads, head_dim, v_dim, head_dim**-0.5 if scale is None else float(scale),
        window, chunk, float(options.get("softcap") or 0.0),
        None if sinks is None else sinks.detach().float().contiguous(),
    )  # fmt: skip


@dataclass(slots=True)
class GrowingCache:
    """Attention over one sequence whose keys and values are kept in growing tensors."""

    pools: Sequence[Any] = ()
    rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(
        self, q_THC: Tensor, k_TKC: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        assert k_TKC is not None and v_TKV is not None
        key, k, v = (site.group, site.layer), k_TKC, v_TKV
        if key in self.rows:
            k, v = torch.cat((self.rows[key][0], k)), torch.cat((self.rows[key][1], v))
        self.rows[key] = k, v
        positions = torch.arange(len(k), device=k.device)
        query = positions[-len(q_THC) :, None]
        offset = positions[None] - query
        mask = (offset <= 0) & (offset > -(site.window or len(k) + 1))
        if site.chunk:
            mask &= positions[None] // site.chunk == query // site.chunk
        block = QueryBlock(query.T, positions[None], mask[None], offset[None])
        return attend(q_THC[None], k[None], v[None], block, site)[0].flatten(1)


def trial_batches(ids: Sequence[int], device: torch.device) -> Iterator[ForwardBatch]:
    """The steps of the trial."""
    cache, start = GrowingCache(), 0
    for count in CUTS:
        here = torch.tensor(ids[start : start + count], device=device)
        start += count
        yield ForwardBatch(
            token_ids_T=here,
            positions_T=torch.arange(start - count, start, device=device),
            rope_len_T=torch.full((count,), start, device=device),
            query_start_S1=torch.tensor([0, count], dtype=torch.int32, device=device),
            kv_len_S=torch.tensor([start], dtype=torch.int32, device=device),
            page_table_GSP=(),
            store_GT=(),
            logits_rows_R=torch.arange(count, device=device),
            attn=cache,
            max_query_len=count,
            max_kv_len=start,
        )


def trial_ids(vocab: int) -> list[int]:
    """Tokens of the trial, all different where the vocabulary is large enough."""
    return [(7 + 13 * i) % vocab for i in range(sum(CUTS))]


def difference(got_TV: Tensor, want_TV: Tensor) -> float:
    """Root mean square of the difference of logits, over their spread."""
    want, got = want_TV.double(), got_TV.double()
    finite = torch.isfinite(want) & torch.isfinite(got)
    want, got = torch.where(finite, want, 0), torch.where(finite, got, 0)
    return float((got - want).square().mean().sqrt()) / (float(want.std()) or 1.0)


@contextmanager
def refused(architecture: str) -> Iterator[None]:
    """Turn a failure of the trial into an error that names the architecture and the reason."""
    try:
        yield
    except FAILURES as error:
        raise CheckpointError(
            f"{architecture} cannot run by transformers on the paged cache: {error}"
        ) from error
