"""cpu: paged attention by the C++ kernels. K is stored transposed in tiles of 16 tokens, so pages
hold a multiple of 16. Every result is bit for bit the same in any batch and for any chunks of a
prompt.

Legend: T packed tokens, H query heads, K KV heads, C channels of K, V of V, L layers, P pages, B
tokens a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixlm.attention.base import AttentionBackend
from radixlm.attention.double_sparsity import DoubleSparsity, SparseStep, is_plain, sparse_step
from radixlm.attention.reference import Span, attend, make_block, sequence_spans, split_spans
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import TILE, CacheShape
from radixlm.kernels.cpu.chosen import ChosenAttention, can_read
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.heavy import HeavyCache, heavy_nbytes
from radixlm.kernels.cpu.rope import NO_NORM, NO_ROPE, kv_store, latent_store
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.kv import indexable_view
from radixlm.pools.group import KvGroup
from radixlm.pools.memory import pool_tensor
from radixlm.pools.pool import PagedPool, page_nbytes
from radixlm.step.batch import AttentionSite, ForwardBatch

_HUGE_PAGE = 2 << 20


class CpuPool:
    """K [L, P, K, B / 16, C, 16] and V [L, P, K, B, V]; a latent group has only rows of C numbers.
    See kernels/cpu/cache.py for caches with scales."""

    def __init__(
        self,
        group: KvGroup,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        sparsity: DoubleSparsity | None = None,
    ) -> None:
        self.group, self.num_pages, self.page_size = group, num_pages, page_size
        self.dtype = dtype
        self.shape = CacheShape(
            group.kv_heads, group.head_dim, group.v_dim, page_size, dtype, group.latent
        )
        shapes = [(self.shape.k_shape(num_pages), dtype), (self.shape.v_shape(num_pages), dtype)]
        self.width = sparsity.width(group) if sparsity is not None else 0
        if sparsity is not None and self.width:
            channels = [sparsity.channels[layer] for layer in group.layers]
            heavy = HeavyCache(self.shape, channels, sparsity.tokens)
            rows, labels = heavy.shapes(num_pages)
            shapes += [(rows, dtype), (labels, torch.int8)]
        host, num_layers = torch.device("cpu"), len(group.layers)
        tensors = [pool_tensor((num_layers, *s), of, host, is_zero=False) for s, of in shapes]
        self.k, self.v, *more = self.tensors = tuple(tensors)
        self._heavy = heavy.bind(*more) if more else []
        # Huge pages spare the TLB, as layers of a page are far apart. The first tokens' are small:
        # a short prompt would take a huge page of each layer, 5 ms each on some virtual machines.
        for part in (layer for tensor in tensors for layer in tensor):
            if part.nbytes > _HUGE_PAGE:
                native().advise_huge(part.data_ptr() + _HUGE_PAGE, part.nbytes - _HUGE_PAGE)

    @property
    def nbytes_per_page(self) -> int:
        return cpu_page_nbytes(self.group, self.page_size, self.dtype, self.width)

    def heavy_at(self, site: AttentionSite) -> int:
        """Address of what double sparsity keeps of a layer; 0 where that stays dense."""
        if not self._heavy or not is_plain(site):
            return 0
        return int(self._heavy[site.layer].address)

    def store(self, layer: int, slots_T: Tensor, k_TKC: Tensor, v_TKV: Tensor | None) -> None:
        """Write rows at slots (page * page_size + offset)."""
        caches, slots = (self.k[layer], self.v[layer]), slots_T.int()
        if v_TKV is None:
            latent_store(_dense(k_TKC), self.shape, caches, slots)
        else:
            heavy = self._heavy[layer].address if self._heavy else 0
            kv_store(_dense(k_TKC), _dense(v_TKV), caches, slots, heavy)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        to, of = torch.as_tensor(target), torch.as_tensor(source)
        for tensor in self.tensors:
            if tensor.numel():
                pages = indexable_view(tensor)
                pages[:, to] = pages[:, of]

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        index = torch.as_tensor(pages)
        stored = (self._pick(self.k, layer, index), self._pick(self.v, layer, index))
        k, v = self.shape.tokens(*stored)
        return k, None if self.group.latent else v

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        index = torch.as_tensor(pages)
        if self._heavy:  # rows and labels are made of K by the kernel that stores it
            slots = index[:, None] * self.page_size + torch.arange(self.page_size)
            self.store(layer, slots.flatten(), k, v)
            return
        for tensor, part in zip((self.k, self.v), self.shape.pages(k, v), strict=True):
            if tensor.numel():
                indexable_view(tensor[layer])[index] = indexable_view(part)

    def chosen_reader(
        self, site: AttentionSite, width: int, runs: tuple[int, int]
    ) -> ChosenAttention | None:
        """None where tokens are chosen that are apart in tiles of K."""
        if not can_read(self.shape, site.heads, runs, site.sinks is not None):
            return None
        caches = self.k[site.layer], self.v[site.layer]
        options = site.scale, site.softcap, site.sinks
        return ChosenAttention(self.shape, caches, site.heads, width, *options)

    def _pick(self, tensor: Tensor, layer: int, index: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        return indexable_view(tensor[layer])[index].view(self.dtype)


def cpu_page_nbytes(group: KvGroup, page_size: int, dtype: torch.dtype, width: int) -> int:
    """Bytes of one page over the group's layers, labels of ``width`` channels included."""
    more = heavy_nbytes(width, group.head_dim, dtype) if width else 0
    return page_nbytes(group, page_size, dtype) + (
        len(group.layers) * group.kv_heads * page_size * more
    )


