"""KeptPool: the memory of an engine's KV pools that a server or a node's agent keeps while engines
come and go."""

import contextlib
import os
from collections.abc import Sequence


class KeptPool:
    """A memfd for each of ``ranks``, those of this host of a replica of ``world``. ``paths`` are
    how the ranks open them: of each rank one, "" of other hosts; empty if there are none."""

    def __init__(self, ranks: Sequence[int], world: int) -> None:
        self.ranks, self._world = tuple(ranks), world
        self._descriptors: list[int] = []
        if hasattr(os, "memfd_create"):
            try:
                for _ in ranks:
                    self._descriptors.append(os.memfd_create("radixlm-kv"))
            except OSError:  # no descriptor left: restarts will be cold
                self.close()

    @property
    def paths(self) -> list[str]:
        if not self._descriptors:
            return []
        paths = [""] * self._world
        for rank, number in zip(self.ranks, self._descriptors, strict=True):
            paths[rank] = f"/proc/{os.getpid()}/fd/{number}"
        return paths

    def empty(self) -> None:
        """Forget what is in it."""
        for number in self._descriptors:
            os.ftruncate(number, 0)

    def close(self) -> None:
        """Free it, once no engine has it open any more."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())
