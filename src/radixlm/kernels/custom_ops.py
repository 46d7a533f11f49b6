"""Kernels as custom operations of torch, which torch.compile puts into its graphs without tracing.

``with_custom_ops(kernels)`` is the same kernels for eager calls. While torch.compile traces, an
implementation that is not plain torch becomes an operation of the namespace ``radixlm`` with a fake
that knows its shape; plain torch references are traced, so that the compiler may fuse them. The
results are those of the kernels either way.

An operation names the function that it calls by a number, because a graph holds no objects. Outputs
are new dense tensors, as their fakes say; q and k of attention are written in place.

Legend: T tokens, D channels, O outputs of a linear map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.base.record import replace
from radixlm.kernels.dispatch import REFERENCE, Kernels
from radixlm.kernels.ops import linear
from radixlm.kernels.ops.rope import QkNorm

Function = Callable[..., Any]


class FunctionHandle:
    """A function that operations call by its ``number``, as long as this object lives."""

    __slots__ = ("__weakref__", "call", "number")

    def __init__(self, call: Function) -> None:
        self.call, self.number = call, next(_NUMBERS)
        _HANDLES[self.number] = self


_NUMBERS = itertools.count()
_HANDLES: WeakValueDictionary[int, FunctionHandle] = WeakValueDictionary()
OPS: dict[str, Any] = {}  # the operations by name


def _like(handle: int, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _nothing(handle: int, *_: Any) -> None:
    return None


def _wide(handle: int, x: Tensor, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _halved(handle: int, x: Tensor, act: str, *limit: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _routed(handle: int, logits: Tensor, correction: Tensor | None, *spec: Any) -> Any:
    shape = (logits.shape[0], spec[3])
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _rows(handle: int, ids: Tensor, width: int, scale: float, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, width, dtype=dtype)


def _embedded(handle: int, ids: Tensor, table: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, table.shape[1], dtype=dtype)


def _attended(handle: int, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], rest[-1])


_RESULTS = {_nothing: "()", _routed: "(Tensor, Tensor)"}  # else one tensor


def _define(name: str, arguments: str, fake: Function, *written: str) -> None:
    """Define an operation whose first argument is a handle's number; ``written`` names the
    arguments that it changes in place."""
    schema = f"(int handle, {arguments}) -> {_RESULTS.get(fake, 'Tensor')}"

    def call(handle: int, *args: Any) -> Any:
        result = _HANDLES[handle].call(*args)
        if isinstance(result, tuple):
            return tuple(part.contiguous() for part in result)
        return result if result is None else result.contiguous()

    op = torch.library.custom_op(f"radixlm::{name}", call, mutates_args=written, schema=schema)
    op.register_fake(fake)
    OPS[name] = getattr(torch.ops.radixlm, name).default


_QK = (
    "Tensor(a!) q, Tensor(b!) k, {v}str kind, bool is_layer_norm, float eps, Tensor? q_weight, "
    "Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, Tensor? angles, bool interleaved"
)
_WEIGHTED = "Tensor weight, float eps"
_SHIFTED = "Tensor weight, Tensor? bias, float eps"
_ROUTER = (
    "Tensor logits, Tensor? correction, str score, int num_groups, int kept, int top_k, "
    "str group_score, bool renorm, float scale, float jitter"
)
_TABLE = "float scale, ScalarType dtype"
_define("rms_norm", f"Tensor x, {_WEIGHTED}", _like)
_define("add_rms_norm", f"Tensor(a!) x, Tensor delta, {_WEIGHTED}", _like, "x")
_define("layer_norm", f"Tensor x, {_SHIFTED}", _like)
_define("add_layer_norm", f"Tensor(a!) x, Tensor delta, {_SHIFTED}", _like, "x")
_define("rope", "Tensor(a!) x, Tensor angles, bool interleaved", _nothing, "x")
_define("prepare_qk", _QK.format(v=""), _nothing, "q", "k")
_define("sigmoid", "Tensor x", _like)
_define("softcap", "Tensor x, float cap", _like)
_define("activate", "Tensor x, str act", _like)
_CUT = "float limit=0.0, bool cuts_after=False"
_define("activate_gated", f"Tensor x, str act, {_CUT}", _halved)
_define("embedding", f"Tensor ids, Tensor table, {_TABLE}", _embedded)
_define("route", _ROUTER, _routed)
_define("linear", "Tensor x, int width", _wide)
_define("rows", f"Tensor ids, int width, {_TABLE}", _rows)
_define("experts", "Tensor x, Tensor weights, Tensor ids", _like)
_define("attend", "Tensor q, Tensor? k, Tensor? v, int width", _attended)
_define("prepare_and_attend", f"{_QK.format(v='Tensor v, ')}, int width", _attended, "q", "k")


def with_custom_ops(kernels: Kernels) -> Kernels:
    """The same kernels as custom operations that torch.compile can put into graphs."""
    changed: dict[str, Function] = {}
    for op, wrap in _WRAPPERS.items():
        plain = getattr(kernels, op)
        if kernels.chosen[op] != REFERENCE or op in _IN_PLACE:
            changed[op] = wrap(plain)
    for op in _PACKERS:
        changed[op] = _wrap_packer(getattr(kernels, op), op)
    return replace(kernels, **cast(dict[str, Any], changed))


# torch 2.13 cannot compile their references for any size: they write two views of one tensor
_IN_PLACE = ("rope", "prepare_qk")


def _simple(name: str) -> Callable[[Function], Function]:
    """A wrapper for ops whose arguments an operation can take unchanged."""
    op = OPS[name]

    def wrap(plain: Function) -> Function:
        handle = FunctionHandle(plain)

        def run(*args: Any) -> Any:
            return op(handle.number, *args) if torch.compiler.is_compiling() else plain(*args)

        return run

    return wrap


def flat_norm(norm: QkNorm | None) -> tuple[Any, ...]:
    """Norms of q and k as the arguments of an operation."""
    if norm is None:
        return ("", False, 0.0, None, None, None, None)
    weights = (norm.q_weight, norm.k_weight, norm.q_bias, norm.k_bias)
    return (norm.kind, norm.is_layer_norm, norm.eps, *weights)


def norm_of(flat: tuple[Any, ...]) -> QkNorm | None:
    """The inverse of ``flat_norm``."""
    return QkNorm(*flat) if flat[0] else None


def _prepare(plain: Function) -> Function:
    def call(q: Tensor, k: Tensor, *rest: Any) -> None:
        plain(q, k, norm_of(rest[:7]), *rest[7:])

    handle = FunctionHandle(call)
    op = OPS["prepare_qk"]

    def prepare_qk(
        q: Tensor, k: Tensor, norm: QkNorm | None, angles: Tensor | None, interleaved: bool
    ) -> None:
        if torch.compiler.is_compiling():
            op(handle.number, q, k, *flat_norm(norm), angles, interleaved)
        else:
            plain(q, k, norm, angles, interleaved)

    return prepare_qk


@lru_cache(maxsize=256)
def _moe(
    score: Any, num_groups: int, kept: int, top_k: int, group_score: Any, renorm: bool,
    scale: float, jitter: float,
) -> Moe:  # fmt: skip
    """A Moe record with the fields that a router reads."""
    return Moe(
        0, top_k, 0, "silu", score, renorm, scale, groups=(num_groups, kept),
        group_score=group_score, jitter=jitter,
    )  # fmt: skip


def _route(plain: Function) -> Function:
    def call(logits: Tensor, correction: Tensor | None, *spec: Any) -> Any:
        return plain(logits, correction, _moe(*spec))

    handle = FunctionHandle(call)
    op = OPS["route"]

    def route(logits: Tensor, correction: Tensor | None, spec: Moe) -> Any:
        if not torch.compiler.is_compiling():
            return plain(logits, correction, spec)
        return op(
            handle.number, logits, correction, spec.score, *spec.groups, spec.top_k,
            spec.group_score, spec.renorm, spec.scale, spec.jitter,
        )  # fmt: skip

    return route


_SIMPLE = (
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rope", "sigmoid", "softcap",
    "activate", "activate_gated", "embedding",
)  # fmt: skip
_WRAPPERS: dict[str, Callable[[Function], Function]] = {
    **{name: _simple(name) for name in _SIMPLE},
    "prepare_qk": _prepare,
    "route": _route,
}
_PACKERS = ("pack_linear", "pack_gated", "pack_tied", "pack_head_linear", "pack_experts")
# plain torch, whose weights a graph takes as arguments
_TRACED = (linear.ReferenceLinear, linear.ReferenceTied, linear.ReferenceHeadLinear)


class _Packed(Protocol):
    run: Function


def _wrap_packer(pack: Function, op: str) -> Function:
    """``pack`` whose objects have a ``run`` that torch.compile does not trace."""

    def packed(weight: Tensor, *rest: Any, **options: Any) -> Any:
        result = pack(weight, *rest, **options)
        if type(result) not in _TRACED:
            _wrap_run(result, op, weight)
        return result

    return packed


def _wrap_run(packed: _Packed, op: str, weight: Tensor) -> None:
    if op == "pack_experts":
        packed.run = _simple("experts")(packed.run)
        return
    width = weight.shape[1] if op == "pack_head_linear" else weight.shape[0]
    if op == "pack_gated":
        width //= 2
    packed.run = _sized("linear", packed.run, width)
    if op == "pack_tied":
        table = cast(Any, packed)
        table.rows = _sized("rows", table.rows, weight.shape[1])


def _sized(name: str, plain: Function, width: int) -> Function:
    """A wrapper for ops whose operation takes the width of the result."""
    op = OPS[name]
    handle = FunctionHandle(lambda x, _, *rest: plain(x, *rest))

    def run(x: Tensor, *rest: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(handle.number, x, width, *rest)
        return plain(x, *rest)

    return run
