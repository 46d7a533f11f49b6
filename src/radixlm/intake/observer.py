"""Observer: who wants to know what happens to requests."""

from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import Finish


class Observer:
    """Callbacks on what happens to requests, for metrics, the request log and sessions."""

    def submitted(self, state: RequestState) -> None: ...

    def progressed(self, state: RequestState, num_tokens: int) -> None: ...

    def ended(self, state: RequestState, finish: Finish) -> None: ...

    def adapter_loaded(self, seconds: float) -> None: ...

    def engine_lost(self, reason: str) -> None: ...
