"""triton: paged attention on NVIDIA GPUs; in Triton's interpreter also on a CPU, for tests.

Everything that depends on lengths is decided on the device (kernels/triton/attention_plan.py), so
a step can be captured into a CUDA graph: ``begin`` and ``run`` look only at shapes and, to choose
tiles, at ``max_query_len``. All memory but the outputs is the backend's and stays where it is.

To capture: run the batch eagerly once at its largest, with the tables that the graph will read (it
compiles the kernels and makes the memory), then call ``begin`` and the model while capturing. A
padding row has ``kv_len`` 0 and a store slot of -1: it reads and writes nothing, its result is
zeros, and the other rows' numbers are those of the batch without it, bit for bit.

Legend: T packed tokens, S sequences, H query heads, K KV heads, C channels of K, V of V.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from radixlm.attention import cudnn
from radixlm.attention.paged import PagedBackend
from radixlm.attention.tree import tree_mask_of_runs
from radixlm.base.errors import ConfigError, InvariantError
from radixlm.base.record import Record
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.kv import FLOAT8, FLOATS
from radixlm.kernels.ops.rope import QkNorm
from radixlm.kernels.triton import kv, rope
from radixlm.kernels.triton.attention_plan import OWN_SPLITS, UNBOUNDED, Cut, Work, make_plan
from radixlm.kernels.triton.attention_run import (
    MAX_DIM,
    Cache,
    Shape,
    StepTensors,
    Tile,
    TreeMask,
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
_INTERPRETED_PROCESSORS = 4  # so that small tests meet splits


class TritonPool(PagedPool):
    """The plain pool; pages are copied in one launch a tensor, all layers at once."""

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        for tensor in (self.k_LPBKC, self.v_LPBKV, *self.scales):
            if tensor is not None and kv.takes(tensor):
                kv.copy_pages(tensor, source, target)


class Workspace:
    """Tensors by name. One keeps its address until more is wanted; then it is kept all the same,
    because a graph may read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}
        self._retired: list[Tensor] = []

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers, with whatever is in them."""
        held = self._held.get(name)
        if held is None or held.numel() < count:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InvariantError(
                    f"attention needs {count} numbers for {name!r} while a graph is captured; "
                    "run the largest batch once before"
                )
            if held is not None:
                self._retired.append(held)
                count = max(count, 2 * held.numel())
            held = self._held[name] = torch.zeros(count, dtype=dtype, device=self._device)
        return held[:count]


class Launch(Record):
    """One launch of the kernel that all layers of a kind share in a step."""

    tile: Tile
    work: Work
    num_units: int
    between: tuple[Tensor, Tensor] | None


class TritonBackend(PagedBackend):
    """The Triton kernels behind the backend protocol. Any page size and kind of cache; products
    are in the dtype of q, but see ``computed_in``."""

    name = NAME
    pool_class = TritonPool

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        if device.type != "cuda" and not interpreting():
            raise ConfigError(
                f"--attention-backend triton: its kernels run on a GPU and the model is on "
                f"{device.type}; torch_native works"
            )
        wide = [g.head_dim for g in groups if not g.latent and max(g.head_dim, g.v_dim) > MAX_DIM]
        if wide:
            raise ConfigError(
                f"--attention-backend triton: heads of {wide[0]} channels are wider than the "
                f"{MAX_DIM} that its kernels take; torch_native works"
            )
        super().__init__(groups, kernels, device)
        self.num_processors, self.is_hopper = _facts(device)
        self.fixed_splits = 0
        self._prepares = kernels.chosen["prepare_qk"] == NAME
        self._stored = (*FLOATS, *(dtype for dtype in FLOAT8 if kind_of(dtype, device) != 3))
        self._memory = Workspace(device)
        self._tree: TreeMask | None = None
        self._has_runs = False  # the tree is of runs that see one another, where layers look ahead
        self._has_cudnn = True  # until it has failed
        self._works: dict[Cut, Work] = {}
        self._launches: dict[tuple[object, ...], list[Launch]] = {}

    def set_batch_invariant(self, is_on: bool) -> None:
        """Cut a sequence by its own length only, so that its numbers are the same in every batch
        of its kind, at some cost where the batch is large. Off at first."""
        self.fixed_splits = OWN_SPLITS if is_on else 0

    def begin(self, batch: ForwardBatch) -> None:
        """Remember the batch; its plans are made on the device when layers first need them."""
        assert batch.kv_len_S.dtype == batch.query_start_S1.dtype == torch.int32
        self._batch = batch
        self._works = {}
        self._launches = {}
        self._tree = tree_mask_of_runs(batch) if batch.bidirectional_spans else None
        self._has_runs = bool(batch.bidirectional_spans)
        batch.fused_attn = cast(FusedAttentionRunner, self) if self._prepares else None

    def set_tree_mask(self, tree: TreeMask | None) -> None:
        """What the step's own tokens see of one another instead of all before them, for
        speculation: after ``begin``."""
        self._tree, self._has_runs = tree, False
        self._launches = {}

    def _tree_of(self, site: AttentionSite) -> TreeMask | None:
        return None if self._has_runs and not site.looks_ahead else self._tree

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend."""
        batch, pool = self._opened(site)
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
        """See step/batch.py; one launch where rows of the cache have no scales of their own."""
        batch, pool = self._opened(site)
        asked = (norm, cos_sin_T2R, interleaved)
        is_one = (norm is not None or cos_sin_T2R is not None) and v_TKV.stride(2) == 1
        if not (is_one and pool.dtype in self._stored and rope.takes(q_THD, k_TKD, norm)):
            rope.prepare_qk(q_THD, k_TKD, *asked)
            return self.run(q_THD, k_TKD, v_TKV, site)
        cache = cache_of(pool, site)
        assert cache.v_LKV is not None
        target = rope.Store(v_TKV, cache.k_LKC, cache.v_LKV, batch.store_GT[site.group])
        rope.prepare(q_THD, k_TKD, *asked, target)
        return self._attend(q_THD, k_TKD, v_TKV, site)

    def _opened(self, site: AttentionSite) -> tuple[ForwardBatch, PagedPool]:
        batch, pool = self._batch, self.pools[site.group]
        assert batch is not None and pool is not None, "begin() and make_pool() come first"
        return batch, pool

    def _attend(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Attend to what is stored; K and V of the step are at hand where it has stored some."""
        batch, pool = self._opened(site)
        if self._is_dense(batch, pool, q_THD, k_TKD, v_TKV, site):
            assert k_TKD is not None and v_TKV is not None
            try:
                return cudnn.attend(q_THD, k_TKD, v_TKV, site, batch.num_sequences)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # what is stored is stored: our kernels do the rest
                self._has_cudnn = False
                log.warning("no attention by cuDNN: %s", str(error).partition("\n")[0])
        dtype = q_THD.dtype
        q_THD = _rows(q_THD).to(computed_in(dtype, pool.dtype))
        out_THV = torch.empty(
            q_THD.shape[0], site.heads, site.v_dim, dtype=q_THD.dtype, device=q_THD.device
        )
        table = batch.page_table_GSP[site.group]
        cache = cache_of(pool, site)
        step = StepTensors(batch.query_start_S1, batch.kv_len_S, table, self._tree_of(site))
        for launch in self._launches_of(site, q_THD.dtype, pool, table.shape[1]):
            shape = Shape(site, launch.tile)
            attend(
                q_THD, out_THV, cache, shape, step, launch.work, launch.num_units,
                batch.max_query_len, launch.between,
            )  # fmt: skip
        return out_THV.flatten(1).to(dtype)

    def _is_dense(
        self,
        batch: ForwardBatch,
        pool: PagedPool,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKV: Tensor | None,
        site: AttentionSite,
    ) -> bool:
        """Whether cuDNN takes the layer: prompts without a prefix, and a plain site."""
        if k_TKD is None or v_TKV is None or self._tree is not None or pool.dtype != q_THD.dtype:
            return False
        if not self._has_cudnn:
            return False
        return cudnn.takes(batch, site) and cudnn.is_available(q_THD, k_TKD, v_TKV)

    def _launches_of(
        self, site: AttentionSite, dtype: torch.dtype, pool: PagedPool, num_pages: int
    ) -> list[Launch]:
        max_len = num_pages * pool.page_size
        key = (
            site.heads, site.kv_heads, site.head_dim, site.v_dim, site.window, site.chunk,
            has_extras(site, False), dtype, pool.dtype, max_len, site.looks_ahead,
        )  # fmt: skip
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = self._plan(site, dtype, pool.dtype, max_len)
        return launches

    def _plan(
        self, site: AttentionSite, dtype: torch.dtype, cache_dtype: torch.dtype, max_len: int
    ) -> list[Launch]:
        batch = self._batch
        assert batch is not None
        has_tree = self._tree_of(site) is not None
        launches = []
        extras = has_extras(site, has_tree)
        tiles = tiles_of(site.head_dim, dtype, extras, self.is_hopper, cache_dtype)
        for tile, queries in phases(site, tiles, batch, has_tree):
            shape = Shape(site, tile)
            cut = cut_of(
                shape, self.num_processors, batch.num_tokens, batch.num_sequences, max_len,
                queries, self.fixed_splits, batch.max_query_len if has_tree else 0,
            )  # fmt: skip
            num_units = cut.max_units(batch.num_tokens, batch.num_sequences)
            work = self._work(cut, num_units, batch)
            between = None
            if cut.least_len < UNBOUNDED:
                num_rows = shape.partial_rows(num_units)
                between = (
                    self._memory.take("parts", num_rows * site.v_dim, torch.float32),
                    self._memory.take("levels", num_rows, torch.float32),
                )
            launches.append(Launch(tile, work, num_units, between))
        return launches

    def _work(self, cut: Cut, num_units: int, batch: ForwardBatch) -> Work:
        """The plan of a cut, once a step."""
        work = self._works.get(cut)
        if work is None:
            numbers = Work.num_numbers(num_units, batch.num_sequences)
            memory = self._memory.take(f"plan {len(self._works)}", numbers, torch.int32)
            work = self._works[cut] = Work.within(memory, num_units, batch.num_sequences)
            make_plan(work, batch.query_start_S1, batch.kv_len_S, cut)
        return work


def phases(
    site: AttentionSite, tiles: Sequence[Tile], batch: ForwardBatch, has_tree: bool
) -> list[tuple[Tile, tuple[int, int]]]:
    """Tiles for the step, each with the fewest and most query tokens of the sequences it takes.

    The smallest tile that holds a sequence's query tokens, for all; where that is the largest one
    and lengths differ, decodes keep the smallest: they would fill a row or two of a large tile.
    """
    every = (1, UNBOUNDED)
    group = site.heads // site.kv_heads
    for tile in tiles[:-1]:
        if batch.max_query_len * group <= tile.rows:
            return [(tile, every)]
    is_even = batch.num_tokens == batch.num_sequences * batch.max_query_len
    if batch.max_query_len == 1:
        return [(tiles[0], every)]
    if is_even or has_tree or len(tiles) == 1:
        return [(tiles[-1], every)]
    return [(tiles[0], (1, 1)), (tiles[-1], (2, UNBOUNDED))]


def cache_of(pool: PagedPool, site: AttentionSite) -> Cache:
    """The site's layer of the pool."""
    k_LKC = pool.k_LPBKC[site.layer].flatten(0, 1)
    v_LKV = None if pool.v_LPBKV is None else pool.v_LPBKV[site.layer].flatten(0, 1)
    scales = tuple(scale[site.layer].flatten(0, 1) for scale in pool.scales)
    return Cache(k_LKC, v_LKV, scales, pool.page_size)


def _rows(x_THC: Tensor) -> Tensor:
    """x with a head's channels side by side."""
    return x_THC if x_THC.stride(2) == 1 else x_THC.contiguous()


def _facts(device: torch.device) -> tuple[int, bool]:
    """Processors of the device, and whether it is an sm_90 or newer."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS, True
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), properties.major >= 9
