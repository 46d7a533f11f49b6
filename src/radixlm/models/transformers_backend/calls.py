"""Calls within a Hugging Face model, made short: what torch and transformers do around each of a
layer's fifty calls (hooks, names looked up in tables, attributes of configs mapped) costs more than
a decode step's arithmetic. Nothing that is computed changes.

Modules become instances of a subclass of their own class, whose ``__call__`` is their ``forward``;
that forward finds our attention and, where a function of the usual rope is recognised by what it
gives, our kernel instead.

Legend: T tokens, H heads, D channels of a head, R rotated channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.rope import NO_CACHE, NO_NORM
from radixlm.kernels.dispatch import Kernels

ATTENTIONS, ROPE = "ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb"
_WRAPPER = "forward_with_checkpointing"  # of transformers, for training alone
_NUM_TABLES = 4  # ropes that the layers of a step take turns with


class _Attentions:
    """In the place of transformers' table of attention functions."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def get_interface(self, *_: object) -> Callable[..., Any]:
        """Ours, whatever was asked for."""
        return self._attend

    def __getitem__(self, _: object) -> Callable[..., Any]:
        return self._attend


class _Layers(nn.ModuleList):
    """A part of it is a plain list: transformers takes one in every step."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self._modules.values())[at]
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        return iter(self._modules.values())


class _Passed(nn.Dropout):
    """Lets all through, as a dropout does outside of training."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Turn:
    """``apply_rotary_pos_emb(q, k, cos, sin)`` by the kernel; what it does not know goes to the
    function that it stands for."""

    def __init__(self, theirs: Callable[..., Any], in_pairs: bool) -> None:
        self._theirs, self._in_pairs = theirs, in_pairs
        self._store = native().store
        self._tables: list[tuple[Tensor, Tensor | None]] = []

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any
    ) -> Any:
        """q and k [1, H, T, D], cos and sin [1, T, R], turned into new tensors."""
        table = None if rest or more else self._table(cos, sin, q)
        if table is None or k.dtype is not torch.float32 or k.ndim != 4:
            return self._theirs(q, k, cos, sin, *rest, **more)
        q_THD, k_TKD = _rows(q), _rows(k)
        tokens, heads, dim = q_THD.shape
        kv_heads = k_TKD.shape[1]
        self._store(
            (q_THD.data_ptr(), heads * dim, k_TKD.data_ptr(), kv_heads * dim, 0, 0),
            (tokens, heads, kv_heads, dim, dim, dim), NO_NORM,
            (table.data_ptr(), 0, table.shape[1], int(self._in_pairs)), 0, NO_CACHE, 0,
        )  # fmt: skip
        return q_THD.transpose(0, 1)[None], k_TKD.transpose(0, 1)[None]

    def _table(self, cos: Tensor, sin: Tensor, q: Tensor) -> Tensor | None:
        """float32 [T, R]: cosines, then sines; None where the kernel cannot read them."""
        for known, table in self._tables:
            if known is cos:
                return table
        made = None
        if q.dtype is torch.float32 and q.ndim == 4 and q.shape[0] == 1 and cos.ndim == 3:
            made = self._make(cos, sin, q)
        self._tables = [(cos, made), *self._tables[: _NUM_TABLES - 1]]
        return made

    def _make(self, cos: Tensor, sin: Tensor, q: Tensor) -> Tensor | None:
        num = cos.shape[2]
        if cos.shape != (1, q.shape[2], num) or cos.shape != sin.shape or num % 2 or not num:
            return None
        if num > q.shape[3] or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
            return None
        halves = [
            (x[0, :, ::2], x[0, :, 1::2]) if self._in_pairs else x[0].chunk(2, 1)
            for x in (cos, sin)
        ]
        if not all(torch.equal(one, other) for one, other in halves):
            return None
        return torch.cat([one for one, _ in halves], 1)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] as fresh dense rows [T, H, D]."""
    return x[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)


def turn_of(theirs: Any) -> Turn | None:
    """Our rope of a function that turns q and k as the kernel does, whole and in part."""
    if not isinstance(theirs, FunctionType):
        return None
    names = list(inspect.signature(theirs).parameters)
    if names[:4] != ["q", "k", "cos", "sin"]:
        return None
    for in_pairs in (False, True):
        turn = Turn(theirs, in_pairs)
        if all(_is_equal(theirs, turn, *sizes) for sizes in ((16, 16), (16, 8))):
            return turn
    return None


def _is_equal(theirs: Callable[..., Any], turn: Turn, dim: int, num: int) -> bool:
    """Whether both turn random rows alike; what theirs refuses, no model asks for."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, dim, generator=draw) for heads in (4, 2))
    angles = torch.randn(1, 5, num // 2, generator=draw)
    angles = angles.repeat_interleave(2, -1) if turn._in_pairs else torch.cat((angles, angles), -1)
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    try:
        wanted = theirs(q.clone(), k.clone(), cos, sin)
    except (RuntimeError, ValueError, IndexError):
        return num != dim
    return all(
        torch.allclose(got, want, rtol=1e-5, atol=1e-6)
        for got, want in zip(turn(q, k, cos, sin), wanted, strict=True)
    )


def shorten(model: nn.Module, kernels: Kernels, attend: Callable[..., Any]) -> None:
    """Make the calls of a model short. Its layers are not exchanged afterwards."""
    model.eval()
    makers = _Makers(attend, kernels.chosen["prepare_qk"] == "native")
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and _is_plain(config):
            config.__class__ = makers.plain(type(config))
        if module._forward_hooks or module._forward_pre_hooks:
            continue
        if type(module) is nn.ModuleList:
            module.__class__ = _Layers
        elif type(module) is nn.Dropout:
            module.__class__ = _Passed
        elif not hasattr(module, "get_input_embeddings"):
            module.__class__ = makers.short(type(module), "forward" in module.__dict__)
    for module in model.modules():  # found in the instance, not by a search of three tables
        held = {**module._modules, **module._parameters}
        module.__dict__.update({name: one for name, one in held.items() if one is not None})


def _is_plain(config: Any) -> bool:
    """Whether every attribute of a config of transformers stands where it is asked for, or is
    found by its other name alone."""
    kind = type(config)
    if not hasattr(kind, "attribute_map") or hasattr(kind, "__getattr__"):
        return False
    others = (name for one in kind.__mro__ for name in one.__dict__)
    if set(config.attribute_map) & {*others, *config.__dict__}:
        return False
    return config.__dict__.get("_heterogeneity_spec") is None


def _by_other_name(self: Any, name: str) -> Any:
    """``__getattr__`` of a config."""
    names = type(self).attribute_map
    if name not in names:
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
    return getattr(self, names[name])


def _call_own(self: Any, *args: Any, **options: Any) -> Any:
    return self.forward(*args, **options)


class _Makers:
    """Short classes, one for each class of a model."""

    def __init__(self, attend: Callable[..., Any], has_rope: bool) -> None:
        self._attentions, self._has_rope = _Attentions(attend), has_rope
        self._classes: dict[type, type] = {}
        self._globals: dict[int, dict[str, Any]] = {}  # by the identity of a module's own

    def short(self, kind: type, has_own: bool) -> type:
        """A subclass whose instances call their forward at once; ``has_own``: that of the
        instance."""
        if kind not in self._classes:
            forward = _call_own if has_own else _unwrapped(inspect.getattr_static(kind, "forward"))
            made = kind
            if isinstance(forward, FunctionType) and kind.__call__ is nn.Module.__call__:
                made = type(kind.__name__, (kind,), {"__module__": kind.__module__})
                setattr(made, "__call__", self._with_ours(forward))  # noqa: B010
            self._classes[kind] = made
        return self._classes[kind]

    def plain(self, kind: type) -> type:
        """A subclass of a config's whose attributes are read as those of any object."""
        if kind not in self._classes:
            own = {
                "__getattribute__": object.__getattribute__, "__getattr__": _by_other_name,
                "__module__": kind.__module__,
            }  # fmt: skip
            made = type(kind.__name__, (kind,), own)
            self._classes[kind] = self._classes[made] = made  # layers share their config
        return self._classes[kind]

    def _with_ours(self, forward: FunctionType) -> FunctionType:
        """The function with our attention and rope for transformers'."""
        if not {ATTENTIONS, ROPE} & set(forward.__code__.co_names):
            return forward
        known = forward.__globals__
        if id(known) not in self._globals:
            ours: dict[str, Any] = {ATTENTIONS: self._attentions}
            turn = turn_of(known.get(ROPE)) if self._has_rope else None
            if turn is not None:
                ours[ROPE] = turn
            self._globals[id(known)] = {**known, **ours}
        copied = FunctionType(
            forward.__code__, self._globals[id(known)], forward.__name__, forward.__defaults__,
            forward.__closure__,
        )  # fmt: skip
        copied.__kwdefaults__ = forward.__kwdefaults__
        return copied


def _unwrapped(forward: Any) -> Any:
    """The function within transformers' wrapper for training; others stay."""
    while getattr(getattr(forward, "__code__", None), "co_name", "") == _WRAPPER:
        forward = forward.__wrapped__
    return forward
