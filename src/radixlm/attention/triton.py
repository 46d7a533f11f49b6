"""triton: paged attention on NVIDIA GPUs; in Triton's interpreter also on a CPU, for tests.

Everything that depends on lengths is decided on the device (kernels/triton/attention_plan.py), so
a step can be captured into a CUDA graph: ``begin`` and ``run`` look only at shapes and, to choose
tiles, at ``max_query_len``. The backend owns all memory but the outputs, at fixed addresses.

To capture: run the largest batch eagerly once with the tables that the graph will read (this
compiles the kernels and allocates the memory), then call ``begin`` and the model while capturing. A
padding row has ``kv_len`` 0 and a store slot of -1: it reads and writes nothing, its result is
zeros, and the other rows are bit for bit those of the batch without it.

Legend: T packed tokens, S sequences, H query heads, K KV heads, C channels of K, V of V.
"""

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from radixlm.attention import cudnn
from radixlm.attention.double_sparsity import is_plain
from radixlm.attention.paged import PagedBackend
from radixlm.attention.triton_sparse import (
    SparseAttention,
    TritonPool,
    labels_nbytes,
    sparse_rows,
)
from radixlm.base.errors import ConfigError, InvariantError
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.kv import FLOAT8, FLOATS
from radixlm.kernels.ops.rope import QkNorm
from radixlm.kernels.triton import rope
from radixlm.kernels.triton.attention_plan import UNBOUNDED, Cut, Work, make_plan
from radixlm.kernels.triton.attention_run import (
    MAX_DIM,
    Cache,
    Prepared,
    Shape,
    StepTensors,
    Tile,
    TreeAttentionMask,
    attend,
    computed_in,
    cut_of,
    has_extras,
    tiles_of,
)
from radixlm.kernels.triton.attention_store import kind_of, store
from radixlm.kernels.triton.mode import interpreting
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch, FusedAttentionRunner

log = logging.getLogger(__name__)

NAME = "triton"
_INTERPRETED_SMS = 4  # so few that small tests have splits


