"""Progress of a download: one bar on a terminal, else a line in the log every few seconds."""

import logging
import sys
import threading
import time
from typing import Self

from tqdm import tqdm

from radixlm.base.units import format_bytes, format_seconds

log = logging.getLogger(__name__)

EVERY_S = 5.0


class Progress:
    """Counts bytes of ``total``; from several threads. A context manager."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._done = self._new = 0
        self._began_s = self._told_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar = tqdm(
            total=total,
            desc=title,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            mininterval=0.2,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        log.info("%s: downloading %s", self._title, format_bytes(self._total))
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
        seconds = time.monotonic() - self._began_s
        how = "downloaded" if exc[0] is None else "broken off after"
        size, took = format_bytes(self._new), format_seconds(seconds)
        log.info("%s: %s %s in %s", self._title, how, size, took)

    def add(self, num_bytes: int, is_old: bool = False) -> None:
        """Count bytes that came; ``is_old``: in an earlier run, so that the rate is not theirs."""
        with self._lock:
            self._done += num_bytes
            self._new += 0 if is_old else num_bytes
            if not self._bar.disable:
                self._bar.initial += num_bytes if is_old else 0
                self._bar.update(num_bytes)
                return
            now_s = time.monotonic()
            if now_s - self._told_s < EVERY_S:
                return
            self._told_s = now_s
            rate = max(self._new, 1) / (now_s - self._began_s)
            left_s = (self._total - self._done) / rate
            done, total = format_bytes(self._done), format_bytes(self._total)
        log.info(
            "%s: %s of %s, %s/s, %s left",
            *(self._title, done, total, format_bytes(rate), format_seconds(left_s)),
        )
