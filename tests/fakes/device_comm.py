"""A communicator of devices that are the host, over a group of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostComm:
    """``distributed.device_groups.Comm``."""

    def __init__(self, host: Any, where: torch.device) -> None:
        self._host = host

    def all_gather(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return torch.stack(self._host.exchange(x, [tuple(x.shape)] * self._host.size))

    def broadcast(self, x: Tensor, source: int) -> None:
        assert x.is_contiguous()
        x.copy_(self._host.broadcast(x, source))

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        for rank, x in enumerate(sent):
            if x.numel():
                assert x.is_contiguous()
                self._host.send(x, rank)
        for rank, x in enumerate(received):
            if x.numel():
                x.copy_(self._host.receive(tuple(x.shape), x.dtype, rank))
