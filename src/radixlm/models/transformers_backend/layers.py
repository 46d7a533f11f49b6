"""Replace layers of a Hugging Face model by the kernels of this package: linear layers, norms and
embeddings, one by one, each only if the kernel computes exactly the same.

Legend: T tokens, D channels, O output channels, I input channels, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.cpu.linear import GATED_CODE
from radixlm.kernels.dispatch import REFERENCES, Kernels
from radixlm.kernels.generator import seeded
from radixlm.kernels.ops.linear import PackedLinear, TiedTable
from radixlm.models.transformers_backend.experts import replace_experts


class Packed(nn.Module):
    """A linear layer whose weight is packed for the kernels."""

    def __init__(self, packed: PackedLinear | TiedTable, num_in: int, num_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = num_in, num_out
        self._packed = packed  # the kernel of _direct knows addresses only
        self.forward = _direct(packed, num_in, num_out, 0) or packed.run

    @property
    def weight(self) -> Tensor:
        """The weight, unpacked, in the dtype of activations."""
        return self._packed.unpack().float()


class _GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``, the first half in one call."""

    def __init__(self, gated: PackedLinear, down: Packed, act: str) -> None:
        super().__init__()
        self.down, self._gated = down, gated  # the kernel knows addresses only
        num_inner = down.in_features
        code = GATED_CODE.get(act, -1)
        self._inner = _direct(gated, down.out_features, num_inner, code) or gated.run

    def forward(self, x: Tensor) -> Tensor:
        """[..., D]."""
        y: Tensor = self.down.forward(self._inner(x))
        return y


