"""ExpertRecorder: which experts the tokens of each step choose, for files, metrics and EPLB.

Rank 0 counts. The others only know whether it records, as this changes what a step computes, and
have their layers tell what tokens choose. Legend: L layers, E experts, T tokens, K chosen experts,
S steps.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.distributed.balance import Placement, balancedness

if TYPE_CHECKING:
    from radixlm.distributed.rebalance import Rebalancer

log = logging.getLogger(__name__)

WINDOWS = (10, 100, 1000)  # steps of the averages
DEFAULT_STEPS = 1000
_OFF = "the server was started without --expert-distribution-recorder-mode; stat works"

Counts = NDArray[np.int32]
Choices = Sequence[Tensor | None]  # of each layer int64 [T, K]


class RecordedLayer(Protocol):
    """A layer with experts."""

    def record(self, is_on: bool) -> None:
        """Keep what the tokens of each step choose."""

    def take_chosen(self) -> Tensor | None:
        """The experts that the tokens of the last step chose, int64 [T, K]."""


class StepTokens(Record):
    """The tokens of a step: ids and positions [T], tokens of each sequence, and whether they are
    prompts (EXTEND), decode (DECODE) or both (MIXED)."""

    input_ids: list[int]
    positions: list[int]
    extend_seq_lens: list[int]
    forward_mode: str


class RecorderOptions(Record):
    """``mode``: one of MODES, "" to record for metrics and EPLB alone; ``num_steps``: steps that
    are kept, -1 for all; ``ranks``: those that share the experts; ``is_always_on``: without
    /start_expert_distribution_record."""

    mode: str
    num_steps: int
    ranks: int
    folder: Path
    is_always_on: bool = False


class ChoiceReader:
    """Reads what the tokens of a step chose in the layers of this stage, on all of its ranks at
    once. ``is_always_on``: layers keep it whether or not anybody records."""

    def __init__(self, layers: Sequence[RecordedLayer], is_always_on: bool = False) -> None:
        self._layers, self._is_always_on = layers, is_always_on
        self.switch(False)

    def switch(self, is_on: bool) -> None:
        """Have the layers keep what tokens choose, from now on or no longer."""
        for layer in self._layers:
            layer.record(is_on or self._is_always_on)
        self.take()  # of steps before

    def take(self) -> Choices:
        """What the tokens of the last step chose."""
        return [layer.take_chosen() for layer in self._layers]


class ExpertRecorder:
    """Counts from the start of a record to its end. Called by the thread that runs the steps; files
    are written by another."""

    def __init__(
        self, reader: ChoiceReader, placement: Placement, options: RecorderOptions
    ) -> None:
        self._reader, self.placement, self.options = reader, placement, options
        self.num_passes = 0
        self.has_details = options.mode in ("per_pass", "per_token")
        limit = None if options.num_steps < 0 else options.num_steps
        self.counts_SLE: deque[Counts] = deque(maxlen=limit)
        self._details: deque[dict[str, Any]] = deque(maxlen=limit)
        self._balance: deque[float] = deque(maxlen=max(WINDOWS))
        self._is_recording = False  # for a file
        self.rebalancer: Rebalancer | None = None
        self._writer = ThreadPoolExecutor(1, "expert-records")
        self._switch(options.is_always_on)

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What operators may ask."""
        return {
            "start_expert_record": self._start,
            "stop_expert_record": self._stop,
            "dump_expert_record": self._dump,
            "expert_balance": lambda args: {str(n): v for n, v in self.averages().items()},
        }

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the last layer, too, must see the tokens that need no logits."""
        return self.has_details and self._is_recording

    @property
    def is_on(self) -> bool:
        """Whether steps are recorded, for a file or for metrics and EPLB."""
        return self._is_recording or self.options.is_always_on

    def count(self, chosen: Choices, tokens: Callable[[], StepTokens]) -> None:
        """Count what all layers chose in a step on these tokens."""
        self.num_passes += 1
        num_experts = self.placement.counts_LE.shape[1]
        counts_LE: Counts = np.stack(
            [
                np.bincount(
                    () if ids is None else ids.numpy(force=True).reshape(-1), minlength=num_experts
                )
                for ids in chosen
            ]
        )[:, :num_experts].astype(np.int32)  # experts without weights lie behind the others
        self.counts_SLE.append(counts_LE)
        if counts_LE.any():
            balance = float(balancedness(counts_LE, self.placement, self.options.ranks).mean())
            self._balance.append(balance)
            log.debug(
                "[Expert Balancedness] forward_pass_id=%d current_pass_balancedness=%.3f %s",
                self.num_passes,
                balance,
                " ".join(
                    f"last_{n}_average_balancedness={v:.3f}" for n, v in self.averages().items()
                ),
            )
        if self.needs_all_tokens:
            self._details.append(self._detail(chosen, counts_LE, tokens()))

    def _detail(self, chosen: Choices, counts_LE: Counts, tokens: StepTokens) -> dict[str, Any]:
        detail: dict[str, Any] = {"forward_pass_id": self.num_passes, "rank": 0}
        detail["gatherer_key"] = "primary"
        if self.options.mode == "per_pass":
            return detail | {"logical_count": counts_LE.tolist()}
        ids = [None if one is None else one.tolist() for one in chosen]
        fields = {name: getattr(tokens, name) for name in StepTokens.__struct_fields__}
        return detail | {"topk_ids_of_layer": ids} | fields

    @property
    def mean_balance(self) -> float:
        """Mean balancedness of the last 1000 steps."""
        return self.averages()[WINDOWS[-1]]

    def averages(self) -> dict[int, float]:
        """Mean balancedness of the last 10, 100 and 1000 steps."""
        last = list(self._balance)
        return {n: float(np.mean(last[-n:])) if last else 1.0 for n in WINDOWS}

    def _switch(self, is_on: bool) -> None:
        self._reader.switch(is_on)

    def _start(self, args: dict[str, Any]) -> None:
        self._check_mode()
        self.counts_SLE.clear()
        self._details.clear()
        self._is_recording = True
        self._switch(True)

    def _stop(self, args: dict[str, Any]) -> None:
        self._check_mode()
        self._is_recording = False
        self._switch(self.options.is_always_on)

    def _dump(self, args: dict[str, Any]) -> Future[Callable[[], str]]:
        """Write what was recorded; the file's name, once another thread has written it."""
        self._check_mode()
        data: dict[str, Any]
        name = f"expert_distribution_recorder_{time.time():.6f}"
        if self.has_details:
            name += "_0"
            location = self.placement.logical_LP.tolist()
            data = {"records": list(self._details), "last_physical_to_logical_map": location}
        else:
            data = {"rank": 0, "logical_count": list(self.counts_SLE)}
            data["average_utilization_rate_over_window"] = self.mean_balance
        self.counts_SLE.clear()
        self._details.clear()
        return self._writer.submit(_write, self.options.folder / f"{name}.json", data)

    def _check_mode(self) -> None:
        if not self.options.mode:
            raise InvalidRequest(_OFF)


def pack_choices(chosen: Choices) -> Tensor:
    """int32: for each layer T, K and [T, K]; 0, 0 for None."""
    none = torch.zeros(0, 0, dtype=torch.int32)
    layers = [none if one is None else one.cpu().int() for one in chosen]
    shapes = [torch.tensor(one.shape, dtype=torch.int32) for one in layers]
    pairs = zip(shapes, layers, strict=True)
    return torch.cat([none.flatten(), *(x.flatten() for pair in pairs for x in pair)])


def unpack_choices(packed: Tensor) -> list[Tensor | None]:
    rest, chosen = packed.long(), []
    while len(rest):
        rows, width = rest[:2].tolist()
        ids, rest = rest[2 : 2 + rows * width], rest[2 + rows * width :]
        chosen.append(ids.view(rows, width) if width else None)
    return chosen


def _write(path: Path, data: dict[str, Any]) -> Callable[[], str]:
    """Write a file that only its owner may read and that was not there before."""
    text = json.dumps(data, default=lambda array: array.tolist())
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    log.info("expert distribution written: %s", path)
    return lambda: str(path)
