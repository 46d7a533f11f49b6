"""Which tensors of a checkpoint make one parameter of the model, and how they are joined.

Roles, name templates and recipes are those of ``arch/names``.
"""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from radixlm.arch import spec
from radixlm.arch.names import DEFAULT, Named, prefix_of, spellings
from radixlm.arch.recipes import Computed, Recipe
from radixlm.base.record import Record, replace
from radixlm.quant.param import Param
from radixlm.weights.source import TensorSource


class LoadableLayer(Protocol):
    """A layer with parameters of its own."""

    def own_params(self) -> dict[str, Param]:
        """Parameters by name; a name is a checkpoint suffix ("weight") or part of a role."""

    def finish(self) -> None:
        """All parameters are filled."""


class LoadableModel(Protocol):
    """A model as the loader sees it."""

    decoder: spec.Decoder
    weight_dtype: torch.dtype | None
    is_part: bool  # a part of what the checkpoint holds

    def layers(self) -> Iterator[tuple[str, LoadableLayer]]:
        """Every layer that has parameters or a ``finish`` to run, with its path."""


class ParamMapping(Record):
    """How one parameter is made. ``tensors`` has one row a template; a row holds one name, or
    one an expert when ``is_stacked``."""

    path: str
    tensors: tuple[tuple[str, ...], ...]
    is_stacked: bool
    recipe: Recipe | None

    def names(self) -> list[str]:
        """Every checkpoint tensor that is part of the parameter."""
        return [name for row in self.tensors for name in row]


