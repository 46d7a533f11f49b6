"""Offloader: blocks whose weights lie in pinned host memory and are copied to the device ahead of
their use, by a stream of their own.

``prefetch_step`` + 1 slots on the device hold the weights of as many blocks. Block j of the
offloaded ones always uses slot j modulo their number, so that its tensors point there once and for
all; a copy into a slot waits until the block that was there has run.

    compute   | block 0 |   resident   | block 1 |   resident   | block 2 |
    copies    |   1 -> slot 1          |   2 -> slot 0          |   0 -> slot 1
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.layers.module import Module
from radixlm.weights.size import reachable

log = logging.getLogger(__name__)

ALIGN = 256  # bytes: tensors of any dtype, as kernels read them


class CudaCopies:
    """A stream of a GPU that copies while another computes. Marks are points of either stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def computed(self) -> torch.cuda.Event:
        """A mark behind what was launched for computing so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def copy(
        self, target: Tensor, source: Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Copy pinned bytes once the mark ``after`` is reached; a mark behind it."""
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, copied: torch.cuda.Event) -> None:
        """What is launched for computing from now on comes after this mark."""
        torch.cuda.current_stream().wait_event(copied)


class _Place(Record, eq=False):
    """Where a tensor lies in the bytes of its block."""

    tensor: Tensor
    offset: int  # of its storage, in bytes
    first: int  # element of the storage
    shape: torch.Size
    strides: tuple[int, ...]


class _Offloaded:
    """A block whose weights are on the host: uint8 ``host``."""

    def __init__(self, block: Module, host: Tensor, places: Sequence[_Place]) -> None:
        self.block, self.host, self.places = block, host, places


class Offloader:
    """Takes blocks as they are loaded; once all are, ``finish``."""

    def __init__(self, model: Module, prefetch_step: int, copies: Callable[[], CudaCopies]) -> None:
        self._model, self._num_slots, self._make = model, prefetch_step + 1, copies
        # what the model has before it is loaded is not of one block
        self._shared = {id(tensor) for tensor in _tensors(model)}
        self._taken: list[_Offloaded] = []
        self.num_bytes = 0

    def take(self, block: Module) -> None:
        """Move what a loaded block holds to the host."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in _tensors(block):
            if id(tensor) not in self._shared and tensor.numel():
                _check_own(tensor)
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        if not by_storage:
            return
        sizes = [tensors[0].untyped_storage().nbytes() for tensors in by_storage.values()]
        starts = list(_starts(sizes))
        device = next(iter(by_storage.values()))[0].device
        host = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        places = []
        for start, size, tensors in zip(starts, sizes, by_storage.values(), strict=True):
            storage = tensors[0].untyped_storage()
            stored = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            host[start : start + size].copy_(stored)
            places += [
                _Place(t, start, int(t.storage_offset()), t.shape, t.stride()) for t in tensors
            ]
            storage.resize_(0)
        self._taken.append(_Offloaded(block, host, places))
        self.num_bytes += len(host)

    def finish(self) -> None:
        """Make the slots, and have the blocks wait for their weights. ConfigError where a tensor is
        of several blocks."""
        if not self._taken:
            return
        self._num_slots = min(self._num_slots, len(self._taken))
        device = self._taken[0].places[0].tensor.device
        size = max(len(one.host) for one in self._taken)
        self._slots = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self._num_slots)
        ]
        for number, one in enumerate(self._taken):
            storage = self._slots[number % self._num_slots].untyped_storage()
            for place in one.places:
                first = place.offset // place.tensor.element_size() + place.first
                place.tensor.set_(storage, first, place.shape, place.strides)
        for tensor in _tensors(self._model):
            _check_own(tensor)
        self._copies = self._make()
        self._in_slot: list[int] = [-1] * self._num_slots  # blocks
        self._copied: list[Any] = [None] * self._num_slots
        self._used: list[Any] = [None] * self._num_slots
        for number, one in enumerate(self._taken):
            attributes: Any = one.block
            attributes.run_deferred = partial(self._run, number, attributes.run_deferred)

    def _run(self, number: int, run: Callable[..., Any], *args: Any) -> Any:
        """Run a block, while the weights of later ones are copied."""
        slot = number % self._num_slots
        self._fetch(number)
        self._copies.wait(self._copied[slot])
        self._prefetch(number, is_running=True)
        try:
            return run(*args)
        finally:
            self._used[slot] = self._copies.computed()
            self._prefetch(number, is_running=False)

    def _prefetch(self, number: int, is_running: bool) -> None:
        """Copy what comes after block ``number``, as far as slots are free of what comes before."""
        sooner = {number} if is_running else set()
        for ahead in range(1, self._num_slots + (not is_running)):
            after = (number + ahead) % len(self._taken)
            if after in sooner or self._in_slot[after % self._num_slots] in sooner:
                return
            self._fetch(after)
            sooner.add(after)

    def _fetch(self, number: int) -> None:
        slot, host = number % self._num_slots, self._taken[number].host
        if self._in_slot[slot] != number:
            target = self._slots[slot][: len(host)]
            self._copied[slot] = self._copies.copy(target, host, self._used[slot])
            self._in_slot[slot] = number


def _check_own(tensor: Tensor) -> None:
    """ConfigError for a tensor whose storage has gone with that of another block."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ConfigError(
            "--cpu-offload-gb, --offload-group-size: layers of this model share weights, which "
            "must stay on the device; leave them out"
        )


def _tensors(root: object) -> Iterable[Tensor]:
    return (item for item in reachable(root) if isinstance(item, Tensor))


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    """Where parts of these sizes begin, and behind them the whole size."""
    at = 0
    for size in sizes:
        yield at
        at += -(-size // ALIGN) * ALIGN
    yield at
