"""A link that hands over one message at a time, so that each step makes an Output of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from radixlm.intake.request_state import RequestState
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.wire.link import Handler, ThreadLink


class LockstepLink(ThreadLink):
    """The next message comes when all Outputs of the last one are read."""

    def start(self, handler: Handler) -> None:
        intake: TokenizerManager = handler.func.__self__  # type: ignore[attr-defined]
        loop, waiting = asyncio.get_running_loop(), deque[Any]()
        states: set[RequestState] = set()

        def pump() -> None:
            states.update(intake.requests.values())
            if all(state.pending is None for state in states):
                handler(waiting.popleft())
            states.intersection_update({s for s in states if s.pending is not None})
            if waiting:
                loop.call_soon(pump)

        def take(message: Any) -> None:
            waiting.append(message)
            if len(waiting) == 1:
                pump()

        super().start(take)
