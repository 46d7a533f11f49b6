"""Layers as operations of a C++ step program (csrc/runtime/program.h).

A layer with ``emit`` appends its operations to a ``ProgramBuilder``, in the order in which ``run``
computes. What the C++ kernels cannot do raises ``Unsupported``; the model then runs layer by layer.
Every ``emit`` names the fields of its record that it handles (``handles``): all others must have
their defaults. So a field that is added to a record is never ignored.

Buffers hold a row a token, by name and width. An operation on ``selected`` rows works on those
alone whose logits are wanted: the last block gathers them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from radixlm.arch.spec import LogNScaling, Norm, Rope
from radixlm.base.record import Record, replace
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.groups import Group
from radixlm.kernels.cpu.cache import CacheShape
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.cpu.linear import PackedLinear
from radixlm.kernels.cpu.rope import NORM_CODE
from radixlm.kernels.ops.linear import GatherLinear
from radixlm.kernels.ops.rope import QkNorm
from radixlm.layers.linear import Linear
from radixlm.layers.logn_scaling import logn_scales
from radixlm.layers.placement import WHOLE, Bounds, CutLinear, Placement
from radixlm.pools.state import StatePool
from radixlm.step.batch import AttentionSite

NOWHERE = -1  # no buffer
MAX_POSITIONS = 1 << 20  # rows of a table of queries' factors


class Unsupported(Exception):
    """The C++ kernels cannot do what a model asks for."""


def handles(spec: Record, *fields: str) -> None:
    """Raise ``Unsupported`` where a field that is not among ``fields`` differs from its default."""
    kind = type(spec)
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    for name in kind.__struct_fields__:
        if name not in fields and (name not in defaults or getattr(spec, name) != defaults[name]):
            raise Unsupported(f"{kind.__name__}.{name}={getattr(spec, name)!r}")


def handles_norm(spec: Norm | None) -> None:
    """As ``handles``, of a norm with weights."""
    if spec is None:
        return
    handles(spec, "eps", "kind", "affine", "bias", "offset")
    if spec.kind == "none":
        raise Unsupported("a norm of kind none")


def struct(name: str, **fields: object) -> Any:
    """One of the extension's argument structs (csrc/bind/program.cpp) with these fields."""
    made = getattr(native(), name)()
    for field, value in fields.items():
        setattr(made, field, value)
    return made


class CachePool(Protocol):
    """What a program needs of a KV group's pool (attention/cpu.py: CpuPool)."""

    k: Tensor
    v: Tensor
    shape: CacheShape
    page_size: int

    def heavy_at(self, site: AttentionSite) -> int:
        """Address of what double sparsity keeps of a layer, or 0."""


class Branch(Record):
    """What a mixer leaves before its output projection: ``width`` numbers of a buffer's rows."""

    buffer: int
    width: int
    out: Linear


class Target(Record):
    """Where a result is written: ``buffer = [buffer +] scale * result``."""

    buffer: int
    adds: bool = False
    scale: float = 1.0
    selected: bool = False


class Rotation(Record):
    """Which of the model's ropes rotates how many channels; -1 for none."""

    rope: int = -1
    interleaved: bool = False
    dim: int = 0


def rotation_of(index: int, rope: Rope | None) -> Rotation:
    """The rotation by rope ``index`` of the model's RopeTables."""
    if rope is None or index < 0:
        return Rotation()
    handles(
        rope, "dim", "theta", "scaling", "interleaved", "negative_angles", "mrope_sections",
        "mrope_interleaved", "mrope_paired",
    )  # fmt: skip
    return Rotation(index, rope.interleaved, rope.dim)


@dataclass(slots=True)
class ProgramStream:
    """The residual stream between blocks: its buffer, whether that holds the selected rows only,
    a mixture's outcome that joins at the end of the next block, and further streams."""

    residual: int
    selected: bool = False
    deferred: int = NOWHERE
    others: Sequence[int] = ()


