"""Double sparsity of the Triton backend (attention/double_sparsity.py). The tokens that a KV head
has chosen are the pages, of one row each, of a sequence of its own, to which the paged kernel
attends. What is sparse is decided on the device wherever a step may be captured.

Legend: T packed tokens, S sequences, R rows that may be sparse, H query heads, K KV heads, C
channels of K, V of V, W heavy channels, N = R * K, L layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from radixlm.attention.double_sparsity import DoubleSparsity, sparse_step
from radixlm.base.errors import InvariantError
from radixlm.base.record import Record, replace
from radixlm.kernels.triton import heavy, kv
from radixlm.kernels.triton.attention_plan import UNBOUNDED, Work, make_plan
from radixlm.kernels.triton.attention_run import (
    Cache,
    Prepared,
    Shape,
    StepTensors,
    attend,
    cut_of,
    tiles_of,
)
from radixlm.kernels.triton.attention_store import store
from radixlm.pools.group import KvGroup
from radixlm.pools.memory import pool_tensor
from radixlm.pools.pool import PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch

_FEW = 1024  # tokens of a step that are all looked at; of longer ones the host tells the rows
_SCORES = 1 << 25  # int32 numbers of memory; more rows take turns

Take = Callable[[str, int, torch.dtype], Tensor]  # memory by name


def labels_nbytes(width: int) -> int:
    """Bytes of a key's labels and their scale."""
    return width + torch.float32.itemsize if width else 0


class TritonPool(PagedPool):
    """PagedPool that copies pages of all layers with one launch for each tensor; with double
    sparsity it has labels [L, P, B, K, W] of keys, and their scales."""

    def __init__(
        self,
        group: KvGroup,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sparsity: DoubleSparsity | None = None,
    ) -> None:
        super().__init__(group, num_pages, page_size, dtype, device)
        self.width = 0 if sparsity is None else sparsity.width(group)
        self._labels: tuple[Tensor, ...] = ()
        if sparsity is not None and self.width:
            shape = (*self.k_LPBKC.shape[:4], self.width)
            self._labels = (
                pool_tensor(shape, torch.int8, device),
                pool_tensor(shape[:4], torch.float32, device),
            )
            channels = [sparsity.channels[layer] for layer in group.layers]
            self.channels_LKW = torch.stack(channels).to(device)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (*super().tensors, *self._labels)

    @property
    def nbytes_per_page(self) -> int:
        rows = len(self.group.layers) * self.group.kv_heads * self.page_size
        return super().nbytes_per_page + rows * labels_nbytes(self.width)

    def store(self, layer: int, slots_T: Tensor, k_TKC: Tensor, v_TKV: Tensor | None) -> None:
        super().store(layer, slots_T, k_TKC, v_TKV)
        self.label(layer, slots_T)

    def label(self, layer: int, slots_T: Tensor) -> None:
        """Make the labels of what has been stored at slots; negative ones are left out."""
        if not self.width:
            return
        k_TKC = self.load(layer, slots_T.clamp(min=0), torch.float32)[0]
        index = self.channels_LKW[layer].long().expand(len(k_TKC), -1, -1)
        labels, scales = self.labels_of(layer)
        store(k_TKC.gather(2, index), None, labels, None, (scales,), slots_T)

    def labels_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """int8 [slots, K, W] and float32 [slots, K]."""
        labels, scales = (x[layer].flatten(0, 1) for x in self._labels)
        return labels, scales

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        for tensor in self.tensors:
            if not tensor.numel():
                continue
            if not kv.takes(tensor):
                raise InvariantError(
                    f"pages of a {tensor.device} tensor cannot be copied by Triton"
                )
            kv.copy_pages(tensor, source, target)


class SparseRows(Record, eq=False):
    """The rows of a step that may be sparse: int64 tokens, int32 sequences, and how many tokens a
    row sees, 0 where it is dense. ``dense_len_S``: of sequences for dense attention, 0 where all
    of their rows are sparse."""

    token_R: Tensor
    sequence_R: Tensor
    seen_R: Tensor
    dense_len_S: Tensor