@dataclass(slots=True)
class _Layer:
    """One attention layer, ready to run."""

    attention: PagedAttention
    k_cache: Tensor
    v_cache: Tensor
    fields: tuple[int, ...]  # of the caches, for the store kernel
    shape: tuple[int, int]  # of a query: heads, channels
    site: AttentionSite
    heavy: int


class CpuBackend(AttentionBackend):
    """The C++ kernels; caches hold floats of 32, 16 and 8 bits, int8 and int4."""

    name = "cpu"
    page_multiple = TILE
    takes_sparsity = True

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        self.pools: list[CpuPool | PagedPool | None] = [None] * len(groups)
        self._layers: list[dict[int, _Layer]] = [{} for _ in groups]
        self._readers: dict[int, _Layer] = {}  # of sites that store nothing, by id(site)
        self.slots: list[Tensor] = []  # int32 slots of the step's tokens, for each group
        self.tables: list[Tensor] = []
        self._native_store = native().store
        self.sparse: SparseStep | None = None

    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers."""
        width = self.sparsity.width(group) if self.sparsity is not None else 0
        return cpu_page_nbytes(group, page_size, dtype, width)

    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> CpuPool | PagedPool:
        """Allocate the group's pool; the system commits memory as pages are first written."""
        if group.compress_ratio:  # the layers read it themselves
            plain = PagedPool(group, num_pages, page_size, dtype, torch.device("cpu"))
            self.pools[group.index] = plain
            return plain
        pool = CpuPool(group, num_pages, page_size, dtype, self.sparsity)
        self.pools[group.index] = pool
        self._layers[group.index] = {}
        self._readers = {}
        return pool

    def begin(self, batch: ForwardBatch) -> None:
        """Convert the step's tables to int32 for the kernels."""
        self.slots = [slots.int().contiguous() for slots in batch.store_GT]
        self.tables = [table.int().contiguous() for table in batch.page_table_GSP]
        self.starts = batch.query_start_S1.int().contiguous()
        self.kv_len = batch.kv_len_S.int().contiguous()
        self._slots_at = [slots.data_ptr() for slots in self.slots]
        self._tables_at = [(table.data_ptr(), table.stride(0)) for table in self.tables]
        lengths = self.starts.data_ptr(), self.kv_len.data_ptr(), int(self.kv_len.shape[0])
        self._lengths_at = lengths
        self.sparse = None if self.sparsity is None else sparse_step(batch, self.sparsity)
        self._mutual: list[Span] = []
        if batch.bidirectional_spans:
            self._mutual = [s for s in sequence_spans(batch) if s.num_ahead is not None]

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend."""
        group = site.group
        known = self._layers[group].get(site.layer) if site.stores else self._readers.get(id(site))
        layer = known if known is not None and known.site is site else self._make_layer(site)
        if k_TKD is not None:
            self._store(k_TKD, v_TKV, layer, group)
        q = _dense(q_THD)
        out = self._attend(q, layer, group)
        if self._mutual and site.looks_ahead:
            self._attend_bidirectional(q, out, site)
        return out.flatten(1)

    def _store(self, k_TKD: Tensor, v_TKV: Tensor | None, layer: _Layer, group: int) -> None:
        """Write rows to the step's slots; V of a latent cache is part of K."""
        k, v = _dense(k_TKD), None if v_TKV is None else _dense(v_TKV)
        tokens, kv_heads, dim = k.shape
        at, v_dim = (0, 0), layer.attention.cache.v_dim
        if v is not None:
            at, v_dim = (v.data_ptr(), v.stride(0)), v.shape[2]
        self._native_store(
            (0, 0, k.data_ptr(), k.stride(0), *at), (tokens, 0, kv_heads, dim, v_dim, 0),
            NO_NORM, NO_ROPE, self._slots_at[group], layer.fields, 0,
        )  # fmt: skip

    def _attend(self, q: Tensor, layer: _Layer, group: int) -> Tensor:
        """``PagedAttention.run`` without its checks of caches and tables, which were made
        before."""
        if q.shape[1:] != layer.shape:
            raise ValueError(f"q: {tuple(q.shape)} for heads of {layer.shape}")
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads, layer.attention.cache.v_dim)
        places = q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), *layer.fields[:2]
        heavy, sparse = layer.heavy, self.sparse if layer.heavy else None
        layer.attention.handle.run(
            *places, *self._tables_at[group], *self._lengths_at, 0, 0, 0,
            0 if sparse is None else sparse.is_sparse.data_ptr(),
        )  # fmt: skip
        if sparse is not None:
            layer.attention.handle.run_sparse(
                *places, heavy, *self._tables_at[group], sparse.rows.data_ptr(), len(sparse.rows),
                sparse.max_len, 0,
            )  # fmt: skip
        return out

    def _attend_bidirectional(self, q_THD: Tensor, out_THV: Tensor, site: AttentionSite) -> None:
        """Recompute tokens of bidirectional spans in plain torch: the kernels are causal."""
        pool = self.pools[site.group]
        assert pool is not None
        table_SP = self.tables[site.group].long()
        for spans in split_spans(self._mutual, site):
            block = make_block(spans, table_SP, pool.page_size, site.window, site.chunk)
            pages, at = torch.unique(block.tokens_SN // pool.page_size, return_inverse=True)
            k, v = pool.read(site.layer, pages.tolist())
            rows = at * pool.page_size + block.tokens_SN % pool.page_size
            k = k.float()[rows]
            v = v.float()[rows] if v is not None else k[..., : site.v_dim]
            out_THV[block.rows_SQ] = attend(q_THD[block.rows_SQ], k, v, block, site)

    def _make_layer(self, site: AttentionSite) -> _Layer:
        layer = self._make(site)
        if not site.stores:  # it reads another layer's cache, with its own heads and window
            self._readers[id(site)] = layer
            return layer
        if site.layer in self._layers[site.group]:  # new weights come with new sites
            self._readers = {}
        self._layers[site.group][site.layer] = layer
        return layer

    def _make(self, site: AttentionSite) -> _Layer:
        pool = self.pools[site.group]
        assert isinstance(pool, CpuPool), "make_pool() comes first"
        attention = PagedAttention(
            site.heads,
            pool.shape,
            site.scale,
            window=site.window,
            chunk=site.chunk,
            softcap=site.softcap,
            sinks_H=site.sinks,
            slopes_H=site.slopes,
        )
        k_cache, v_cache = pool.k[site.layer], pool.v[site.layer]
        heavy = pool.heavy_at(site)
        fields = (*pool.shape.fields(k_cache, v_cache), heavy)
        shape = (site.heads, pool.shape.k_dim)
        return _Layer(attention, k_cache, v_cache, fields, shape, site, heavy)


def _dense(x_THC: Tensor) -> Tensor:
    """Float32 with each token's heads contiguous, as the kernels need it."""
    if x_THC.dtype == torch.float32 and x_THC.stride(2) == 1:
        if x_THC.stride(1) == x_THC.shape[2] or x_THC.shape[1] == 1:
            return x_THC
    return x_THC.float().contiguous()
