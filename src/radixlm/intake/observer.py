"""Observer: who wants to know what happens to requests."""

from collections.abc import Sequence

from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import Finish, LogLine, Moment


class Observer:
    """Callbacks on what happens to requests, for metrics, the request log and sessions."""

    def submitted(self, state: RequestState) -> None: ...

    def progressed(self, state: RequestState, num_tokens: int) -> None: ...

    def scheduled(self, state: RequestState, moment: Moment) -> None: ...

    def ended(self, state: RequestState, finish: Finish) -> None: ...

    def adapter_loaded(self, seconds: float) -> None: ...

    def held(self, states: Sequence[RequestState], why: str) -> None:
        """An engine that computed ``states`` is gone; another goes on with them."""

    def orphaned(self, count: int) -> None:
        """``count`` requests were aborted because their HTTP process died; this one succeeds it."""

    def logged(self, lines: Sequence[LogLine]) -> None:
        """An engine has logged ``lines``."""

    def engine_lost(self, reason: str) -> None: ...