def _direct(
    packed: PackedLinear | TiedTable, num_in: int, num_out: int, act: int
) -> Callable[[Tensor], Tensor] | None:
    """The C++ kernel of a packed weight without the checks of ``run``; None without one."""
    handle = getattr(getattr(packed, "packed", None), "handle", None)
    if handle is None or act < 0:
        return None
    kernel, empty = handle.run, torch.empty

    def run(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        out = empty(*x.shape[:-1], num_out)
        rows = x.numel() // num_in
        kernel(x.data_ptr(), num_in, rows, out.data_ptr(), num_out, 0, 0, 1.0, act, 0, 0)
        return out

    return run


class _Joined:
    """Linear layers of one input, computed together by the first call."""

    def __init__(self, packed: PackedLinear, num_in: int, sizes: list[int]) -> None:
        self._packed, self._sizes = packed, sizes  # the kernel knows addresses only
        self._run = _direct(packed, num_in, sum(sizes), 0) or packed.run
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """[..., O] of layer ``index``; the last one releases the input."""
        if x is not self._x:
            self._x, self._parts = x, self._run(x).split_with_sizes(self._sizes, -1)
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._x, self._parts = None, ()
        return part

    def weight(self, index: int) -> Tensor:
        return self._packed.unpack().split_with_sizes(self._sizes, 0)[index].float()


class Part(nn.Module):
    """One of the joined layers."""

    def __init__(self, joined: _Joined, index: int, num_in: int, num_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = num_in, num_out
        self._joined, self._index = joined, index
        self.forward = partial(joined.part, index)

    @property
    def weight(self) -> Tensor:
        """The weight, unpacked to float32."""
        return self._joined.weight(self._index)


class _Norm(nn.Module):
    """A norm by the kernel, with a module's weights."""

    def __init__(self, run: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.forward = run


class _Rows(nn.Module):
    """An embedding whose table is also the head's weight, packed once."""

    def __init__(self, table: TiedTable, num_rows: int, dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_rows, dim
        self._table = table

    @property
    def weight(self) -> Tensor:
        """The table, unpacked to float32."""
        return self._table.unpack().float()

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D] float32."""
        rows = self._table.rows(ids.reshape(-1), 1.0, torch.float32)
        return rows.view(*ids.shape, self.embedding_dim)


class _Float32Embedding(nn.Module):
    """An embedding in its own dtype that returns float32."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.weight = inner.weight
        self.num_embeddings, self.embedding_dim = inner.num_embeddings, inner.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D] float32."""
        return nn.functional.embedding(ids, self.weight).float()


def replace_layers(model: nn.Module, kernels: Kernels) -> None:
    """Replace the layers that the kernels can run, on a CPU; activations become float32.

    Each weight is freed once it is packed, so that memory peaks near the size of the weights."""
    _replace_tied(model, kernels)
    for kind in (_gated, replace_experts):
        _replace_each(model, kind, kernels)
    for module in model.modules():
        _join(module, kernels)
    _replace_each(model, _replacement, kernels)
    for module in model.modules():
        if not isinstance(module, _Float32Embedding):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype.itemsize == 2 and parameter.is_floating_point():
                    setattr(module, name, nn.Parameter(parameter.float(), requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype.itemsize == 2 and buffer.is_floating_point():
                    setattr(module, name, buffer.float())


def _replace_each(
    model: nn.Module, kind: Callable[[nn.Module, Kernels], nn.Module | None], kernels: Kernels
) -> None:
    """Replace each module by what ``kind`` returns for it, without keeping the old one."""
    for path in [path for path, _ in model.named_modules()]:
        try:
            module = model.get_submodule(path)
        except AttributeError:  # part of a module that was replaced
            continue
        new = kind(module, kernels)
        del module
        if new is not None:
            model.set_submodule(path, new)


def _replace_tied(model: nn.Module, kernels: Kernels) -> None:
    """Replace a head and an embedding that share one table."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    is_known = type(table) is nn.Embedding and type(head) is nn.Linear and head.bias is None
    if not is_known or table.weight is not head.weight or not _is_packable(table.weight):
        return
    paths = {id(module): path for path, module in model.named_modules()}
    packed, (rows, dim) = kernels.pack_tied(table.weight.data), table.weight.shape
    model.set_submodule(paths[id(table)], _Rows(packed, rows, dim))
    model.set_submodule(paths[id(head)], Packed(packed, dim, rows))


def _is_packable(weight: Tensor) -> bool:
    return weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _replacement(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The kernels' layer that computes the same; None if there is none."""
    if type(module) is nn.Embedding and module.weight.dtype.itemsize == 2:
        return _Float32Embedding(module)
    is_conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # GPT-2's linear map
    if type(module) is nn.Linear or is_conv:
        weight, bias = module.weight, module.bias
        if not isinstance(weight, Tensor) or not _is_packable(weight):
            return None
        weight_OI = weight.data.T.contiguous() if is_conv else weight.data
        bias_O = bias.data.float() if isinstance(bias, Tensor) else None
        packed = kernels.pack_linear(weight_OI, bias_O, "")
        return Packed(packed, weight_OI.shape[1], weight_OI.shape[0])
    if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
        return _pointwise(module, kernels)
    if type(module) is nn.LayerNorm or "RMSNorm" in type(module).__name__:
        return _norm(module, kernels)
    return None


def _join(module: nn.Module, kernels: Kernels) -> None:
    """Replace an attention's q, k and v by one linear layer."""
    names = ("q_proj", "k_proj", "v_proj")
    maps = [m for m in (getattr(module, name, None) for name in names) if type(m) is nn.Linear]
    kinds = {(m.in_features, m.weight.dtype, m.bias is None) for m in maps}
    if len(maps) != len(names) or len(kinds) != 1 or not _is_packable(maps[0].weight):
        return
    biases = [m.bias.data.float() for m in maps if m.bias is not None]
    weight = torch.cat([m.weight.data for m in maps])
    packed = kernels.pack_linear(weight, torch.cat(biases) if biases else None, "")
    num_in, sizes = weight.shape[1], [m.out_features for m in maps]
    joined = _Joined(packed, num_in, sizes)
    for index, name in enumerate(names):
        setattr(module, name, Part(joined, index, num_in, sizes[index]))


def _gated(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """A gated feed-forward on the kernels, if it gives the same numbers for random rows."""
    maps = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    takes = inspect.signature(type(module).forward).parameters
    own = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    if not own <= {"gate_proj", "up_proj", "down_proj"} or len(takes) != 2:
        return None
    if not all(type(m) is nn.Linear and m.bias is None and _is_packable(m.weight) for m in maps):
        return None
    gate, up, down = (m.weight.data for m in maps if m is not None)
    act = _activation(getattr(module, "act_fn", None))
    if act is None:
        return None
    close = 1e-4 if gate.dtype == torch.float32 else 3e-2
    for size in (1.0, 1e3):  # large ones reach what clamps
        rows_TD = torch.randn(3, gate.shape[1], generator=seeded(0)) * size
        want = module(rows_TD.to(gate.dtype)).float()
        inner = torch.cat((rows_TD @ gate.float().T, rows_TD @ up.float().T), -1)
        got = REFERENCES["activate_gated"](inner, act) @ down.float().T
        if float((got - want).abs().max()) > close * float(want.abs().max()):
            return None
    gated = kernels.pack_gated(torch.cat((gate, up)), None, "", act)
    packed = kernels.pack_linear(down, None, "")
    return _GatedMlp(gated, Packed(packed, down.shape[1], down.shape[0]), act)


def _activation(function: object) -> str | None:
    """The kernels' name of an activation module."""
    if not callable(function):
        return None
    x = torch.linspace(-6, 6, 97)[None]
    want = function(x.clone())
    for act in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        if torch.allclose(REFERENCES["activate"](x.clone(), act), want, rtol=1e-5, atol=1e-6):
            return act
    return None


class _Pointwise(nn.Module):
    """An elementwise function by the kernel."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = run


def _pointwise(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The kernel, if it gives the same for small and large numbers."""
    act = None if next(module.parameters(), None) is not None else _activation(module)
    if act is None:
        return None
    run = partial(kernels.activate, act=act)
    x = torch.linspace(-200, 200, 401)[None]
    is_equal = torch.allclose(run(x), module(x.clone()), rtol=1e-5, atol=1e-6)
    return _Pointwise(run) if is_equal else None


def _norm(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The kernel, if it gives the same numbers for random rows."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    names = {name for name, _ in module.named_parameters()}
    takes = list(inspect.signature(type(module).forward).parameters)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or eps is None or len(takes) != 2:
        return None
    if not names <= {"weight", "bias"}:
        return None
    is_layer = type(module) is nn.LayerNorm
    bias = getattr(module, "bias", None)
    bias_D = bias.data.float() if isinstance(bias, Tensor) else None
    rows_TD = torch.randn(4, weight.shape[0], generator=seeded(0)) * 3
    want = module.float()(rows_TD)
    for offset in (0, 1):  # Gemma keeps its weights less one
        scale_D = weight.data.float() + offset
        run = _norm_run(kernels, scale_D, bias_D, eps, is_layer)
        if torch.allclose(run(rows_TD), want, rtol=1e-5, atol=1e-6):
            return _Norm(run, weight.data.float())
    return None


def _norm_run(
    kernels: Kernels, scale_D: Tensor, bias_D: Tensor | None, eps: float, is_layer: bool
) -> Callable[[Tensor], Tensor]:
    """The norm by the chosen kernel; the C++ one is called without its checks."""
    op = "layer_norm" if is_layer else "rms_norm"
    if kernels.chosen[op] != "native" or (bias_D is not None and not is_layer):
        if is_layer:
            return lambda x: kernels.layer_norm(x.float().contiguous(), scale_D, bias_D, eps)
        return lambda x: kernels.rms_norm(x.float().contiguous(), scale_D, eps)
    kernel, dim = native().norm, scale_D.shape[0]

    def run(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        out, scale, bias = torch.empty_like(x), scale_D.data_ptr(), address(bias_D)
        if rows := x.numel() // dim:
            at, to = x.data_ptr(), out.data_ptr()
            kernel(at, dim, 0, 0, scale, bias, to, dim, rows, dim, eps, 0.0, 1.0, is_layer, 0)
        return out

    return run


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None