class Workspace:
    """Tensors by name. A tensor keeps its address until more is needed; a replaced one is not
    freed, because a graph may read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._retired: list[Tensor] = []

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` uninitialized numbers."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < count:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InvariantError(
                    f"attention needs {count} numbers for {name!r} while a graph is captured; "
                    "run the largest batch once before"
                )
            if tensor is not None:
                self._retired.append(tensor)
                count = max(count, 2 * tensor.numel())
            tensor = self._tensors[name] = torch.zeros(count, dtype=dtype, device=self._device)
        return tensor[:count]


class TritonBackend(PagedBackend):
    """The Triton kernels behind the backend protocol, for any page size and cache dtype. Products
    are in the dtype of q, but see ``computed_in``."""

    name = NAME
    takes_sparsity = True

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        if device.type != "cuda" and not interpreting():
            raise ConfigError(
                f"--attention-backend triton: its kernels run on a GPU and the model is on "
                f"{device.type}; torch_native works"
            )
        too_wide = [
            g.head_dim for g in groups if not g.latent and max(g.head_dim, g.v_dim) > MAX_DIM
        ]
        if too_wide:
            raise ConfigError(
                f"--attention-backend triton: heads of {too_wide[0]} channels are wider than the "
                f"{MAX_DIM} that its kernels take; torch_native works"
            )
        super().__init__(groups, kernels, device)
        self.num_sms, self.is_hopper = _device_properties(device)
        self._is_invariant = False
        self._prepares_qk = kernels.chosen["prepare_qk"] == NAME
        # cache dtypes that the fused prepare kernel can store
        self._storable = (*FLOATS, *(dtype for dtype in FLOAT8 if kind_of(dtype, device) != 3))
        self._memory = Workspace(device)
        self._tree: TreeAttentionMask | None = None
        self._sparse: SparseAttention | None = None
        self._has_cudnn = True  # until it fails
        self._works: dict[tuple[Cut, bool], Work] = {}
        self._prepared: dict[tuple[object, ...], list[Prepared]] = {}

    def keep_batch_invariant(self) -> None:
        """From now on compute every token by one tile that reads all of its keys in order, so that
        its bits depend neither on the batch nor on how a prompt is cut. Long contexts of few
        sequences decode slower: one program reads a whole context."""
        self._is_invariant, self._has_cudnn, self.num_sms = True, False, 0

    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers."""
        width = 0 if self.sparsity is None else self.sparsity.width(group)
        rows = len(group.layers) * group.kv_heads * group.rows_per_page(page_size)
        return super().page_nbytes(group, page_size, dtype) + rows * labels_nbytes(width)

    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> TritonPool:
        """Allocate and keep the group's pool."""
        pool = TritonPool(group, num_pages, page_size, dtype, self.device, self.sparsity)
        self.pools[group.index] = pool
        return pool

    def begin(self, batch: ForwardBatch) -> None:
        """Keep the batch; its plans are made on the device when a layer first needs them."""
        assert batch.kv_len_S.dtype == batch.query_start_S1.dtype == torch.int32
        self._batch = batch
        self._works = {}
        self._prepared = {}
        rows = None if self.sparsity is None else sparse_rows(batch, self.sparsity)
        self._sparse = None
        if rows is not None and self.sparsity is not None:
            tokens, take = self.sparsity.tokens, self._memory.take
            self._sparse = SparseAttention(rows, tokens, take, self.num_sms, self.is_hopper)
        self._tree = bidirectional_mask(batch) if batch.bidirectional_spans else None
        batch.fused_attn = cast(FusedAttentionRunner, self) if self._prepares_qk else None

    def _tree_of(self, site: AttentionSite) -> TreeAttentionMask | None:
        return self._tree if site.looks_ahead else None

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend."""
        batch, pool = self._batch_and_pool(site)
        if k_TKD is not None:
            cache = cache_of(pool, site)
            store(
                _rows(k_TKD), None if v_TKV is None else _rows(v_TKV), cache.k_LKC, cache.v_LKV,
                cache.scales, batch.store_GT[site.group],
            )  # fmt: skip
        return self._attend(q_THD, k_TKD, v_TKV, site)

    def prepare_and_run(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        site: AttentionSite,
        norm: QkNorm | None,
        cos_sin_T2R: Tensor | None,
        interleaved: bool,
    ) -> Tensor:
        """See step/batch.py; one launch unless rows of the cache have scales of their own."""
        batch, pool = self._batch_and_pool(site)
        how = (norm, cos_sin_T2R, interleaved)
        is_fusable = (norm is not None or cos_sin_T2R is not None) and v_TKV.stride(2) == 1
        if not (is_fusable and pool.dtype in self._storable and rope.takes(q_THD, k_TKD, norm)):
            rope.prepare_qk(q_THD, k_TKD, *how)
            return self.run(q_THD, k_TKD, v_TKV, site)
        cache = cache_of(pool, site)
        assert cache.v_LKV is not None
        target = rope.Store(v_TKV, cache.k_LKC, cache.v_LKV, batch.store_GT[site.group])
        rope.prepare(q_THD, k_TKD, *how, target)
        return self._attend(q_THD, k_TKD, v_TKV, site)

    def _batch_and_pool(self, site: AttentionSite) -> tuple[ForwardBatch, PagedPool]:
        batch, pool = self._batch, self.pools[site.group]
        assert batch is not None and pool is not None, "begin() and make_pool() come first"
        return batch, pool

    def _attend(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Attend over the cache. ``k_TKD`` and ``v_TKV`` are the step's own K and V if the layer
        stored them."""
        batch, pool = self._batch_and_pool(site)
        if k_TKD is not None and isinstance(pool, TritonPool):
            pool.label(site.layer, batch.store_GT[site.group])
        out = self._attend_dense(q_THD, k_TKD, v_TKV, site)
        sparse = self._sparse_of(site)
        if sparse is not None:
            assert isinstance(pool, TritonPool)
            q_THD = _rows(q_THD).to(computed_in(q_THD.dtype, pool.dtype))
            table = batch.page_table_GSP[site.group]
            sparse.attend(q_THD, out.view(len(out), site.heads, -1), pool, cache_of(pool, site),
                          site, table)  # fmt: skip
        return out

    def _sparse_of(self, site: AttentionSite) -> SparseAttention | None:
        """The step's sparse rows, where the layer has any. ConfigError for a layer with sinks, in
        any step: the first one is run at the start."""
        pool = self.pools[site.group]
        if not (isinstance(pool, TritonPool) and pool.width and is_plain(site)):
            return None
        if site.sinks is not None:
            raise ConfigError(
                "--enable-double-sparsity: --attention-backend triton has no kernel for layers "
                "with sinks; torch_native has"
            )
        return self._sparse

    def _kv_len_S(self, batch: ForwardBatch, site: AttentionSite) -> Tensor:
        """For dense attention."""
        sparse = self._sparse_of(site)
        return batch.kv_len_S if sparse is None else sparse.rows.dense_len_S

    def _attend_dense(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        batch, pool = self._batch_and_pool(site)
        if self._uses_cudnn(batch, pool, q_THD, k_TKD, v_TKV, site):
            assert k_TKD is not None and v_TKV is not None
            try:
                return cudnn.attend(q_THD, k_TKD, v_TKV, site, batch.num_sequences)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # K and V are stored: the Triton kernels can go on
                self._has_cudnn = False
                log.warning(
                    "cuDNN attention failed, the Triton kernels run instead: %s",
                    str(error).partition("\n")[0],
                )
        dtype = q_THD.dtype
        q_THD = _rows(q_THD)
        if computed_in(dtype, pool.dtype) != dtype:
            q_THD = q_THD.to(computed_in(dtype, pool.dtype))
        out_THV = torch.empty(
            q_THD.shape[0], site.heads, site.v_dim, dtype=q_THD.dtype, device=q_THD.device
        )
        table = batch.page_table_GSP[site.group]
        cache = cache_of(pool, site)
        lengths = self._kv_len_S(batch, site)
        step = StepTensors(batch.query_start_S1, lengths, table, self._tree_of(site))
        for prepared in self._prepared_for(site, q_THD.dtype, cache, table.shape[1]):
            attend(q_THD, out_THV, cache, site, step, prepared, batch.max_query_len)
        out = out_THV.flatten(1)
        return out if out.dtype == dtype else out.to(dtype)

    def _uses_cudnn(
        self,
        batch: ForwardBatch,
        pool: PagedPool,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKV: Tensor | None,
        site: AttentionSite,
    ) -> bool:
        """Whether cuDNN can run the layer: prompts without a prefix, plain causal attention."""
        if k_TKD is None or v_TKV is None or self._tree is not None or pool.dtype != q_THD.dtype:
            return False
        if not self._has_cudnn:
            return False
        return cudnn.takes(batch, site) and cudnn.is_available(q_THD, k_TKD, v_TKV)

    def _prepared_for(
        self, site: AttentionSite, dtype: torch.dtype, cache: Cache, num_pages: int
    ) -> list[Prepared]:
        max_len = num_pages * cache.page_size
        key = (
            site.group, site.heads, site.kv_heads, site.head_dim, site.v_dim, site.window,
            site.chunk, has_extras(site, False), dtype, max_len, site.looks_ahead,
            self._sparse_of(site) is None,
        )  # fmt: skip
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._plan(site, dtype, cache, max_len)
        return prepared

    def _plan(
        self, site: AttentionSite, dtype: torch.dtype, cache: Cache, max_len: int
    ) -> list[Prepared]:
        batch = self._batch
        assert batch is not None
        has_tree = self._tree_of(site) is not None
        prepared = []
        extras = has_extras(site, has_tree)
        tiles = tiles_of(site.head_dim, dtype, extras, self.is_hopper, cache.k_LKC.dtype)
        whole = [(tiles[-1], (1, UNBOUNDED))]
        cuts = whole if self._is_invariant else phases(site, tiles, batch, has_tree)
        for tile, queries in cuts:
            shape = Shape(site, tile)
            cut = cut_of(
                shape, self.num_sms, batch.num_tokens, batch.num_sequences, max_len,
                queries, batch.max_query_len if has_tree else 0,
            )  # fmt: skip
            num_units = cut.max_units(batch.num_tokens, batch.num_sequences)
            work = self._work(cut, num_units, batch, site)
            partials = None
            if cut.min_split_len < UNBOUNDED:
                num_rows = shape.partial_rows(num_units)
                partials = (
                    self._memory.take("parts", num_rows * site.v_dim, torch.float32),
                    self._memory.take("levels", num_rows, torch.float32),
                )
            prepared.append(Prepared.of(shape, cache, has_tree, work, num_units, partials))
        return prepared

    def _work(self, cut: Cut, num_units: int, batch: ForwardBatch, site: AttentionSite) -> Work:
        """The plan of a cut, made once in a step."""
        key = cut, self._sparse_of(site) is None
        work = self._works.get(key)
        if work is None:
            numbers = Work.num_numbers(num_units, batch.num_sequences)
            memory = self._memory.take(f"plan {len(self._works)}", numbers, torch.int32)
            work = self._works[key] = Work.within(memory, num_units, batch.num_sequences)
            make_plan(work, batch.query_start_S1, self._kv_len_S(batch, site), cut)
        return work


def phases(
    site: AttentionSite, tiles: Sequence[Tile], batch: ForwardBatch, has_tree: bool
) -> list[tuple[Tile, tuple[int, int]]]:
    """Tiles for the step, each with the least and largest number of query tokens of its sequences.

    All sequences use the smallest tile that holds the longest query. If that is the largest tile
    and lengths differ, decodes keep the smallest: they fill only a row or two of a large one.
    """
    all_lengths = (1, UNBOUNDED)
    group = site.heads // site.kv_heads
    for tile in tiles[:-1]:
        if batch.max_query_len * group <= tile.rows:
            return [(tile, all_lengths)]
    is_even = batch.num_tokens == batch.num_sequences * batch.max_query_len
    if batch.max_query_len == 1:
        return [(tiles[0], all_lengths)]
    if is_even or has_tree or len(tiles) == 1:
        return [(tiles[-1], all_lengths)]
    return [(tiles[0], (1, 1)), (tiles[-1], (2, UNBOUNDED))]


def bidirectional_mask(batch: ForwardBatch) -> TreeAttentionMask:
    """The mask of ``batch.bidirectional_spans``: a token sees all tokens before it and, within such
    a span (an image), all tokens of the span. W: words of 32 bits.

    Windows go by the mask's positions: where spans ignore windows, all tokens of a span have the
    position of its first, which starts the sequence."""
    num_tokens, device = batch.num_tokens, batch.device
    end_T = torch.arange(1, num_tokens + 1, device=device)
    positions_T = batch.positions_T.clone()
    for first, count in batch.bidirectional_spans:
        end_T[first : first + count] = first + count
        if batch.spans_ignore_window:
            positions_T[first : first + count] = positions_T[first].clone()
    start_S1 = batch.query_start_S1.long()
    start_T = torch.repeat_interleave(start_S1[:-1], start_S1.diff(), output_size=num_tokens)
    num_words = -(-batch.max_query_len // 32)
    word_W = torch.arange(num_words, device=device) * 32
    num_bits_TW = ((end_T - start_T)[:, None] - word_W).clamp(0, 32)
    return TreeAttentionMask(((1 << num_bits_TW) - 1).to(torch.int32), positions_T)


def cache_of(pool: PagedPool, site: AttentionSite) -> Cache:
    """The site's layer of the pool."""
    return Cache(*pool.rows[site.layer], pool.page_size)


def _rows(x_THC: Tensor) -> Tensor:
    """x with the channels of a head contiguous."""
    return x_THC if x_THC.stride(2) == 1 else x_THC.contiguous()


def _device_properties(device: torch.device) -> tuple[int, bool]:
    """Streaming multiprocessors of the device, and whether it is sm_90 or newer."""
    if device.type != "cuda":
        return _INTERPRETED_SMS, True
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), properties.major >= 9
