"""What a program may use, and the error that ends one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from radixlm.lang.ir import SglSamplingParams


class ProgramError(RuntimeError):
    """A program's call has failed; ``__cause__`` says why."""


class Budget:
    """What a program and its forks may use: ``max_total_tokens`` of output, ``timeout_s`` from its
    start; None: no limit."""

    def __init__(self, max_total_tokens: int | None, timeout_s: float | None) -> None:
        self._tokens, self._timeout_s = max_total_tokens, timeout_s
        self._begin_s = time.monotonic()
        self._num_used = 0
        self._lock = threading.Lock()

    def limited(self, params: SglSamplingParams) -> SglSamplingParams:
        """The parameters within what is left, which is then taken. ProgramError if nothing is."""
        self.check_time()
        if self._tokens is None:
            return params
        with self._lock:
            left = self._tokens - self._num_used
            count = min(params.max_new_tokens or 0, left // (params.n or 1))
            if count <= 0:
                raise ProgramError(
                    f"the program's {self._tokens} tokens (max_total_tokens) are used"
                )
            self._num_used += count * (params.n or 1)
        return replace(params, max_new_tokens=count)

    def check_time(self) -> None:
        """ProgramError if no time is left."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            raise ProgramError(f"the program's {self._timeout_s:g} s (timeout_s) are over")

    def give_back(self, params: SglSamplingParams, meta_info: Any) -> None:
        """What a call was given and did not generate."""
        metas = meta_info if isinstance(meta_info, list) else [meta_info]
        counts = [one["completion_tokens"] for one in metas if one and "completion_tokens" in one]
        if self._tokens is not None and len(counts) == (params.n or 1):
            with self._lock:
                self._num_used -= (params.max_new_tokens or 0) * len(counts) - sum(counts)

    def left_s(self) -> float | None:
        """Seconds that are left, None without a limit."""
        if self._timeout_s is None:
            return None
        return self._begin_s + self._timeout_s - time.monotonic()
