"""A PEFT adapter, read from its folder, checked against a model and laid out by its layers.

Legend: R rank, I input channels, O output channels, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record, replace
from radixlm.kernels.ops.lora import AdapterPart, LoraPart, TableRows
from radixlm.layers.latent import UpProjection
from radixlm.layers.linear import Linear
from radixlm.layers.placement import Ranges
from radixlm.lora.config import LoraConfig, read_lora_config
from radixlm.lora.targets import EMBED, HEAD, KEY, VALUE, AdapterTargets, Target, place
from radixlm.lora.tensors import (
    BASE,
    AdapterReader,
    ModuleTensors,
    copied_tables,
    count_of,
    dtype_name,
    find_file,
    group_tensors,
    open_adapter,
    some_of,
)
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)

ROWS_OF_PART = 64  # of a weight that the adapter has whole


class LoraLimits(Record):
    """What --max-lora-rank and --lora-target-modules allow; None: anything."""

    max_rank: int | None = None
    modules: tuple[str, ...] | None = None


class Adapter(Record, eq=False):
    """A checked adapter: ``parts`` by the path of the layer that they change. ``digest``: 32 hex
    digits of all that its results depend on; of a rank that has a part of the model, another where
    it ``has_weights``: changes of the model's own."""

    path: str
    digest: str
    config: LoraConfig
    parts: Mapping[str, tuple[AdapterPart, ...]]
    modules: tuple[str, ...]  # kinds of modules, such as q_proj
    max_rank: int
    num_bytes: int
    has_weights: bool = False


def read_adapter(
    folder: str | Path, targets: AdapterTargets, limits: LoraLimits | None = None
) -> Adapter:
    """The adapter of ``folder`` for the model of ``targets``. CheckpointError for what cannot be
    applied exactly, with what works instead: every tensor must have a place in the model."""
    folder = Path(folder).expanduser()
    config = read_lora_config(folder)
    where = find_file(folder)
    source = open_adapter(folder)
    modules = group_tensors(source, where, config)
    reader = _PartReader(source, where, config, modules, targets)
    missing = [module for module, tensors in modules.items() if not tensors.targets]
    if missing:
        base = f" (trained on {config.base_model})" if config.base_model else ""
        raise CheckpointError(
            f"{where}: {count_of(missing)} without a place in the model{base}: {some_of(missing)}: "
            f"{targets.why_not(modules[missing[0]].name)}"
        )
    left_out = [
        n for n in config.unsaved(t.name for t in modules.values() if t.saved) if targets.has(n)
    ]
    if left_out or (config.tokens and not any(t.tokens for t in modules.values())):
        key = "modules_to_save" if left_out else "trainable_token_indices"
        raise CheckpointError(f"{where}: {key} names {some_of(left_out) or 'rows'} that it lacks")
    _check_limits(where, modules, config, limits or LoraLimits())
    _check_copies(where, source, targets)
    parts: dict[str, list[AdapterPart]] = {}
    for module in sorted(modules):
        try:
            for path, part in reader.parts_of(module):
                parts.setdefault(path, []).append(part)
        except ValueError as error:
            raise CheckpointError(f"{where}: {module}: {error}") from error
    ordered = {path: tuple(sorted(ps, key=_position)) for path, ps in sorted(parts.items())}
    return Adapter(
        str(folder), _digest(ordered, config.invocation), config, ordered, kinds_of(modules),
        max((config.rank_of(t.name) for t in modules.values() if t.a), default=0),
        sum(part.num_bytes for ps in ordered.values() for part in ps),
        any(t.magnitude or t.saved or t.whole_bias for t in modules.values()),
    )  # fmt: skip


def local_parts(adapter: Adapter, targets: AdapterTargets) -> dict[str, Sequence[AdapterPart]]:
    """What of the adapter this rank's parts of the layers need."""
    found: dict[str, Sequence[AdapterPart]] = {}
    for path, parts in adapter.parts.items():
        rows = targets.rows_of(path)
        found[path] = [
            one
            for part in parts
            for one in (part.cut(rows) if rows and isinstance(part, LoraPart) else [part])
        ]
    return found