def sparse_rows(batch: ForwardBatch, sparsity: DoubleSparsity) -> SparseRows | None:
    """None where it is known on the host that the step has none."""
    first, length_S = sparsity.first_position, batch.kv_len_S
    if batch.max_kv_len <= first or (batch.prompt_len_S is None and not batch.is_decode):
        return None
    first_S = torch.full_like(length_S, first)
    if not batch.is_decode and batch.prompt_len_S is not None:
        first_S = torch.maximum(first_S, batch.prompt_len_S.int())
    before_S = length_S - batch.query_start_S1.diff()
    dense_len_S = torch.where(before_S >= first_S, 0, length_S)
    if batch.num_tokens > _FEW and not batch.is_decode:
        step = sparse_step(batch, sparsity)
        if step is None:
            return None
        token_R, sequence_R, seen_R = step.rows.to(batch.device).T.contiguous()
        return SparseRows(token_R.long(), sequence_R, seen_R, dense_len_S)
    token_R = torch.arange(batch.num_tokens, device=batch.device)
    sequence_R = torch.bucketize(token_R, batch.query_start_S1[1:].long(), right=True)
    sequence_R = sequence_R.clamp(max=batch.num_sequences - 1)
    position_R = torch.minimum(batch.positions_T, length_S[sequence_R] - 1)  # pads have none
    seen_R = torch.where(position_R >= first_S[sequence_R], position_R + 1, 0).int()
    return SparseRows(token_R, sequence_R.int(), seen_R, dense_len_S)


class SparseAttention:
    """The sparse rows of one step, for all of its layers."""

    def __init__(
        self, rows: SparseRows, tokens: int, take: Take, num_sms: int, is_hopper: bool
    ) -> None:
        self.rows, self._tokens, self._take = rows, tokens, take
        self._num_sms, self._is_hopper = num_sms, is_hopper
        self._lengths: dict[int, tuple[Tensor, Tensor]] = {}  # by heads
        self._works: dict[tuple[object, ...], Work] = {}

    def attend(
        self,
        q_THC: Tensor,
        out_THV: Tensor,
        pool: TritonPool,
        cache: Cache,
        site: AttentionSite,
        page_table_SP: Tensor,
    ) -> None:
        """Replace the sparse rows of ``out``."""
        rows, heads = self.rows, site.kv_heads
        q_RHC = q_THC[rows.token_R]
        num, max_len = len(q_RHC) * heads, page_table_SP.shape[1] * cache.page_size
        chosen = self._take("chosen", num * self._tokens, torch.int32).view(num, self._tokens)
        keys = self._take("keys", min(num * max_len, max(_SCORES, heads * max_len)), torch.int32)
        heavy.choose(
            q_RHC, pool.channels_LKW[site.layer], pool.labels_of(site.layer), page_table_SP,
            (rows.sequence_R, rows.seen_R), cache.page_size, keys, chosen,
        )  # fmt: skip
        out_RHV = self._over_chosen(q_RHC, cache, site, chosen).view(*q_RHC.shape[:2], -1)
        is_sparse = (rows.seen_R > 0)[:, None, None]
        out_THV[rows.token_R] = torch.where(
            is_sparse, out_RHV.to(out_THV.dtype), out_THV[rows.token_R]
        )

    def _over_chosen(
        self, q_RHC: Tensor, cache: Cache, site: AttentionSite, chosen_NT: Tensor
    ) -> Tensor:
        """The query heads of each KV head of each row over its tokens: [N, H / K, V]."""
        num, heads, group = len(chosen_NT), site.kv_heads, site.heads // site.kv_heads
        one = replace(site, heads=group, kv_heads=1)
        if heads not in self._lengths:
            starts = torch.arange(num + 1, dtype=torch.int32, device=q_RHC.device)
            length_R = self.rows.seen_R.clamp(max=self._tokens)
            self._lengths[heads] = starts, length_R.repeat_interleave(heads)
        starts, lengths = self._lengths[heads]
        dtype, held = q_RHC.dtype, cache.k_LKC.dtype
        tile = tiles_of(site.head_dim, dtype, bool(site.softcap), self._is_hopper, held)[0]
        shape = Shape(one, tile)
        cut = cut_of(shape, self._num_sms, num, num, self._tokens)
        num_units, key = cut.max_units(num, num), (cut, num)
        if key not in self._works:
            name, size = f"sparse plan {len(self._works)}", Work.num_numbers(num_units, num)
            work = Work.within(self._take(name, size, torch.int32), num_units, num)
            make_plan(work, starts, lengths, cut)
            self._works[key] = work
        partials = None
        if cut.min_split_len < UNBOUNDED:
            count = shape.partial_rows(num_units)
            partials = (
                self._take("parts", count * site.v_dim, torch.float32),
                self._take("levels", count, torch.float32),
            )
        out = torch.empty(num, group, site.v_dim, dtype=dtype, device=q_RHC.device)
        step, by_row = StepTensors(starts, lengths, chosen_NT), _by_row(cache)
        prepared = Prepared.of(shape, by_row, False, self._works[key], num_units, partials)
        attend(q_RHC.reshape(num, group, -1), out, by_row, one, step, prepared, 1)
        return out


def _by_row(cache: Cache) -> Cache:
    """The cache as pages of one row of one head: [slots * K, 1, C]."""

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[:, None]

    assert cache.v_LKV is not None, "latents are dense"
    return Cache(rows(cache.k_LKC), rows(cache.v_LKV), tuple(map(rows, cache.scales)), 1)
