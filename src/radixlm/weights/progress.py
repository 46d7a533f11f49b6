"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress(AbstractContextManager["Progress"]):
    """Bytes done of ``total_bytes``, with rate and time left, on stderr if it is a terminal."""

    def __init__(self, what: str, total_bytes: int, is_wanted: bool = True) -> None:
        self._bar: Any = None
        if is_wanted and sys.stderr.isatty():
            self._bar = tqdm(
                total=total_bytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024
            )

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more are done."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