class WeightsMapper:
    """Finds the tensors of each parameter of one decoder in one checkpoint."""

    def __init__(self, decoder: spec.Decoder, present: Container[str]) -> None:
        self._decoder, self._present = decoder, present
        # a composite checkpoint has another prefix than the decoder's templates; ``_outer`` is what
        # it puts before names outside the decoder proper (lm_head)
        self._template_prefix, self._prefix = prefix_of(decoder, present)
        is_nested = self._prefix != self._template_prefix and self._prefix.endswith(
            self._template_prefix
        )
        self._outer = self._prefix.removesuffix(self._template_prefix) if is_nested else ""

    def spellings(self, module: str, param: str = "weight") -> list[ParamMapping]:
        """Every way in which a checkpoint may store a parameter of ``module``."""
        role, suffix, layer = self._role(module, param)
        return [
            self._mapping(f"{module}.{param}", named, suffix, layer)
            for named in spellings(self._decoder.names, role)
        ]

    def mapping(self, module: str, param: str) -> ParamMapping:
        """The first spelling whose tensors are all present, else the first one (the caller then
        reports its names as missing)."""
        role, suffix, layer = self._role(module, param)
        roles = (role, "head") if role == "embed" and self._decoder.tied else (role,)
        mappings = [  # a tied matrix may be stored as the head alone
            self._mapping(f"{module}.{param}", named, suffix, layer)
            for role in roles
            for named in spellings(self._decoder.names, role)
        ]
        complete = (m for m in mappings if all(name in self._present for name in m.names()))
        return next(complete, mappings[0])

    def _role(self, module: str, param: str) -> tuple[str, str, int]:
        """(role, suffix, layer) of a parameter; see the roles in ``arch/names``."""
        layer, key = -1, module
        if module.startswith("blocks."):
            _, number, *rest = module.split(".", 2)
            layer, key = int(number), "".join(rest)
            key = self._ffn_key(layer, self._mixer_key(layer, key)) if key else "block"
        role = f"{key}.{param}"
        if role in self._decoder.names or role in DEFAULT:
            return role, "weight", layer
        if param.endswith("_bias"):  # the bias of a stacked weight
            return f"{key}.{param.removesuffix('_bias')}", "bias", layer
        return key, param, layer

    def _mixer_key(self, layer: int, key: str) -> str:
        """Recurrent mixers have roles of their own: "state" instead of "mixer"."""
        block = self._decoder.blocks[layer]
        if isinstance(block.mixer, spec.ConvAttention):
            return key
        if isinstance(block.mixer, spec.ParallelHybrid):
            return key.replace("mixer.attention", "mixer").replace("mixer.state", "state")
        if isinstance(block.mixer, spec.RwkvTime | spec.RwkvChannel):
            part = "state.time" if isinstance(block.mixer, spec.RwkvTime) else "state.channel"
            return key.replace("mixer", part, 1)
        return key.replace("mixer", "state", 1) if block.state is not None else key

    def _ffn_key(self, layer: int, key: str) -> str:
        for beside in ("deferred_moe", "parallel_moe"):
            if key == beside or key.startswith(beside + "."):
                return "moe" + key.removeprefix(beside)
        ffn = self._decoder.blocks[layer].ffn
        if isinstance(ffn, spec.Moe):
            key = "moe" + key.removeprefix("ffn") if key.startswith("ffn") else key
        dense = ffn.shared if isinstance(ffn, spec.Moe) else ffn
        is_up = key in ("ffn.up", "moe.shared.up")
        return key + "1" if is_up and isinstance(dense, spec.Mlp) and not dense.gated else key

    def _mapping(self, path: str, named: Named, suffix: str, layer: int) -> ParamMapping:
        block = self._decoder.blocks[layer] if layer >= 0 else None
        ffn = None if block is None else block.deferred_moe or block.parallel_moe or block.ffn
        num_experts = ffn.experts if isinstance(ffn, spec.Moe) else 0
        is_stacked = any("{e}" in one or "{past}" in one for one in named.templates)
        rows = tuple(
            tuple(
                self._name(template, suffix, layer, expert, num_experts)
                for expert in (range(num_experts) if is_stacked else (0,))
            )
            for template in named.templates
        )
        return ParamMapping(path, rows, is_stacked, named.recipe)

    def _name(self, template: str, suffix: str, layer: int, expert: int, num_experts: int) -> str:
        if template.startswith(self._template_prefix):
            template = self._prefix + template.removeprefix(self._template_prefix)
        cycles = self._decoder.cycles
        if cycles is not None and layer >= 0:
            stack, layer = divmod(layer, cycles.size)
            template = template.replace("{stack}", cycles.stacks[stack])
        if self._decoder.message_loop is not None and layer >= 0:
            layer = self._decoder.message_loop.stored(layer)
        name = template.replace("{i}", str(layer)).replace("{e}", str(expert))
        name = name.replace("{past}", str(num_experts + expert))
        name = name.replace("{half}", str(layer // 2)).replace("{odd}", str(layer % 2))
        name = name.replace("{nth}", str(layer % 2 + 1)).replace("{before}", str(layer - 1))
        if suffix == "weight" and name in self._present:
            return name
        name = f"{name}.{suffix}"
        nested = self._outer + name
        return nested if name not in self._present and nested in self._present else name


class TensorJoiner:
    """Joins tensors in reused buffers, one for each parameter name of a layer. Fresh memory for
    every parameter would fragment the heap to twice the size of the weights."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def join(self, mapping: ParamMapping, param: Param) -> Tensor:
        """This rank's part of the parameter's value, in the checkpoint's dtype, or in float32 where
        a recipe computes: a view of the source, or of a buffer if tensors were joined; valid until
        the next layer's parameter of the same name. A value of another shape than the parameter's
        comes whole."""
        source, recipe = self._source, mapping.recipe
        cut = param if recipe is None else _UNCUT
        if mapping.is_stacked:
            value = self._stack(mapping, cut)
        elif len(mapping.tensors) == 1:
            value = cut.part_of(source.read(mapping.tensors[0][0]))
        else:
            value = self._cat(mapping, [source.read(row[0]) for row in mapping.tensors], cut)
        if recipe is None:
            return value
        if isinstance(recipe, Computed) and value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        return param.part_of(recipe(value, concat))

    def _buffer(self, mapping: ParamMapping, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        key = (mapping.path.rpartition(".")[2], like.dtype)
        buffer, count = self._buffers.get(key), math.prod(shape)
        if buffer is None or buffer.numel() < count:
            self._buffers[key] = buffer = like.new_empty(count)
        return buffer[:count].view(shape)

    def _cat(self, mapping: ParamMapping, parts: list[Tensor], param: Param) -> Tensor:
        for part, row in zip(parts, mapping.tensors, strict=True):
            _check_kind(row[0], part, parts[0])
        if any(p.ndim == 0 or p.shape[1:] != parts[0].shape[1:] for p in parts):
            raise ValueError("its parts have other shapes than each other")
        rows = [part.shape[0] for part in parts]
        if (sum(rows), *parts[0].shape[1:]) == param.whole_shape:
            parts = [
                part.narrow(0, begin, end - begin)
                for part, cut in zip(parts, param.cuts_of(0, rows), strict=True)
                for begin, end in cut.ranges
            ]
        if len({part.dtype for part in parts}) > 1:
            return torch.cat(parts)  # to the wider dtype
        num_rows = sum(part.shape[0] for part in parts)
        out = self._buffer(mapping, parts[0], (num_rows, *parts[0].shape[1:]))
        return torch.cat(parts, out=out)

    def _stack(self, mapping: ParamMapping, param: Param) -> Tensor:
        """[experts, joined rows, ...], filled expert by expert."""
        source, tensors = self._source, mapping.tensors
        firsts = [source.read(row[0]) for row in tensors]
        rows, rest = [first.shape[0] for first in firsts], firsts[0].shape[1:]
        count = len(tensors[0])
        if (count, sum(rows), *rest) != param.whole_shape:
            param = _UNCUT
        cuts = param.cuts_of(1, rows)
        chosen = [e for cut in param.cuts_of(0, [count]) for r in cut.ranges for e in range(*r)]
        shape = (len(chosen), sum(cut.size for cut in cuts), *param.shape[2:]) if param.cuts else (
            count, sum(rows), *rest
        )  # fmt: skip
        out = self._buffer(mapping, firsts[0], shape)
        for place, expert in enumerate(chosen):
            parts = out[place].split_with_sizes([cut.size for cut in cuts])
            for part, first, cut, row in zip(parts, firsts, cuts, tensors, strict=True):
                value = source.read(row[expert])
                _check_kind(row[expert], value, part)
                if value.shape != first.shape:
                    wanted = list(first.shape)
                    raise ValueError(f"{row[expert]} is {list(value.shape)}, not {wanted}")
                value = replace(cut, dim=0).of(value)
                for other in param.cuts:
                    value = replace(other, dim=other.dim - 1).of(value) if other.dim > 1 else value
                part.copy_(value)
        return out


_UNCUT = Param(())


def _check_kind(name: str, value: Tensor, like: Tensor) -> None:
    """ValueError for integers or 8 bit floats among other floats: they have scales of their own."""
    kinds = {(one.is_floating_point(), one.dtype.itemsize == 1) for one in (value, like)}
    if len(kinds) > 1:
        raise ValueError(f"{name} is of {value.dtype}, another part of {like.dtype}")


def concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """As recipes join tensors."""
    return torch.cat(list(tensors), dim)
