"""KeptPool: the memory of an engine's KV pools that the server keeps while engines come and go."""

import contextlib
import os


class KeptPool:
    """A memfd, if ``is_wanted`` and there are such; ``path`` is how the engine opens it, or ""."""

    def __init__(self, is_wanted: bool) -> None:
        self._descriptor = -1
        if is_wanted and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # no descriptor left: restarts will be cold
                self._descriptor = os.memfd_create("radixlm-kv")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}" if self._descriptor >= 0 else ""

    def empty(self) -> None:
        """Forget what is in it."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Free it, once no engine has it open any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.path = -1, ""
