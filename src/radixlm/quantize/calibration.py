"""Activation-aware scaling (AWQ, https://arxiv.org/abs/2306.00978): inputs of a layer that matter
are multiplied by a scale before rounding, and what makes them is divided by it.

A norm is the maker of the inputs of all layers that read its output; in a gated feed-forward
"up_proj" is that of "down_proj". Which layer reads which norm is seen while a text runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import require_transformers
from radixlm.quantize.methods import Method, round_weight

if TYPE_CHECKING:
    from torch import nn

NUM_SAMPLES = 256  # rows of inputs that are kept of each layer
_STEPS = 20  # powers that are tried


class Inputs:
    """What one layer saw. ``sum_I``: of squares; ``kept``: some rows, float32."""

    def __init__(self, maker: str) -> None:
        self.maker, self.num_rows = maker, 0
        self.sum_I: Tensor | None = None
        self.kept: list[Tensor] = []

    def add(self, x: Tensor, stride: int) -> None:
        """Rows [..., I]; every ``stride``-th is kept."""
        rows = x.detach().flatten(0, -2).float()
        self.sum_I = rows.square().sum(0) + (0 if self.sum_I is None else self.sum_I)
        self.num_rows += len(rows)
        self.kept.append(rows[::stride].clone())

    @property
    def importance_I(self) -> Tensor:
        """The mean square of each input, float32."""
        assert self.sum_I is not None
        return self.sum_I / max(1, self.num_rows)

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.kept)[:NUM_SAMPLES]


class Scales:
    """What is multiplied into each weight. ``into``: columns, by module; ``out_of``: rows and norms
    that are divided; ``shifted``: norms that multiply by 1 + weight."""

    def __init__(self) -> None:
        self.into: dict[str, Tensor] = {}
        self.out_of: dict[str, Tensor] = {}
        self.shifted: set[str] = set()
        self.importance: dict[str, Tensor] = {}

    def apply(self, module: str, part: str, value: Tensor) -> Tensor:
        """The tensor ``part`` of a module as it is stored, float32."""
        value = value.float()
        if module in self.into and part == "weight":
            value = value * self.into[module]
        if module in self.out_of:
            scale = self.out_of[module]
            if value.ndim == 2:
                scale = scale[:, None]
            if module in self.shifted and part == "weight":
                return (value + 1) / scale - 1
            value = value / scale
        return value

    def changes(self, module: str) -> bool:
        return module in self.into or module in self.out_of


def calibrate(folder: Path, text: str, method: Method, num_tokens: int, length: int) -> Scales:
    """Scales for ``method`` from the first ``num_tokens`` of a text, in pieces of ``length``.
    ConfigError: the text is too short, or transformers cannot run the model."""
    transformers = require_transformers("hf", f"--method {method.name}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"--method {method.name}: transformers cannot run {folder.name}, which calibration "
            f"needs ({str(error).splitlines()[0]:.200}); use --method int4wo-128"
        ) from error
    ids = tokenizer(text, return_tensors="pt").input_ids[0][:num_tokens]
    if len(ids) < 64:
        raise ConfigError(f"--calibration: {len(ids)} tokens are too few, give 2,000 or more")
    seen = _observe(model, ids, length)
    return _choose(dict(model.named_modules()), seen, method)


def _observe(model: Any, ids: Tensor, length: int) -> dict[str, Inputs]:
    """What each linear layer saw of the text."""
    stride, seen = max(1, len(ids) // NUM_SAMPLES), dict[str, Inputs]()
    pieces = torch.split(ids, length)
    bar = tqdm(total=len(ids), desc="calibrating", unit="token", disable=None)
    with torch.inference_mode(), _hooks(model, seen, stride), bar:
        for piece in pieces:
            model.model(piece[None])
            bar.update(len(piece))
    return seen


@contextmanager
def _hooks(model: Any, seen: dict[str, Inputs], stride: int) -> Iterator[None]:
    """Note the inputs of linear layers, and which norm made them."""
    made: dict[int, tuple[str, Tensor]] = {}  # id of an output -> its norm; kept alive

    def after_norm(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            made[id(output)] = name, output

        return hook

    def before_linear(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            maker = made.get(id(args[0]), ("", None))[0]
            one = seen.setdefault(name, Inputs(maker))
            one.maker = maker if maker == one.maker else ""
            one.add(args[0], stride)

        return hook

    def after_layer(module: nn.Module, args: Any, output: Any) -> None:
        made.clear()

    handles = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(before_linear(name)))
        elif weight is not None and weight.ndim == 1:
            handles.append(module.register_forward_hook(after_norm(name)))
        elif name.rpartition(".")[2].isdigit():
            handles.append(module.register_forward_hook(after_layer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose(modules: Mapping[str, Any], seen: dict[str, Inputs], method: Method) -> Scales:
    scales, readers = Scales(), defaultdict[str, list[str]](list)
    scales.importance = {name: one.importance_I for name, one in seen.items()}
    for name, one in seen.items():
        if one.maker:
            readers[one.maker].append(name)
        parent, _, own = name.rpartition(".")
        up = f"{parent}.up_proj"
        if own == "down_proj" and f"{parent}.gate_proj" in modules and up in modules:
            readers[up].append(name)
    if method.name != "awq-like":
        return scales
    for maker, names in tqdm(readers.items(), desc="choosing scales", disable=None):
        if maker.rpartition(".")[2] != "up_proj" and not _is_whole(modules, maker):
            continue
        scale = _best(modules, seen, names, method)
        if scale is None:
            continue
        scales.out_of[maker] = scale
        scales.into |= dict.fromkeys(names, scale)
        if _is_shifted(modules[maker]):
            scales.shifted.add(maker)
    for name, scale in scales.into.items():
        scales.importance[name] = scales.importance[name] / scale.square()
    return scales


def _is_whole(modules: Mapping[str, Any], norm: str) -> bool:
    """Whether no other parameter reads the norm's output: experts read rows of it, stacked in one
    parameter or numbered."""
    layer = norm.rpartition(".")[0] + "."
    inside = {n.removeprefix(layer): m for n, m in modules.items() if n.startswith(layer)}
    if any(part.isdigit() for name in inside for part in name.split(".")):
        return False
    return not any(p.ndim > 2 for m in inside.values() for p in m.parameters(recurse=False))


def _is_shifted(norm: Any) -> bool:
    """Whether a norm multiplies by 1 + weight, as Gemma's do."""
    if isinstance(norm, torch.nn.Linear):
        return False
    x = torch.linspace(-1, 1, norm.weight.numel())[None] + 0.1
    with torch.inference_mode():
        kept = norm.weight.clone()
        norm.weight.zero_()
        is_shifted = bool(norm(x).abs().max() > 1e-3)
        norm.weight.copy_(kept)
    return is_shifted


def _best(
    modules: Mapping[str, Any], seen: dict[str, Inputs], names: list[str], method: Method
) -> Tensor | None:
    """The scale of the inputs of some layers with the least error of their outputs; None: none is
    better than no scale."""
    rows, weights = seen[names[0]].rows, [modules[n].weight.detach().float() for n in names]
    fitting = method.fitting(tuple(weights[0].shape))
    if fitting is None:
        return None
    size = seen[names[0]].importance_I.sqrt().clamp(min=1e-6)
    wanted = [rows @ weight.T for weight in weights]
    best, least = None, float("inf")
    for number in range(_STEPS):
        scale = size ** (number / _STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        error = 0.0
        for weight, right in zip(weights, wanted, strict=True):
            rounded = round_weight(weight * scale, fitting, torch.float32, num_scales=1).weight()
            error += float((rows @ (rounded / scale).T - right).square().mean())
        if error < least:
            best, least = (scale if number else None), error
    return best
