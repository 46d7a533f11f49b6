"""Pipeline stages: which layers of a decoder each has, and what they hand to each other.

A step passes through the stages in order. Each hands the residual stream of all tokens to the next,
with what earlier layers have left for later ones. The last hands logits and hidden states back to
rank 0, which samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from radixlm.arch.spec import Decoder
from radixlm.base.env import PP_LAYER_PARTITION
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.distributed.groups import Ranks
from radixlm.layers.block import BlockLayer
from radixlm.layers.module import Module
from radixlm.layers.moe import MoeLayer
from radixlm.models.kv_groups import source_of
from radixlm.pools.group import KvGroup
from radixlm.step.batch import ForwardBatch, LayerScratch
from radixlm.step.result import HIDDEN, LOGITS, TAPS

if TYPE_CHECKING:
    from radixlm.models.decoder import DecoderModel

RESIDUAL = "x"  # the name of the residual stream among what is handed over
_SCRATCH = ("per_layer_TLP", "embeds_TD", "router_TR", "deferred_TD", "sums_TND")


class Stage(Record):
    """The layers [first, end) of a decoder of ``num_layers``."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def groups(self, groups: Sequence[KvGroup]) -> tuple[KvGroup, ...]:
        """The KV groups with the layers of this stage only; all groups stay, so that page tables
        are the same on all ranks."""
        return tuple(
            msgspec.structs.replace(group, layers=tuple(n for n in group.layers if n in self))
            for group in groups
        )


def stage_of(decoder: Decoder, ranks: Ranks, costs: Callable[[], Sequence[float]]) -> Stage:
    """This rank's stage. ``costs``: of each layer, then of the head. ConfigError for more stages
    than the model can be divided into."""
    count, place = len(decoder.blocks), ranks.place
    if place.pp == 1:
        return Stage(0, count, count)
    cuts = possible_cuts(decoder)
    if place.pp > len(cuts) + 1:
        raise ConfigError(
            f"--pp-size {place.pp}: this model can be divided into at most {len(cuts) + 1} stages; "
            f"use --pp-size {len(cuts) + 1}"
        )
    bounds = _given_bounds(count, place.pp, cuts) or split_layers(costs(), cuts, place.pp)
    return Stage(bounds[place.stage], bounds[place.stage + 1], count)


def possible_cuts(decoder: Decoder) -> list[int]:
    """The layers before which a stage may begin: not between a layer and one that reads its keys
    and values."""
    if (decoder.cycles or decoder.message_loop) is not None:  # layers run several times, in turns
        return []
    layers = range(len(decoder.blocks))
    shared = [(source_of(decoder, n), n) for n in layers if decoder.blocks[n].attention is not None]
    return [n for n in layers[1:] if all(not source < n <= reader for source, reader in shared)]


def split_layers(costs: Sequence[float], cuts: Sequence[int], num_stages: int) -> list[int]:
    """The bounds of the stages whose most expensive is the cheapest; of equal splits, the one with
    the earliest cuts. ``costs``: of each layer, then of what only the last stage has."""
    count = len(costs) - 1
    ends = [*cuts, count]

    def cost(first: int, end: int) -> float:
        return sum(costs[first : end if end < count else None])

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return cost(first, count), (count,)
        options = []
        for end in ends:
            if first < end and sum(e > end for e in ends) >= stages - 1:
                rest, bounds = best(end, stages - 1)
                options.append((max(cost(first, end), rest), (end, *bounds)))
        return min(options)

    return [0, *best(0, num_stages)[1]]


