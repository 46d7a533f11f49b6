"""KeptPool: the memory of an engine's KV pools that the server keeps while engines come and go."""

import contextlib
import os


class KeptPool:
    """A memfd for each of ``num_ranks`` ranks, if there are such; ``paths`` are how the ranks open
    them, empty if there are none."""

    def __init__(self, num_ranks: int) -> None:
        self._descriptors: list[int] = []
        if hasattr(os, "memfd_create"):
            try:
                for _ in range(num_ranks):
                    self._descriptors.append(os.memfd_create("radixlm-kv"))
            except OSError:  # no descriptor left: restarts will be cold
                self.close()

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{number}" for number in self._descriptors]

    def empty(self) -> None:
        """Forget what is in it."""
        for number in self._descriptors:
            os.ftruncate(number, 0)

    def close(self) -> None:
        """Free it, once no engine has it open any more."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())
