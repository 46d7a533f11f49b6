"""Remove the overhead of calls within a Hugging Face model. A layer makes about fifty; what torch
and transformers do around each (hooks, lookups by name, mapped config attributes) costs more than
the arithmetic of a decode step. The results do not change.

Each module becomes an instance of a subclass of its class whose ``__call__`` is ``forward``. In
that forward, transformers' attention is replaced by the paged attention, and its rope by the C++
kernel if both give the same numbers.

Legend: T tokens, H heads, D channels of a head, R rotated channels.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.rope import NO_CACHE, NO_NORM
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.generator import seeded

ATTENTIONS, ROPE = "ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb"
_WRAPPER = "forward_with_checkpointing"  # a wrapper of transformers, needed in training only
_NUM_TABLES = 4  # tables of ropes that are remembered


class _Attentions:
    """Replaces transformers' table of attention functions."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def get_interface(self, *_: object) -> Callable[..., Any]:
        """The paged attention, for any name."""
        return self._attend

    def __getitem__(self, _: object) -> Callable[..., Any]:
        return self._attend


class _Layers(nn.ModuleList):
    """A module list whose slices are plain lists: transformers takes one in every step."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self._modules.values())[at]
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        return iter(self._modules.values())


class _Identity(nn.Dropout):
    """Returns its input, as dropout does in inference."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class KernelRope:
    """``apply_rotary_pos_emb(q, k, cos, sin)`` by the kernel. Arguments that the kernel
    cannot handle go to the original function."""

    def __init__(self, original: Callable[..., Any], interleaved: bool) -> None:
        self._original, self.interleaved = original, interleaved
        self._store = native().store
        self._tables: list[tuple[Tensor, Tensor | None]] = []

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any
    ) -> Any:
        """q and k [1, H, T, D], cos and sin [1, T, R], rotated into new tensors."""
        table = None if rest or more else self._table(cos, sin, q)
        if table is None or k.dtype is not torch.float32 or k.ndim != 4:
            return self._original(q, k, cos, sin, *rest, **more)
        q_THD, k_TKD = _rows(q), _rows(k)
        tokens, heads, dim = q_THD.shape
        kv_heads = k_TKD.shape[1]
        self._store(
            (q_THD.data_ptr(), heads * dim, k_TKD.data_ptr(), kv_heads * dim, 0, 0),
            (tokens, heads, kv_heads, dim, dim, dim), NO_NORM,
            (table.data_ptr(), 0, table.shape[1], int(self.interleaved)), 0, NO_CACHE, 0,
        )  # fmt: skip
        return q_THD.transpose(0, 1)[None], k_TKD.transpose(0, 1)[None]

    def _table(self, cos: Tensor, sin: Tensor, q: Tensor) -> Tensor | None:
        """float32 [T, R]: cosines, then sines; None where the kernel cannot read them."""
        for key, table in self._tables:
            if key is cos:
                return table
        result = None
        if q.dtype is torch.float32 and q.ndim == 4 and q.shape[0] == 1 and cos.ndim == 3:
            result = self._make(cos, sin, q)
        self._tables = [(cos, result), *self._tables[: _NUM_TABLES - 1]]
        return result

    def _make(self, cos: Tensor, sin: Tensor, q: Tensor) -> Tensor | None:
        num = cos.shape[2]
        if cos.shape != (1, q.shape[2], num) or cos.shape != sin.shape or num % 2 or not num:
            return None
        if num > q.shape[3] or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
            return None
        halves = [
            (x[0, :, ::2], x[0, :, 1::2]) if self.interleaved else x[0].chunk(2, 1)
            for x in (cos, sin)
        ]
        if not all(torch.equal(one, other) for one, other in halves):
            return None
        return torch.cat([one for one, _ in halves], 1)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] as fresh dense rows [T, H, D]."""
    return x[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)


def kernel_rope(original: Any) -> KernelRope | None:
    """The kernel in place of a rope function that gives the same numbers, with whole and partial
    rotation; None otherwise."""
    if not isinstance(original, FunctionType):
        return None
    names = list(inspect.signature(original).parameters)
    if names[:4] != ["q", "k", "cos", "sin"]:
        return None
    for interleaved in (False, True):
        rope = KernelRope(original, interleaved)
        if all(_is_equal(original, rope, *sizes) for sizes in ((16, 16), (16, 8))):
            return rope
    return None


def _is_equal(original: Callable[..., Any], rope: KernelRope, dim: int, num: int) -> bool:
    """Whether both rotate random rows alike. Sizes that the original refuses are not compared."""
    draw = seeded(0)
    q, k = (torch.randn(1, heads, 5, dim, generator=draw) for heads in (4, 2))
    angles = torch.randn(1, 5, num // 2, generator=draw)
    angles = (
        angles.repeat_interleave(2, -1) if rope.interleaved else torch.cat((angles, angles), -1)
    )
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    try:
        wanted = original(q.clone(), k.clone(), cos, sin)
    except (RuntimeError, ValueError, IndexError):
        return num != dim
    return all(
        torch.allclose(got, want, rtol=1e-5, atol=1e-6)
        for got, want in zip(rope(q, k, cos, sin), wanted, strict=True)
    )


def remove_overhead(model: nn.Module, kernels: Kernels, attend: Callable[..., Any]) -> None:
    """Remove the overhead of a model's calls. Its layers must not be replaced afterwards."""
    model.eval()
    subclasses = _Subclasses(attend, kernels.chosen["prepare_qk"] == "native")
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and _is_plain(config):
            config.__class__ = subclasses.plain(type(config))
        if module._forward_hooks or module._forward_pre_hooks:
            continue
        if type(module) is nn.ModuleList:
            module.__class__ = _Layers
        elif type(module) is nn.Dropout:
            module.__class__ = _Identity
        elif not hasattr(module, "get_input_embeddings"):
            module.__class__ = subclasses.short(type(module), "forward" in module.__dict__)
    for module in model.modules():  # found in the instance __dict__, without nn.Module.__getattr__
        children = {**module._modules, **module._parameters}
        module.__dict__.update({name: one for name, one in children.items() if one is not None})