def _given_bounds(count: int, num_stages: int, cuts: Sequence[int]) -> list[int]:
    """The bounds that RADIXLM_PP_LAYER_PARTITION gives; [] without it."""
    text = PP_LAYER_PARTITION.get()
    if not text:
        return []
    parts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    bounds = [0, *accumulate(parts)]
    if len(parts) != num_stages or min(parts) < 1 or bounds[-1] != count:
        even = [count // num_stages + (n < count % num_stages) for n in range(num_stages)]
        raise ConfigError(
            f"RADIXLM_PP_LAYER_PARTITION={text}: the numbers of layers of {num_stages} stages are "
            f"needed, {count} together, such as {','.join(map(str, even))}"
        )
    if wrong := [n for n in bounds[1:-1] if n not in cuts]:
        raise ConfigError(
            f"RADIXLM_PP_LAYER_PARTITION={text}: no stage can begin with layer {wrong[0]}, which "
            f"needs keys of earlier ones; it can with {', '.join(map(str, cuts))}"
        )
    return bounds


def layer_costs(blocks: Sequence[Module], head: int) -> list[float]:
    """Weights that each block reads for a token, then ``head``, those of the output head."""
    return [sum(_weights(layer) for _, layer in block.layers()) for block in blocks] + [head]


def _weights(layer: Module) -> float:
    total = sum(torch.Size(param.shape).numel() for param in layer.own_params().values())
    if isinstance(layer, MoeLayer):
        return total * layer.spec.top_k / layer.spec.experts
    return total


class LeftOutBlock(BlockLayer):
    """Stands for a block of another stage."""

    def __init__(self) -> None:
        self.mixer = None

    def finish(self) -> None:
        pass


class Pipeline:
    """What the ranks of a chain of stages hand to each other. Messages between two ranks come in
    order: of each step what the next stage needs, and what rank 0 needs of the last."""

    def __init__(self, ranks: Ranks) -> None:
        self._group, self.place = ranks.stages, ranks.place
        self.has_taps = False  # whether a drafter on rank 0 reads hidden states
        self.confirms = False  # whether the last stage tells rank 0 of each step that it is done
        self._num_steps = 0

    @property
    def is_first(self) -> bool:
        return self.place.is_first_stage

    @property
    def is_last(self) -> bool:
        return self.place.is_last_stage

    @property
    def num_stages(self) -> int:
        return self.place.pp

    @cached_property
    def taking(self) -> ThreadPoolExecutor:
        """Of rank 0: the thread that takes results. One for all runners: a new one's come after
        those of the steps that the runner before it had in flight."""
        return ThreadPoolExecutor(1, "results")

    def step(
        self, model: DecoderModel, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """This stage's part of a step. Only the last stage has hidden states and logits; rank 0
        gets them by ``take_result``."""
        self.count_step()
        if not self.is_last:
            model.forward(batch)
            return None, None
        self.begin(batch)
        hidden_TD, logits_RV = model.step_alone(batch, need_hidden)
        self.give_results(logits_RV, hidden_TD, batch.taps_TN)
        return hidden_TD, logits_RV

    def count_step(self) -> None:
        self._num_steps += 1

    @property
    def done(self) -> str:
        """The kind of result that says that all stages have computed the last step."""
        return f"done {self._num_steps}"

    def begin(self, batch: ForwardBatch) -> None:
        """Receive what the stage before has left, unless that has been done."""
        batch.leaves_taps = True  # the other ranks do not know whether drafts rest
        if self.is_first or batch.carried:
            return
        where = batch.token_ids_T.device
        before = self._receive(self.place.stage - 1)
        batch.carried = {name: one.to(where) for name, one in before}
        batch.taps_TN = batch.carried.pop(TAPS, None)
        _restore(batch.scratch, batch.carried)

    def hand_on(self, batch: ForwardBatch, x: Tensor, kept: dict[int, Tensor]) -> None:
        """Send the residual stream and what later layers read to the next stage."""
        left = {RESIDUAL: x, **{f"kept {n}": one for n, one in kept.items()}}
        if batch.taps_TN is not None:
            left[TAPS] = batch.taps_TN
        self._send(self.place.stage + 1, {**left, **_left(batch.scratch)})

    def give_results(
        self, logits_RV: Tensor | None, hidden_TD: Tensor | None, taps_TN: Tensor | None
    ) -> None:
        """Of the last stage: send what a step has given to rank 0."""
        for kind, result in ((LOGITS, logits_RV), (HIDDEN, hidden_TD), (TAPS, taps_TN)):
            if result is not None:
                self.give_result(kind, result)
        if self.confirms:
            self.give_result(self.done, torch.empty(0))

    def give_result(self, kind: str, result: Tensor) -> None:
        """Send a result to rank 0."""
        if self.place.tp_rank == 0:
            self._send(0, {kind: result})

    def take_result(self, kind: str, stage: int = -1) -> Tensor:
        """Of rank 0: the next result of this kind, of the last stage unless one is given; what
        nobody asks for is passed over. They come step by step: logits, hidden states, what a
        drafter reads, experts that tokens chose, then the logits of prompt tokens, as far as they
        are wanted."""
        while True:
            ((found, result),) = self._receive(stage % self.place.pp)
            if found == kind:
                return result

    def _send(self, to: int, tensors: dict[str, Tensor]) -> None:
        heads = [
            (name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for name, one in tensors.items()
        ]
        head = torch.frombuffer(bytearray(msgspec.msgpack.encode(heads)), dtype=torch.uint8)
        self._group.send(torch.tensor([len(head)]), to)
        self._group.send(head, to)
        for one in tensors.values():
            self._group.send(one.cpu(), to)

    def _receive(self, source: int) -> Iterator[tuple[str, Tensor]]:
        receive = self._group.receive
        length = int(receive((1,), torch.int64, source))
        data = receive((length,), torch.uint8, source).numpy().tobytes()
        heads = msgspec.msgpack.decode(data, type=list[tuple[str, str, tuple[int, ...]]])
        for name, dtype, shape in heads:
            yield name, receive(shape, getattr(torch, dtype), source)


def kept_of(carried: dict[str, Tensor]) -> dict[int, Tensor]:
    """Residual streams of earlier layers that later ones read, by layer."""
    named = (name.split() for name in carried)
    return {int(words[1]): carried[" ".join(words)] for words in named if words[0] == "kept"}


def _left(scratch: LayerScratch) -> dict[str, Tensor]:
    """What layers have left for later ones."""
    left = {name: getattr(scratch, name) for name in _SCRATCH}
    chosen = {f"chosen {row}": one for row, one in scratch.chosen_tokens.items()}
    latents = {f"latents {width}": one for width, one in scratch.latents.items()}
    return {name: one for name, one in left.items() if one is not None} | chosen | latents


def _restore(scratch: LayerScratch, carried: dict[str, Tensor]) -> None:
    for name, tensor in carried.items():
        if name in _SCRATCH:
            setattr(scratch, name, tensor)
        elif name.startswith("chosen "):
            scratch.chosen_tokens[int(name.split()[1])] = tensor
        elif name.startswith("latents "):
            scratch.latents[int(name.split()[1])] = tensor
