"""A progress bar of finished requests, on a terminal only."""

import sys

from tqdm import tqdm

from radixlm.bench.backends import Outcome


class Progress:
    """Counts finished requests, their output tokens and the failures."""

    def __init__(self, total: int, is_shown: bool = True) -> None:
        self._bar = tqdm(
            total=total,
            unit="req",
            disable=not (is_shown and sys.stderr.isatty()),
            mininterval=0.5,
        )
        self._num_tokens = self._num_failed = 0

    def add(self, outcome: Outcome) -> None:
        """Count one finished request."""
        self._num_tokens += max(outcome.num_output, 0)
        self._num_failed += not outcome.is_ok
        if not self._bar.disable:
            fields = {"tokens": self._num_tokens}
            if self._num_failed:
                fields["failed"] = self._num_failed
            self._bar.set_postfix(fields, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.close()