def _is_plain(config: Any) -> bool:
    """Whether every attribute of a config of transformers is in the instance or has exactly one
    other name in ``attribute_map``."""
    kind = type(config)
    if not hasattr(kind, "attribute_map") or hasattr(kind, "__getattr__"):
        return False
    names = (name for one in kind.__mro__ for name in one.__dict__)
    if set(config.attribute_map) & {*names, *config.__dict__}:
        return False
    return config.__dict__.get("_heterogeneity_spec") is None


def _by_other_name(self: Any, name: str) -> Any:
    """``__getattr__`` of a config."""
    names = type(self).attribute_map
    if name not in names:
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
    return getattr(self, names[name])


def _call_forward(self: Any, *args: Any, **options: Any) -> Any:
    return self.forward(*args, **options)


class _Subclasses:
    """Makes the subclasses, one for each class of a model."""

    def __init__(self, attend: Callable[..., Any], has_rope: bool) -> None:
        self._attentions, self._has_rope = _Attentions(attend), has_rope
        self._classes: dict[type, type] = {}
        self._globals: dict[int, dict[str, Any]] = {}  # by the identity of a module's own

    def short(self, kind: type, is_instance: bool) -> type:
        """A subclass whose instances call their forward directly; ``is_instance``: the forward in
        the instance's ``__dict__``."""
        if kind not in self._classes:
            forward = (
                _call_forward
                if is_instance
                else _unwrapped(inspect.getattr_static(kind, "forward"))
            )
            result = kind
            if isinstance(forward, FunctionType) and kind.__call__ is nn.Module.__call__:
                result = type(kind.__name__, (kind,), {"__module__": kind.__module__})
                setattr(result, "__call__", self._with_replacements(forward))  # noqa: B010
            self._classes[kind] = result
        return self._classes[kind]

    def plain(self, kind: type) -> type:
        """A subclass of a config class with the attribute lookup of plain objects."""
        if kind not in self._classes:
            own = {
                "__getattribute__": object.__getattribute__, "__getattr__": _by_other_name,
                "__module__": kind.__module__,
            }  # fmt: skip
            result = type(kind.__name__, (kind,), own)
            self._classes[kind] = self._classes[result] = result  # layers share their config
        return self._classes[kind]

    def _with_replacements(self, forward: FunctionType) -> FunctionType:
        """The function with the attention and rope of transformers replaced."""
        if not {ATTENTIONS, ROPE} & set(forward.__code__.co_names):
            return forward
        names = forward.__globals__
        if id(names) not in self._globals:
            replaced: dict[str, Any] = {ATTENTIONS: self._attentions}
            rope = kernel_rope(names.get(ROPE)) if self._has_rope else None
            if rope is not None:
                replaced[ROPE] = rope
            self._globals[id(names)] = {**names, **replaced}
        copied = FunctionType(
            forward.__code__, self._globals[id(names)], forward.__name__, forward.__defaults__,
            forward.__closure__,
        )  # fmt: skip
        copied.__kwdefaults__ = forward.__kwdefaults__
        return copied


def _unwrapped(forward: Any) -> Any:
    """The function inside transformers' wrapper for training; other functions are returned."""
    while getattr(getattr(forward, "__code__", None), "co_name", "") == _WRAPPER:
        forward = forward.__wrapped__
    return forward