class ProgramBuilder:
    """A program that is being made. ``ops`` is the extension's; ``keep`` holds what it knows by
    address only."""

    def __init__(
        self,
        dim: int,
        pools: Sequence[CachePool] | None,
        states: StatePool | None,
        max_positions: int,
        sites: Mapping[int, int] | None = None,
    ) -> None:
        """Without ``pools`` the program cannot run: it only shows whether all can be emitted.
        ``sites``: the number among the layers that adapters may change, by the ``id`` of what is
        packed."""
        self.ops: Any = native().Program()
        self.dim, self._pools, self._states = dim, pools, states
        self.keep: list[object] = [pools, states]
        self.num_positions = min(max_positions, MAX_POSITIONS)
        self.layer_inputs = NOWHERE  # a row holds the inputs of all layers, one after another
        self.has_logits = True  # else another rank gets them
        self.hidden_dim = dim  # numbers of a row of hidden states
        self.num_taps = 0  # hidden states that a step leaves for a drafter
        self.max_kv_len = sys.maxsize  # the longest sequence that the program can run
        self.is_causal = True  # else a token sees all of its sequence, which fits into the windows
        self.attention_groups: AttentionGroups | None = None  # where rows of all are needed
        self._buffers: dict[tuple[str, int], int] = {}
        self._scales: dict[LogNScaling, Tensor] = {}
        self._sites = dict(sites or {})
        self.sites_left = set(self._sites.values())  # that no operation has been emitted for

    def buffer(self, name: str, width: int = 0) -> int:
        """The buffer of a name and width, ``dim`` by default."""
        key = (name, width or self.dim)
        if key not in self._buffers:
            self._buffers[key] = self.ops.buffer(key[1])
        return self._buffers[key]

    def hold(self, tensor: Tensor | None) -> int:
        """The address of a tensor that lives as long as the program."""
        self.keep.append(tensor)
        return address(tensor)

    def site_of(self, packed: object) -> int:
        """The number of a layer that adapters may change, NOWHERE of others."""
        site = self._sites.get(id(packed), NOWHERE)
        self.sites_left.discard(site)
        return site

    def packed(self, linear: object) -> PackedLinear:
        """The C++ weight of a packed linear layer."""
        inner = linear.inner if isinstance(linear, CutLinear) else linear
        inner = inner.inner if isinstance(inner, GatherLinear) else inner
        packed = getattr(inner, "packed", None)
        if not isinstance(packed, PackedLinear):
            raise Unsupported(f"weights as {type(inner).__name__}")
        self.keep.append(packed)
        return packed

    def linear(
        self,
        linear: object,
        source: int,
        target: int,
        residual: int = NOWHERE,
        scale: float = 1.0,
        selected: bool = False,
        act: int = 0,
        offset: int = 0,
    ) -> int:
        """``target = act(linear(source)) * scale + residual``, from the column ``offset`` of both
        on; the target."""
        packed, site = self.packed(linear), self.site_of(linear)
        if site >= 0 and (act or packed.is_paired) and (residual >= 0 or scale != 1.0):
            raise Unsupported("adapters of a layer with activation and residual")
        place = linear.place if isinstance(linear, CutLinear) else WHOLE
        if place.inputs:
            whole = self.buffer(f"inputs of all ranks {source}", place.inputs[-1])
            source = self.all_gather(place, place.inputs, whole, selected, source)
        offset += place.outputs[place.group.rank] if place.outputs else 0
        ordered = self.reordered(linear, source, selected)
        self.ops.linear(
            x=ordered, y=target, w=packed.handle, residual=residual, out_scale=scale, act=act,
            selected=selected, site=site, lora_x=source, offset=offset,
        )  # fmt: skip
        if place.outputs:
            self.all_gather(place, place.outputs, target, selected)
        return target

    def all_gather(
        self, place: Placement, cut: Bounds, target: int, selected: bool, source: int = NOWHERE
    ) -> int:
        """The columns of all ranks in the target, where this rank's own are already, or in
        ``source``; the target."""
        group = self._native(place.group)
        self.ops.all_gather(y=target, bounds=cut, group=group, selected=selected, x=source)
        return target

    @staticmethod
    def _native(group: Group) -> Any:
        native_group = getattr(group, "native", None)
        if native_group is None:
            raise Unsupported(f"ranks of {type(group).__name__}")
        return native_group

    @contextmanager
    def of_all_groups(
        self, groups: AttentionGroups | None, target: Target, *sources: int
    ) -> Iterator[tuple[Target, Sequence[int]]]:
        """What is emitted inside works on the rows of all groups of data-parallel attention, if
        there are any: gives the sources and the target with these rows. Afterwards the target has
        this group's."""
        if groups is None or self.ops.of_all:
            yield target, sources
            return
        whole = [self.buffer(f"all groups {n}") for n in range(1 + len(sources))]
        group, each = self._native(groups.tp), groups.ranks_each
        self.attention_groups = groups
        for one, to in zip((target.buffer, *sources), whole, strict=True):
            if one != target.buffer or target.adds or one in sources:
                self.ops.gather_rows(x=one, y=to, group=group, each=each)
        self.ops.of_all = True
        yield replace(target, buffer=whole[0]), whole[1:]
        self.ops.of_all = False
        self.ops.own_rows(x=whole[0], y=target.buffer, dim=self.dim, group=group, each=each)

    def logits(
        self, head: object, source: int, selected: bool, scale: float, softcap: float, site: int
    ) -> None:
        """The step's logits, which rank 0 gets whole."""
        ordered = self.reordered(head, source, selected)
        place = head.place if isinstance(head, CutLinear) else WHOLE
        first = place.outputs[place.group.rank] if place.outputs else 0
        self.ops.logits(
            x=ordered, w=self.packed(head).handle, scale=scale, softcap=softcap, site=site,
            lora_x=source, first=first,
        )  # fmt: skip
        if place.outputs:
            self.ops.gather_logits(bounds=place.outputs, group=self._native(place.group))
            self.has_logits = place.group.rank == 0

    def project(
        self, layer: Linear, source: int, name: str, selected: bool = False, act: int = 0
    ) -> int:
        """A layer's outcome, in the buffer of a name."""
        target = self.buffer(name, layer.packed.out_features)
        return self.linear(layer.packed, source, target, selected=selected, act=act)

    def heads(self, layers: Sequence[object], source: int, target: int, each: int = 0) -> None:
        """A linear layer for each head. ``each``: numbers of the source from one head to the next,
        where they are more than it reads."""
        packed = HeadLinear([self.packed(one) for one in layers])
        self.keep.append(packed)
        each = each or packed.num_in
        self.ops.heads(x=source, y=target, w=packed.handle, x_head=each, y_head=packed.num_out)

    def reordered(self, linear: object, source: int, selected: bool) -> int:
        """The inputs in the order of the weight's columns."""
        linear = linear.inner if isinstance(linear, CutLinear) else linear
        if not isinstance(linear, GatherLinear):
            return source
        index_J = linear.index_J.int().contiguous()
        width = int(index_J.shape[0])
        target = self.buffer("reordered", width)
        self.ops.columns(x=source, y=target, index=self.hold(index_J), dim=width, selected=selected)
        return target

    def add_branches(self, branches: Sequence[Branch], target: Target) -> None:
        """The sum of mixers' output projections."""
        residual = target.buffer if target.adds else NOWHERE
        for branch in branches:
            self.linear(
                branch.out.packed, branch.buffer, target.buffer, residual, target.scale,
                target.selected,
            )  # fmt: skip
            residual = target.buffer

    def select(self, source: int, name: str, width: int = 0, offset: int = 0) -> int:
        """The selected rows of a buffer: ``width`` numbers from ``offset``."""
        width = width or self.dim
        target = self.buffer(name, width)
        self.ops.gather(x=source, y=target, dim=width, offset=offset)
        return target

    def emit_taps(self, stream: ProgramStream, layers: Sequence[int], layer: int) -> None:
        """The stream behind ``layer`` for a drafter, where it is one of the ``layers`` to read."""
        self.num_taps = len(layers)
        if layer not in layers:
            return
        if stream.deferred != NOWHERE:
            raise Unsupported("taps of a stream that experts join a block later")
        x, selected = stream.residual, stream.selected
        for place, one in enumerate(layers):
            if one == layer:
                self.ops.tap(x=x, dim=self.dim, offset=place * self.dim, selected=selected)

    def scale_rows(self, buffer: int, scale: float, selected: bool) -> None:
        """Whole rows times a number."""
        if scale != 1.0:
            self.ops.scale(y=buffer, offset=0, dim=self.dim, scale=scale, selected=selected)

    def gate(
        self, x: int, y: int, heads: tuple[int, int], act: str, per_head: bool = False,
        offset: int = 0, stride: int = 0, selected: bool = False,
    ) -> None:  # fmt: skip
        """y's ``heads`` (count, width) times act(x), a number a channel or a head."""
        args = struct(
            "GateArgs", heads=heads[0], width=heads[1], stride=stride or heads[1],
            act=getattr(native().Gate, act), per_head=per_head,
        )  # fmt: skip
        self.ops.gate(x=x, y=y, args=args, offset=offset, selected=selected)

    def scale_queries(self, how: LogNScaling, buffer: int, heads: tuple[int, int, int]) -> None:
        """Queries times the factor of their position. ``heads``: count, width, stride."""
        handles(how, "beta", "period", "offset", "is_power")
        self.max_kv_len = self.num_positions
        if how not in self._scales:
            self._scales[how] = logn_scales(how, torch.arange(self.num_positions))
        count, width, stride = heads
        factors = self.hold(self._scales[how])
        self.ops.scale_heads(y=buffer, factors=factors, heads=count, head_dim=width, stride=stride)

    def cache(self, site: AttentionSite) -> Any:
        """A layer's part of its group's pool."""
        cache = struct("Cache")
        if self._pools is not None:
            pool = self._pools[site.group]
            k, v = pool.k[site.layer], pool.v[site.layer]
            cache.k, cache.v = k.data_ptr(), v.data_ptr()
            cache.dtype, cache.page_size = pool.shape.code, pool.page_size
            cache.heavy = pool.heavy_at(site)
        return cache

    def store(
        self,
        source: int,
        offsets: tuple[int, int, int],
        site: AttentionSite,
        q_head: int,
        norm: QkNorm | None,
        rotation: Rotation,
        parts: int,
    ) -> None:
        """Norms and rotation of the q and k at ``offsets`` of the source, the store of k and v.
        ``q_head``: numbers from one query head to the next. ``parts``: csrc: StoreParts."""
        fields: dict[str, object] = {}
        if norm is not None:
            fields = {
                "norm": NORM_CODE[norm.kind], "layer_norm": int(norm.is_layer_norm),
                "eps": norm.eps, "q_norm": self.hold(norm.q_weight),
                "k_norm": self.hold(norm.k_weight), "q_norm_bias": self.hold(norm.q_bias),
                "k_norm_bias": self.hold(norm.k_bias),
            }  # fmt: skip
        args = struct(
            "StoreArgs", heads=site.heads, kv_heads=site.kv_heads, head_dim=site.head_dim,
            v_dim=site.v_dim, q_head=q_head, rotary=rotation.dim,
            interleaved=int(rotation.interleaved), cache=self.cache(site), **fields,
        )  # fmt: skip
        self.ops.store(
            x=source, offsets=offsets, args=args, rope=rotation.rope, group=site.group, parts=parts
        )

    def attend(self, site: AttentionSite, queries: int, out: int, q_head: int) -> None:
        """Attention over the cache of the last store."""
        self.keep.append(site)
        window = site.window
        if window and not self.is_causal:
            self.max_kv_len, window = min(self.max_kv_len, window), 0
        args = struct(
            "AttnArgs", heads=site.heads, q_head=q_head, scale=site.scale, softcap=site.softcap,
            window=window, chunk=site.chunk, sinks=address(site.sinks), causal=self.is_causal,
            alibi_slopes=address(site.slopes),
        )  # fmt: skip
        self.ops.attention(q=queries, y=out, args=args)

    def state(self, row: int, index: int) -> int:
        """The address of a layer's state in the pool, float32 [pages, ...]."""
        if self._states is None:
            if self._pools is not None:
                raise Unsupported("a step without states")
            return 0
        tensor = self._states.layers[row][index]
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise Unsupported(f"states of {tensor.dtype} on {tensor.device}")
        return tensor.data_ptr()
