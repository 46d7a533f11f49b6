"""Where the experts of a model lie, who counts their tokens, and when they move: by the options."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.config.parallel import ParallelConfig
from radixlm.distributed import balance
from radixlm.distributed.balance import Placement
from radixlm.distributed.groups import Ranks
from radixlm.distributed.rebalance import RebalanceOptions, Rebalancer
from radixlm.distributed.record import (
    DEFAULT_STEPS,
    ChoiceReader,
    ExpertRecorder,
    RecorderOptions,
)
from radixlm.engine.model_info import ModelInfo
from radixlm.kernels.cpu.moe import Experts
from radixlm.layers.experts import ExpertSplit, SplitExperts
from radixlm.layers.moe import MoeLayer
from radixlm.models.build import Model, mixtures_of, place_evenly
from radixlm.models.decoder import DecoderModel
from radixlm.parallel.routed import ExpertChoices, RoutedExperts
from radixlm.step.result import CHOICES

log = logging.getLogger(__name__)


def _useless_flags(parallel: ParallelConfig) -> list[str]:
    """What is asked of the experts of a model without any."""
    options = (
        ("ep_size", parallel.ep_size, 1),
        ("moe_dense_tp_size", parallel.moe_dense_tp_size, None),
    )
    return [f"--{n.replace('_', '-')} {value}" for n, value, default in options if value != default]


def records_experts(parallel: ParallelConfig) -> bool:
    """Whether a recorder sees the steps."""
    return bool(
        parallel.expert_distribution_recorder_mode
        or parallel.enable_expert_distribution_metrics
        or parallel.enable_eplb
    )


def _recorder_flag(parallel: ParallelConfig) -> str:
    """The option for which a recorder sees the steps."""
    if parallel.enable_eplb:
        return "--enable-eplb"
    if parallel.expert_distribution_recorder_mode:
        return "--expert-distribution-recorder-mode"
    return "--enable-expert-distribution-metrics"


class _OverStages(Record):
    """The layers with experts of all pipeline stages, numbered in order: those of this stage from
    ``first`` on. ``experts``: how many a layer may have, rising; ``groups``: of each layer."""

    num_layers: int
    first: int
    experts: tuple[int, ...]
    groups: int


def _look_over(mixtures: Sequence[MoeLayer], ranks: Ranks) -> _OverStages:
    counts = sorted({layer.spec.experts for layer in mixtures})
    groups = mixtures[0].spec.groups[0] if mixtures else 0
    mine = [len(mixtures), *((counts[0], counts[-1], groups) if mixtures else (0, 0, 0))]
    rows = torch.tensor([mine])
    if ranks.place.pp > 1:
        rows = ranks.stages.all_gather_rows(rows, (1,) * ranks.place.pp)
    layers = [row for row in rows.tolist() if row[0]]
    experts = sorted({n for row in layers for n in row[1:3]})
    first = int(rows[: ranks.place.stage, 0].sum())
    return _OverStages(
        int(rows[:, 0].sum()), first, tuple(experts), max((row[3] for row in layers), default=1)
    )


class ExpertPlaces:
    """The places of a model's experts on the ranks, and on rank 0 what moves them. ``place`` is
    called while the layers are made, ``finish`` when they are loaded."""

    def __init__(self, parallel: ParallelConfig, ranks: Ranks) -> None:
        self._parallel, self._ranks = parallel, ranks
        self._mixtures: list[MoeLayer] = []  # of this stage
        self._over: _OverStages | None = None
        self._placement: Placement | None = None  # of the layers of all stages
        self.choices: ExpertChoices | None = None

    def place(self, mixtures: Sequence[MoeLayer], ranks: Ranks) -> None:
        """Tell each layer which experts this rank holds; ConfigError for sizes that do not fit."""
        parallel, size = self._parallel, ranks.tp.size
        extra, location = parallel.ep_num_redundant_experts, parallel.init_expert_location
        asked = extra or parallel.enable_eplb or location != "trivial"
        is_fake = parallel.ep_dispatch_algorithm == "fake"
        over = self._look_over(mixtures)
        if not over.num_layers and (extra or location != "trivial"):
            flag = "--ep-num-redundant-experts" if extra else "--init-expert-location"
            raise ConfigError(f"{flag}: the model has no experts to place; leave it out")
        if not over.num_layers and ranks.place.rank == 0:
            for flag in _useless_flags(parallel):
                log.info("%s changes nothing: the model has no experts", flag)
        if not over.num_layers or not (asked or is_fake):
            place_evenly(mixtures, ranks)
            return
        counts = over.experts
        num_slots = counts[-1] + extra
        if len(counts) > 1:
            raise ConfigError(
                f"--ep-num-redundant-experts: layers of {counts[0]} and of {counts[1]} experts "
                "cannot share one placement; leave out the options of expert placement"
            )
        if num_slots % size:
            raise ConfigError(
                f"--ep-num-redundant-experts {extra}: {num_slots} experts do not divide among "
                f"{size} ranks; {extra + -num_slots % size} does"
            )
        groups, nodes = over.groups, parallel.nnodes
        if parallel.eplb_algorithm == "deepseek_hierarchical" and groups % nodes:
            raise ConfigError(
                f"--eplb-algorithm deepseek_hierarchical: {groups} groups of experts do not divide "
                f"among {nodes} nodes; auto works"
            )
        self._mixtures = list(mixtures)
        self._placement = placement = balance.read_location(
            location, over.num_layers, counts[0], num_slots, size, nodes, groups,
            parallel.eplb_algorithm,
        )  # fmt: skip
        starts = tuple(range(0, num_slots + 1, num_slots // size))
        for number, layer in enumerate(mixtures, over.first):
            row = tuple(placement.logical_LP[number].tolist())
            layer.split(ExpertSplit(ranks.tp, starts, row, self._table(number), is_fake))

    def _look_over(self, mixtures: Sequence[MoeLayer]) -> _OverStages:
        """All ranks call it at once."""
        if self._over is None:
            self._over = _look_over(mixtures, self._ranks)
        return self._over

    def _table(self, number: int) -> Tensor:
        """The slots that tokens use, and the numbers of zero experts behind them."""
        placement, how = self._placement, self._parallel.ep_dispatch_algorithm or "static"
        assert placement is not None
        table_VE = balance.dispatch_table(placement, number, how, self._ranks.tp.size)
        layer = self._mixtures[number - self._look_over(self._mixtures).first]
        zeros = torch.arange(layer.spec.zero_experts) + placement.num_slots
        table = torch.from_numpy(table_VE)
        return torch.cat((table, zeros.expand(len(table), -1)), 1).int().contiguous()

    def finish(self, model: Model, info: ModelInfo, tells_requests: bool) -> None:
        """Make what reads the choices of tokens for the recorder and for requests, as the options
        ask; ConfigError for models that have none to read."""
        parallel, place = self._parallel, self._ranks.place
        if not (records_experts(parallel) or tells_requests):
            return
        mixtures, places = mixtures_of(model), info.expert_layers
        over = self._look_over(mixtures)
        if records_experts(parallel) and not over.num_layers:
            raise ConfigError(
                f"{_recorder_flag(parallel)}: the model has no experts that can be recorded; leave "
                "it out"
            )
        if tells_requests and (over.num_layers != len(places) or not places):
            raise ConfigError(
                "--enable-return-routed-experts: the model has no experts that can be told; leave "
                "it out"
            )
        reader = ChoiceReader(mixtures, is_always_on=tells_requests)
        send = recorder = None
        if place.stage > 0 and place.tp_rank == 0 and isinstance(model, DecoderModel):
            assert model.pipeline is not None
            send = partial(model.pipeline.give_result, CHOICES)
        if records_experts(parallel):
            recorder = self._make_recorder(reader, over)
        routed = RoutedExperts(places, info.routed_shape) if tells_requests else None
        self.choices = ExpertChoices(reader, recorder, routed, place.rank == 0, send)

    def _make_recorder(self, reader: ChoiceReader, over: _OverStages) -> ExpertRecorder:
        parallel, num_experts = self._parallel, over.experts[-1]
        placement = self._placement or balance.trivial(over.num_layers, num_experts, num_experts)
        steps = parallel.eplb_rebalance_num_iterations if parallel.enable_eplb else DEFAULT_STEPS
        options = RecorderOptions(
            parallel.expert_distribution_recorder_mode or "",
            parallel.expert_distribution_recorder_buffer_size or steps,
            self._ranks.tp.size if self._placement is not None else 1,
            env.EXPERT_RECORDER_DIR.get(),
            is_always_on=parallel.enable_expert_distribution_metrics or parallel.enable_eplb,
        )
        recorder = ExpertRecorder(reader, placement, options)
        if parallel.enable_eplb:
            self._check_movable()
            recorder.rebalancer = Rebalancer(recorder, self._rebalance_options())
        return recorder

    def _rebalance_options(self) -> RebalanceOptions:
        parallel = self._parallel
        return RebalanceOptions(
            parallel.eplb_rebalance_num_iterations,
            parallel.eplb_rebalance_layers_per_chunk or 0,
            parallel.eplb_min_rebalancing_utilization_threshold,
            parallel.eplb_algorithm,
            parallel.nnodes,
            self._look_over(self._mixtures).groups,
        )

    def _check_movable(self) -> None:
        """All slots of all ranks must have the same form, as one takes the place of another."""
        forms = []
        for layer in self._mixtures:
            pack = layer.experts.pack if isinstance(layer.experts, SplitExperts) else layer.experts
            if not isinstance(pack, Experts):
                raise ConfigError("--enable-eplb: the experts of this model have no kernel that "
                                  "lets them move; leave it out")  # fmt: skip
            forms += [zlib.crc32(pack.form(slot).encode()) for slot in range(pack.num_experts)]
        if not forms:  # of a stage without experts
            return
        mine, size = torch.tensor(forms)[:, None], self._ranks.tp.size
        all_forms = self._ranks.tp.all_gather_rows(mine, (len(mine),) * size)
        if int(all_forms.min()) != int(all_forms.max()):
            raise ConfigError("--enable-eplb: experts are stored in several formats; leave it out")

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What the ranks may be asked."""
        recorder = self._recorder
        return ({} if recorder is None else recorder.commands()) | {"move_experts": self._move}

    def _move(self, args: dict[str, Any]) -> None:
        """Give layers (number, experts of the slots) other places, on all ranks at once."""
        assert self._placement is not None
        logical_LP = self._placement.logical_LP.copy()
        for number, row in args["rows"]:
            logical_LP[number] = row
        num_experts = self._placement.counts_LE.shape[1]
        self._placement = balance.placement_of(logical_LP, num_experts)
        first = self._look_over(self._mixtures).first
        for number, row in args["rows"]:
            if first <= number < first + len(self._mixtures):
                experts = self._mixtures[number - first].experts
                assert isinstance(experts, SplitExperts)
                experts.move(row, self._table(number))
        if (recorder := self._recorder) is not None:
            recorder.placement = self._placement

    @property
    def _recorder(self) -> ExpertRecorder | None:
        return None if self.choices is None else self.choices.recorder
