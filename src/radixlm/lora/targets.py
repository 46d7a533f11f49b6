"""The layers of a model that adapters may change, found by the names of the base model's
modules. Several modules (q, k, v) may make one layer, and one module (``qkv_proj``) a whole one.

Legend: I input channels, O output channels, N outputs of the module in the checkpoint.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.names import PREFIXES, spellings
from radixlm.arch.recipes import GatedQkv, Recipe
from radixlm.base.record import Record
from radixlm.layers.latent import UpProjection
from radixlm.layers.linear import Adaptable, Linear
from radixlm.layers.modality_moe import ModalityMoeLayer
from radixlm.layers.moe import MoeLayer
from radixlm.layers.placement import CutLinear, Ranges
from radixlm.quant.param import Shard
from radixlm.weights.mapper import LoadableModel, ParamMapping, WeightsMapper

# layers that do not run on the rows of the step's tokens: media's, or a segment's
_NOT_BY_TOKEN = re.compile(r"\.(cross\.kv|values\.step|x_projs?(\.\d+)?|dt_projs?(\.\d+)?)$")


HEAD, EMBED = "head", "embed"  # paths
KEY, VALUE = ".key", ".value"  # of the halves of latent attention's kv_b


class Target(Record):
    """A module of the base model as a part of a layer: the ``part``-th of the tensors that are
    joined along the rows of layer ``path``, ``widths[part]`` rows of it. ``widths`` is () where
    only the adapter tells them. ``block``: of this expert; of all ``num_blocks`` experts, whose
    matrices are one parameter, where that is not 0."""

    path: str
    in_features: int
    out_features: int
    part: int
    num_parts: int
    widths: tuple[int, ...]
    recipe: Recipe | None
    block: int = 0
    num_blocks: int = 0


class Placement(Record):
    """Where a module is in its layer: outputs of the layer from ``first`` on are the outputs
    ``rows_O`` of the module (-1: another module's) times ``factors_O``, and its inputs are the
    inputs ``columns_I`` of the module. None: as they are."""

    first: int
    rows_O: Tensor | None = None
    columns_I: Tensor | None = None
    factors_O: Tensor | None = None


class AdapterTargets:
    """What adapters of one model may change, by module name. The layers are numbered (``sites``):
    the step knows them by that. ``whole``: without weights, of a model that has a pipeline stage's
    layers only; the other stages' are then places without a number."""

    def __init__(self, model: LoadableModel, whole: LoadableModel | None = None) -> None:
        mapper = WeightsMapper(model.decoder, ())
        self._prefix = spellings(model.decoder.names, "embed")[0].templates[0].partition(".")[0]
        self._model = model
        self.sites: dict[str, Adaptable] = {}
        self._targets: dict[str, list[Target]] = {}
        self._params: dict[str, dict[str, Target]] = {}  # by module and name of the parameter
        self._others: set[str] = set()  # modules that the model has, but not as such a layer
        self._add_ends(model, mapper)
        own, layers = dict(model.layers()), dict((whole or model).layers())
        by_media = [path for path, one in layers.items() if isinstance(one, ModalityMoeLayer)]
        for path, layer in (layers | own).items():
            if not path.startswith("blocks.") or not layer.own_params():
                continue
            is_by_token = not (_NOT_BY_TOKEN.search(path) or _is_inside(path, by_media))
            if isinstance(layer, Linear) and is_by_token:
                self.sites[path] = layer
                size = (layer.in_features, layer.out_features)
                for mapping in mapper.spellings(path):
                    self._add(path, size, layer.own_params()["weight"].shard, mapping)
            elif isinstance(layer, UpProjection) and is_by_token:
                self.sites |= dict.fromkeys((path + KEY, path + VALUE), layer)
                out, rank = layer.weight.whole_shape
                for mapping in mapper.spellings(path):
                    self._add(path + KEY, (rank, out), None, mapping)
            else:
                if isinstance(layer, MoeLayer) and is_by_token and _takes_adapters(layer):
                    self._add_experts(path, layer, mapper)
                for param in layer.own_params():
                    names = (
                        n for mapping in mapper.spellings(path, param) for n in mapping.names()
                    )
                    self._others.update(name.removesuffix(".weight") for name in names)

        here = set(map(id, own.values()))
        self.own_sites = {path: site for path, site in self.sites.items() if id(site) in here}

    def _add_experts(self, path: str, layer: MoeLayer, mapper: WeightsMapper) -> None:
        """Modules of single experts, and parameters that hold all of them."""
        self.sites |= dict.fromkeys((f"{path}.up", f"{path}.down"), layer)
        for name, param in (("up", layer.up), ("down", layer.down)):
            (count, out, num_in), site = param.whole_shape, f"{path}.{name}"
            shard = param.shard if name == "up" else None
            for mapping in mapper.spellings(path, name):
                for place, rows in enumerate(mapping.tensors) if mapping.is_stacked else ():
                    widths = shard.parts if shard is not None else (out,)
                    for block, tensor in enumerate(rows if mapping.recipe is None else ()):
                        target = Target(
                            site, num_in, out, place, len(mapping.tensors), widths, None, block
                        )
                        self._targets[tensor.removesuffix(".weight")] = [target]
                if mapping.is_stacked:  # transformers 5 has them in one parameter
                    whole, recipe = mapping.tensors[0][0].partition(".experts.")[0], None
                    fused = (
                        "down_proj" if name == "down" else "gate_" * layer.spec.gated + "up_proj"
                    )
                    module = f"{whole}.experts.{fused}"
                elif len(mapping.tensors) == 1:
                    module, recipe = mapping.names()[0].removesuffix(".weight"), mapping.recipe
                else:
                    continue
                target = Target(site, num_in, out, 0, 1, (out,), recipe, 0, count)
                self._targets.setdefault(module, [target])  # where the parameter is its weight
                parent, _, own = module.rpartition(".")
                self._params.setdefault(parent, {}).setdefault(own, target)

    def _add_ends(self, model: LoadableModel, mapper: WeightsMapper) -> None:
        """The output head, and the token table, which are no linear layers of the decoder."""
        decoder = model.decoder
        if decoder.embed_dim or decoder.head_layer is not None or decoder.pool is not None:
            return
        # a head may be a copy of the table: the table's own names come first
        ends = {EMBED: (decoder.vocab, decoder.dim), HEAD: (decoder.dim, decoder.vocab)}
        for path, (num_in, num_out) in ends.items():
            for mapping in mapper.spellings(path):
                name = mapping.tensors[0][0].removesuffix(".weight")
                if mapping.recipe is None and len(mapping.tensors) == 1:
                    target = Target(path, num_in, num_out, 0, 1, (num_out,), None)
                    self._targets.setdefault(name, [target])

    def _add(
        self, path: str, size: tuple[int, int], shard: Shard | None, mapping: ParamMapping
    ) -> None:
        names, shard = (
            [row[0].removesuffix(".weight") for row in mapping.tensors],
            shard or Shard(0),
        )
        parts = shard.parts
        if isinstance(mapping.recipe, GatedQkv) and parts:
            parts = mapping.recipe.widths(parts)
        widths = parts if shard.dim == 0 and len(parts) == len(names) else ()
        if len(names) == 1 and mapping.recipe is None:
            widths = size[1:]
        for part, name in enumerate(names):
            target = Target(path, *size, part, len(names), widths, mapping.recipe)
            targets = self._targets.setdefault(name, [])
            if all(other.path != path for other in targets):  # else another spelling of the same
                targets.append(target)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the token table."""
        return self._model.decoder.tied

    def has_end(self, path: str) -> bool:
        """Whether this rank has loaded the head, or the token table. Models without weights are
        only inspected."""
        name = {HEAD: "packed_head", EMBED: "embed"}.get(path, "")
        return hasattr(self._model, "program") and hasattr(self._model, name)

    def rows_of(self, path: str) -> Ranges:
        """The outputs of a linear layer or the head that this rank has; () for all."""
        site = self.sites.get(path)
        if isinstance(site, Linear):
            return site.place.rows
        if isinstance(site, MoeLayer):
            return site.own_rows(path.endswith(".up"))
        head = getattr(self._model, "packed_head", None) if path == HEAD else None
        return head.place.rows if isinstance(head, CutLinear) else ()

    def end_weight(self, path: str) -> Tensor | None:
        """The weight of the token table or this rank's rows of the head, as the checkpoint has it;
        None where it is not loaded, or quantized."""
        model: Any = self._model
        if not self.has_end(path):
            return None
        is_head = path == HEAD and not model.decoder.tied
        weight: Tensor = (model.packed_head if is_head else model.embed).unpack()
        return weight if not model.context.scheme.head_fmt else None

    def head_bias(self) -> Tensor | None:
        """The bias of this rank's rows of the loaded head, float32 [O]; None without one."""
        model: Any = self._model
        if not model.decoder.head_bias or not self.has_end(HEAD):
            return None
        head = model.packed_head
        own = head.inner if isinstance(head, CutLinear) else head
        bias_O: Tensor = own.run(own.unpack().new_zeros(1, model.decoder.dim))[0].float()
        return bias_O

    def find(self, module: str) -> list[Target]:
        """The places of a module of the base model, whatever prefix its wrapper has put before the
        decoder; [] if it has none."""
        return next((self._targets[n] for n in self._names(module) if n in self._targets), [])

    def has(self, name: str) -> bool:
        """Whether a module has this name, or its name ends in it."""
        return any(f".{one}".endswith(f".{name}") for one in self._targets)

    def parameters(self, module: str) -> dict[str, Target]:
        """The parameters of a module that hold all experts, by name."""
        return next((self._params[n] for n in self._names(module) if n in self._params), {})

    def why_not(self, module: str) -> str:
        """Why a module without a place has none."""
        if any(name in self._others for name in self._names(module)):
            return "this layer of the model takes no adapter"
        near = difflib.get_close_matches(module, self._targets, 1, 0.5)
        return f"the model has no such module{f' (nearest: {near[0]})' if near else ''}"

    def _names(self, module: str) -> Iterable[str]:
        local = self._prefix + "."
        for prefix in (local, *PREFIXES):
            if module.startswith(prefix):
                yield local + module.removeprefix(prefix)
        yield module


def _takes_adapters(layer: MoeLayer) -> bool:
    """Whether the kernels of the experts do; of a model without weights, yes."""
    return not hasattr(layer, "experts") or hasattr(layer.experts, "takes_adapters")


def _is_inside(path: str, parents: Iterable[str]) -> bool:
    return any(path.startswith(f"{parent}.") for parent in parents)


def place(target: Target, widths: tuple[int, ...]) -> Placement | None:
    """Where a module's outputs are, given the outputs of all modules that make the layer; None if
    the layer has none of them. ValueError where its rows and columns do not stay whole."""
    first = sum(widths[: target.part])
    if target.recipe is None:
        return Placement(first)
    rows_O, columns_I, factors_O = _permutation(
        target.recipe, sum(widths), target.in_features, bool(target.num_blocks)
    )
    is_mine = (rows_O >= first) & (rows_O < first + widths[target.part])
    places = is_mine.nonzero()[:, 0]
    if not len(places):
        return None
    begin, end = int(places[0]), int(places[-1]) + 1
    rows_O = torch.where(is_mine[begin:end], rows_O[begin:end] - first, -1)
    is_plain = torch.equal(columns_I, torch.arange(len(columns_I)))
    is_scaled = bool((factors_O != 1).any())
    return Placement(
        begin, rows_O, None if is_plain else columns_I, factors_O[begin:end] if is_scaled else None
    )


@lru_cache(maxsize=64)
def _permutation(
    recipe: Recipe, num_rows: int, num_columns: int, is_stacked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows and columns of a matrix [N, I] a recipe gives, int64 [O] and [I], and what it
    multiplies the rows by, float64 [O]. It is tried on matrices of row and column numbers, also
    transposed, as Conv1D has them. ``is_stacked``: the recipe is of experts' matrices."""
    rows = torch.arange(1.0, num_rows + 1, dtype=torch.float64)[:, None].expand(-1, num_columns)
    columns = torch.arange(1.0, num_columns + 1, dtype=torch.float64).expand(num_rows, -1)
    for matrices in ((rows, columns), (rows.T, columns.T)):
        try:
            ones, made, of_columns = (
                recipe(m[None], _cat)[0] if is_stacked else recipe(m, _cat)
                for m in (torch.ones_like(matrices[0]), *matrices)
            )
        except (RuntimeError, IndexError, ValueError):
            continue
        if made.ndim != 2 or made.shape[1] != num_columns or not (ones != 0).all():
            continue
        made, of_columns = (made / ones).round(), (of_columns / ones).round()
        parts = made[:, 0], of_columns[0], ones[:, 0]
        is_whole = bool((made == parts[0][:, None]).all() and (of_columns == parts[1]).all())
        is_whole &= bool((ones == parts[2][:, None]).all())
        is_whole &= len(parts[0].unique()) == len(made) and len(parts[1].unique()) == num_columns
        if is_whole:
            return parts[0].long() - 1, parts[1].long() - 1, parts[2]
    raise ValueError("its rows are not kept whole in the layer")


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(tensors), dim)
