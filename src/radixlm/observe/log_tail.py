"""LogTail: the last log records of this process, for the page at /ui."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from radixlm.wire.replies import LogLine

KEEP: Final = 500
MAX_CHARS: Final = 500
# --log-requests writes prompts there
_PRIVATE: Final = "radixlm.requests"


class LogTail(logging.Handler):
    """Records from INFO on as (monotonic seconds, level, ``role``, text), without tracebacks and
    without the texts of requests. ``count``: lines so far."""

    def __init__(self, role: str) -> None:
        super().__init__(logging.INFO)
        self._role = role
        self._own = threading.RLock()  # a signal handler may log while its thread holds it
        self._lines: deque[LogLine] = deque(maxlen=KEEP)
        self.count = 0

    def install(self) -> None:
        """Take the records of this process from now on, in place of an earlier tail."""
        root = logging.getLogger()
        for handler in [one for one in root.handlers if isinstance(one, LogTail)]:
            root.removeHandler(handler)
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _PRIVATE:
            return
        try:
            # the bytes of a path may be no text, which cannot be sent
            text = record.getMessage()[:MAX_CHARS].encode("utf-8", "backslashreplace").decode()
        except Exception:  # of who logs: the arguments do not fit the message
            self.handleError(record)
            return
        self.extend([(round(time.monotonic(), 4), record.levelname, self._role, text)])

    def extend(self, lines: Iterable[LogLine]) -> None:
        """Add lines of another process."""
        with self._own:
            for line in lines:
                self._lines.append(line)
                self.count += 1

    def since(self, count: int) -> tuple[list[LogLine], int]:
        """The kept lines after the first ``count``, and how many there were so far."""
        with self._own:
            num_new = max(0, min(self.count - count, len(self._lines)))
            return list(self._lines)[len(self._lines) - num_new :], self.count