def kinds_of(modules: Mapping[str, ModuleTensors]) -> tuple[str, ...]:
    """The last words of modules' names: q_proj, down_proj."""
    return tuple(sorted({tensors.name.rpartition(".")[2] for tensors in modules.values()}))


class _PartReader(AdapterReader):
    """Reads and places the tensors of modules."""

    def __init__(
        self,
        source: TensorSource,
        where: Path,
        config: LoraConfig,
        modules: Mapping[str, ModuleTensors],
        targets: AdapterTargets,
    ) -> None:
        super().__init__(source, where)
        self._config, self._modules, self._model = config, modules, targets
        self._widths: dict[str, dict[int, int]] = {}  # rows of a layer's modules in the adapter
        for module, tensors in modules.items():
            tensors.targets = self._targets(tensors, module.count(BASE))
            name = tensors.b or tensors.saved or tensors.whole_bias  # "": rows of a table
            for target in (t for t in tensors.targets if name and not t.widths):
                num_rows = len(self.read(name))
                self._widths.setdefault(target.path, {})[target.part] = num_rows

    def _targets(self, tensors: ModuleTensors, depth: int) -> list[Target]:
        """The places of a module, or of one of its parameters. Those that are targeted lie in
        wrappers, the first innermost: ``depth`` others are around this one. Where the config names
        none, the tensors' sizes tell which it is."""
        found = self._model.find(tensors.name)
        if found or not tensors.a or not tensors.b:
            return found
        sizes = self.read(tensors.a, 2).shape[1], self.read(tensors.b, 2).shape[0]
        params = {f"{tensors.name}.{n}": t for n, t in self._model.parameters(tensors.name).items()}
        wrapped = [name for name in params if self._config.wraps(name)]
        chosen = wrapped[::-1][depth : depth + 1]
        for name in [*chosen, *params]:
            own = params[name].in_features, params[name].out_features
            if sizes in (own, own[::-1]):
                tensors.name = name
                return [params[name]]
        return []

    def parts_of(self, module: str) -> list[tuple[str, AdapterPart]]:
        """(path, part) of each layer that the module is in. ValueError if it does not fit."""
        tensors = self._modules[module]
        if tensors.tokens:
            return self._token_rows(tensors)
        if tensors.saved:
            return list(self._saved(tensors))
        if not tensors.a:
            return self._bias_alone(tensors)
        a_RI, b_OR = self.read(tensors.a, 2), self.read(tensors.b, 2)
        target, num_out = tensors.targets[0], len(b_OR)
        rank, wanted = len(a_RI) / max(1, target.num_blocks), self._config.rank_of(tensors.name)
        if len(a_RI) != b_OR.shape[1]:
            raise ValueError(f"lora_A is {list(a_RI.shape)}, lora_B {list(b_OR.shape)}")
        if rank != wanted:
            raise ValueError(f"its tensors have rank {rank:g}, adapter_config.json says {wanted}")
        self._check_kind(tensors)
        scale = self._config.scale_of(tensors.name)
        if target.num_blocks:
            return self._stacked(target, LoraPart(a_RI, b_OR, scale))
        names = (tensors.bias, tensors.magnitude, tensors.whole_bias)
        bias_O, magnitude_O, whole_O = (self.vector(name, num_out) for name in names)
        whole = LoraPart(a_RI, b_OR, scale, 0, bias_O, magnitude_O, whole_O)
        return self._all_placed(tensors, whole)

    def _bias_alone(self, tensors: ModuleTensors) -> list[tuple[str, AdapterPart]]:
        """A trained bias of a layer that has no other change."""
        if not all(isinstance(self._model.sites.get(t.path), Linear) for t in tensors.targets):
            raise ValueError("a trained bias alone works of linear layers only")
        bias_O, num_in = self.read(tensors.whole_bias, 1).float(), tensors.targets[0].in_features
        a_1I, b_O1 = torch.zeros(1, num_in), torch.zeros(len(bias_O), 1)
        return self._all_placed(tensors, LoraPart(a_1I, b_O1, 1.0, 0, None, None, bias_O))

    def _all_placed(self, tensors: ModuleTensors, whole: LoraPart) -> list[tuple[str, AdapterPart]]:
        """The part in each layer that has some of the module's outputs."""
        found: list[tuple[str, AdapterPart]] = []
        covered = torch.zeros(len(whole.b_OR), dtype=torch.bool)
        for one in tensors.targets:
            part = self._placed(one, whole, covered)
            if part is not None:
                found += self._halved(one, part)
        _check_covered(covered)
        return found

    def _check_kind(self, tensors: ModuleTensors) -> None:
        """ValueError for what is not supported of a kind of layers."""
        paths = [target.path for target in tensors.targets]
        if tensors.is_table != (paths == [EMBED]):
            raise ValueError("lora_embedding_A is of token tables, lora_A of linear layers")
        if paths == [EMBED] and self._config.invocation:
            raise ValueError("a token table cannot wait for alora_invocation_tokens")
        is_linear = isinstance(self._model.sites.get(paths[0]), Linear)
        if not is_linear and (tensors.magnitude or tensors.bias or tensors.whole_bias):
            raise ValueError(
                "DoRA and biases of the head, the token table, experts and kv_b are not supported; "
                "what works: plain LoRA of these"
            )
        if bool(tensors.magnitude) != self._config.is_dora:
            raise ValueError(f"use_dora is {self._config.is_dora}, its magnitude vector says other")

    def _halved(self, target: Target, part: LoraPart) -> list[tuple[str, AdapterPart]]:
        """The part, or its halves for keys and values."""
        layer = self._model.sites.get(target.path)
        if not isinstance(layer, UpProjection):
            return [(target.path, part)]
        path = target.path.removesuffix(KEY)
        halves = zip((KEY, VALUE), layer.split(part), strict=True)
        return [(path + half, one) for half, parts in halves for one in parts]

    def _stacked(self, target: Target, whole: LoraPart) -> list[tuple[str, AdapterPart]]:
        """A part for each expert. PEFT has A of one expert after another, B's columns rank by rank
        of all experts; both the other way round where the parameter is [E, I, O]."""
        (rows, num_in), num_out, count = whole.a_RI.shape, len(whole.b_OR), target.num_blocks
        a_ERI = whole.a_RI.view(count, rows // count, num_in)
        b_EOR = whole.b_OR.view(num_out, rows // count, count).permute(2, 0, 1)
        if a_ERI.shape[2] != target.in_features:
            a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
        found: list[tuple[str, AdapterPart]] = []
        covered = torch.zeros(b_EOR.shape[1], dtype=torch.bool)
        for block, (a_RI, b_OR) in enumerate(zip(a_ERI, b_EOR, strict=True)):
            one = replace(target, block=block)
            part = self._placed(one, LoraPart(a_RI, b_OR, whole.scale), covered)
            if part is not None:
                found.append((target.path, part))
        _check_covered(covered)
        return found

    def _token_rows(self, tensors: ModuleTensors) -> list[tuple[str, AdapterPart]]:
        """Replaced rows of a token table, and of a head that shares it."""
        ids = list(self._config.tokens_of(tensors.name))
        rows_ND = self.read(tensors.tokens, 2).float()
        paths = [target.path for target in tensors.targets]
        target = tensors.targets[0]
        dim, vocab = sorted((target.in_features, target.out_features))
        if paths not in ([EMBED], [HEAD]) or rows_ND.shape != (len(ids), dim):
            raise ValueError(f"its {list(rows_ND.shape)} are no rows of {len(ids)} tokens")
        if len(set(ids)) < len(ids) or max(ids) >= vocab:
            raise ValueError(f"trainable_token_indices must be different ids below {vocab}")
        found: list[tuple[str, AdapterPart]] = []
        if paths == [EMBED]:
            found.append((EMBED, TableRows(torch.tensor(ids), rows_ND)))
        if paths == [HEAD] or self._model.is_tied:
            order = sorted(range(len(ids)), key=ids.__getitem__)
            for run in _runs([ids[i] for i in order]):
                rows = rows_ND[[order[i] for i in run]]
                found += [(HEAD, one) for one in self._replaced(HEAD, ids[order[run[0]]], rows)]
        return found

    def _saved(self, tensors: ModuleTensors) -> Iterator[tuple[str, AdapterPart]]:
        """A whole weight in the place of the model's."""
        weight_OI = self.read(tensors.saved, 2).float()
        bias_O = self.vector(tensors.whole_bias, len(weight_OI))
        for target in tensors.targets:
            path, layer = target.path, self._model.sites.get(target.path)
            size = (target.out_features, target.in_features)
            if path == EMBED and weight_OI.shape == size[::-1]:
                yield path, TableRows(None, weight_OI)
                continue
            if path == EMBED or (path == HEAD and weight_OI.shape != size):
                raise ValueError(
                    f"{tensors.saved} is {list(weight_OI.shape)}, the model's table has "
                    f"{max(size)} tokens; what works: an adapter that adds none"
                )
            if path != HEAD and not isinstance(layer, Linear):
                raise ValueError("only linear layers, head and token table may be saved whole")
            if weight_OI.shape[1] != target.in_features:
                raise ValueError(f"its weight has {weight_OI.shape[1]} inputs, not {size[1]}")
            where = place(target, self._widths_of(target, len(weight_OI)))
            if where is None:
                continue
            rows_OI, biases = weight_OI, bias_O
            if where.rows_O is not None:
                if (where.rows_O < 0).any():
                    raise ValueError("its rows lie between those of others")
                rows_OI = weight_OI[where.rows_O]
                biases = None if bias_O is None else bias_O[where.rows_O]
            if where.columns_I is not None:
                rows_OI = rows_OI[:, where.columns_I]
            if where.factors_O is not None:
                rows_OI = rows_OI * where.factors_O.float()[:, None]
                biases = None if biases is None else biases * where.factors_O.float()
            for part in self._replaced(path, where.first, rows_OI, biases):
                yield path, part

    def _replaced(
        self, path: str, first: int, rows_OI: Tensor, bias_O: Tensor | None = None
    ) -> Iterator[LoraPart]:
        """What makes these rows of a layer's weight from output ``first`` on: differences, a few
        rows at a time, in float32."""
        layer = self._model.sites.get(path)
        change_OI, bias_change = rows_OI, bias_O
        span = first, len(rows_OI)
        if isinstance(layer, Linear) and hasattr(layer, "packed"):
            rows = layer.place.rows
            change_OI = rows_OI - _of_rank(layer.packed.unpack(), rows, *span).float().cpu()
            bias_change = None if bias_O is None else _bias_change(layer, bias_O, first)
        elif self._model.has_end(path):
            weight = self._model.end_weight(path)
            if weight is None:
                raise ValueError("the model's head is quantized; what works: a plain one")
            # a tied head is read from the table, which is whole
            rows = () if path == EMBED or self._model.is_tied else self._model.rows_of(path)
            change_OI = rows_OI - _of_rank(weight, rows, *span).float().cpu()
            own_O = None if bias_O is None or path == EMBED else self._model.head_bias()
            if bias_O is not None and own_O is not None:
                bias_change = bias_O - _of_rank(own_O, rows, *span).cpu()
        for at in range(0, len(change_OI), ROWS_OF_PART):
            a_RI = change_OI[at : at + ROWS_OF_PART].contiguous()
            bias = None if bias_change is None else bias_change[at : at + len(a_RI)].contiguous()
            yield LoraPart(a_RI, torch.eye(len(a_RI)), 1.0, first + at, bias)

    def _placed(self, target: Target, part: LoraPart, covered: Tensor) -> LoraPart | None:
        """The module's rows in the layer. ``part``: gain is its magnitude, own the bias that takes
        the place of the layer's."""
        a_RI, b_OR, vectors = part.a_RI, part.b_OR, list(part.vectors)
        if a_RI.shape[1] != target.in_features:
            raise ValueError(
                f"lora_A is {list(a_RI.shape)}, the layer has {target.in_features} inputs"
            )
        where = place(target, self._widths_of(target, b_OR.shape[0]))
        if where is None:
            return None
        is_mine = torch.ones(b_OR.shape[0], dtype=torch.bool)
        if where.rows_O is None:
            covered[:] = True
        else:
            is_mine = where.rows_O >= 0
            rows_O = where.rows_O.clamp(min=0)
            covered[rows_O[is_mine]] = True
            b_OR = b_OR[rows_O] * is_mine[:, None]
            vectors = [None if v is None else v[rows_O] * is_mine for v in vectors]
        if where.columns_I is not None:
            a_RI = a_RI[:, where.columns_I]
        if where.factors_O is not None:
            factors_O = where.factors_O.float()
            b_OR = b_OR.float() * factors_O[:, None]
            vectors = [None if v is None else v * factors_O for v in vectors]
        own = [t.clone(memory_format=torch.contiguous_format) for t in (a_RI, b_OR)]
        layer = self._model.sites.get(target.path)
        bias_O = vectors[0]
        if vectors[2] is not None and isinstance(layer, Linear):
            if not part.scale:
                raise ValueError("a trained bias needs a lora_alpha other than 0")
            change_O = _bias_change(layer, vectors[2], where.first) * is_mine / part.scale
            bias_O = change_O if bias_O is None else bias_O + change_O
        placed = LoraPart(own[0], own[1], part.scale, where.first, bias_O, block=target.block)
        if vectors[1] is None or not isinstance(layer, Linear):
            return placed
        return _with_gain(placed, vectors[1].abs(), is_mine, layer)

    def _widths_of(self, target: Target, num_rows: int) -> tuple[int, ...]:
        """Outputs of all modules of the layer; ValueError if this module's do not fit in."""
        widths = target.widths
        if not widths:
            given = self._widths[target.path]
            widths = tuple(given.get(part, 0) for part in range(target.num_parts))
            if len(given) < target.num_parts:
                raise ValueError("the model joins it with modules that the adapter does not have")
        if widths[target.part] != num_rows:
            raise ValueError(f"lora_B has {num_rows} outputs, the module {widths[target.part]}")
        if target.recipe is None and sum(widths) != target.out_features:
            raise ValueError(f"lora_B has {num_rows} outputs, the layer {target.out_features}")
        return widths


def _check_covered(covered: Tensor) -> None:
    if not covered.all():
        raise ValueError("a part of its outputs is in a layer that takes no adapter")


def _of_rank(own: Tensor, rows: Ranges, first: int, count: int) -> Tensor:
    """``count`` outputs of a layer from ``first`` on, of which ``own`` holds this rank's ``rows``.
    The others are zeros: what is made of them is cut away later."""
    if not rows:
        return own[first : first + count]
    whole, at = own.new_zeros(count, *own.shape[1:]), 0
    for begin, end in rows:
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            whole[low - first : high - first] = own[at + low - begin : at + high - begin]
        at += end - begin
    return whole


def _bias_change(layer: Linear, whole_O: Tensor, first: int) -> Tensor:
    """What a trained bias adds to the layer's own, from output ``first`` on. ValueError if it has
    none."""
    if not hasattr(layer, "packed"):
        return whole_O  # the model has no weights: an adapter is only inspected
    own_O = layer.own_bias()
    if own_O is None:
        raise ValueError("its bias was trained, the model's layer has none")
    return whole_O - _of_rank(own_O, layer.place.rows, first, len(whole_O)).cpu()


def _with_gain(part: LoraPart, magnitude_O: Tensor, is_mine: Tensor, layer: Linear) -> LoraPart:
    """DoRA: each row of W + scale * B A gets the length ``magnitude``. Other modules' rows stay."""
    if not hasattr(layer, "packed"):
        return part  # the model has no weights: an adapter is only inspected
    span = layer.place.rows, part.first, len(magnitude_O)
    whole_OI = _of_rank(layer.packed.unpack(), *span).float().cpu()
    whole_OI = whole_OI + part.scale * (part.b_OR.float() @ part.a_RI.float())
    gain_O = torch.where(is_mine, magnitude_O / whole_OI.norm(dim=1), 1.0)
    own_O = layer.own_bias()
    own_O = None if own_O is None else _of_rank(own_O, *span).cpu().contiguous()
    return LoraPart(
        part.a_RI, part.b_OR, part.scale, part.first, part.bias_O, gain_O.contiguous(), own_O
    )


def _check_copies(where: Path, source: TensorSource, targets: AdapterTargets) -> None:
    """Weights of the base model in the adapter's file must be those of the model."""
    for name, module in copied_tables(source):
        paths = [target.path for target in targets.find(module)]
        is_one = len(paths) == 1 and not (paths == [HEAD] and targets.rows_of(HEAD))
        mine, copied = targets.end_weight(paths[0]) if is_one else None, source.read(name)
        if mine is None:
            log.warning("%s: %s is not compared with the model", where, name)
        elif mine.shape != copied.shape or not torch.equal(mine, copied.to(mine.dtype)):
            raise CheckpointError(
                f"{where}: {name} {list(copied.shape)} is not the model's {list(mine.shape)}; what "
                "works: an adapter that adds no tokens and changes no whole table"
            )


def _check_limits(
    where: Path, modules: Mapping[str, ModuleTensors], config: LoraConfig, limits: LoraLimits
) -> None:
    rank = max((config.rank_of(t.name) for t in modules.values() if t.a), default=0)
    if limits.max_rank is not None and rank > limits.max_rank:
        raise CheckpointError(
            f"{where}: rank {rank} is above the limit of {limits.max_rank} (--max-lora-rank {rank})"
        )
    if limits.modules is None or "all" in limits.modules:
        return
    outside = [kind for kind in kinds_of(modules) if kind not in limits.modules]
    if outside:
        raise CheckpointError(
            f"{where}: changes {', '.join(outside)}, --lora-target-modules allows "
            f"{', '.join(limits.modules)}"
        )


def _digest(parts: Mapping[str, Sequence[AdapterPart]], invocation: tuple[int, ...]) -> str:
    """Of places, scales, shapes, dtypes and bytes."""
    total = blake2b(repr(invocation).encode() if invocation else b"", digest_size=16)
    for path, of_layer in parts.items():
        for part in of_layer:
            place, tensors = part.content
            shapes = [(dtype_name(t), *t.shape) for t in tensors]
            total.update(repr((path, place, shapes)).encode())
            for tensor in tensors:  # hashlib lets other threads run
                flat = tensor.contiguous().view(-1)  # a transposed row has another last stride
                total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _position(part: AdapterPart) -> tuple[int, int, int]:
    return (part.block, part.first, len(part.b_OR)) if isinstance(part, LoraPart) else (0, 0, 0)


def _runs(ids: Sequence[int]) -> Iterator[list[int]]:
    """The places of ascending ids, cut where they are not next to each other."""
    run: list[int] = []
    for index, one in enumerate(ids):
        if run and one != ids[index - 1] + 1:
            yield run
            run = []
        run.append(index)
    yield run
