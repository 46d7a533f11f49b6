"""OutputBuffer: what requests have produced besides tokens since their last deltas."""

from __future__ import annotations

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item
from radixlm.step.result import ItemResult
from radixlm.wire.replies import Logprobs, TokenDelta


class _Buffered:
    """Of one request."""

    __slots__ = ("hidden", "logprobs", "prompt_logprobs")

    def __init__(self) -> None:
        self.logprobs: list[Logprobs | None] = []
        self.prompt_logprobs: list[Logprobs | None] = []
        self.hidden: list[bytes] = []


class OutputBuffer(Feature):
    """Log-probabilities and hidden states by request, until a delta takes them."""

    def __init__(self) -> None:
        self._buffered: dict[str, _Buffered] = {}
        self._num_hidden: dict[str, int] = {}  # tokens whose hidden states were buffered or sent

    @property
    def num_buffered(self) -> int:
        """Requests with something that no delta has taken yet."""
        return len(self._buffered)

    def computed(
        self, request: Request, item: Item, result: ItemResult, num_kept: int | None
    ) -> None:
        """Keep it for the request's next delta."""
        logprobs, hidden = result.logprobs, result.hidden_states
        buffered = self._buffered.setdefault(request.rid, _Buffered())
        if logprobs is not None and num_kept is not None:
            logprobs = logprobs.first(num_kept)
        buffered.logprobs.append(logprobs)
        buffered.prompt_logprobs.append(result.prompt_logprobs)
        if hidden is None:
            return
        # a retracted request computes tokens again whose states were buffered or sent before
        start, count, rows = item.start, item.count, item.count
        if num_kept is not None:
            start, count = request.num_committed - num_kept, num_kept
            rows = len(result.tokens)
        first = max(start, self._num_hidden.get(request.rid, 0))
        self._num_hidden[request.rid] = max(first, start + count)
        row_bytes = len(hidden) // rows
        new = hidden[(first - start) * row_bytes : count * row_bytes]
        # tokens that were sampled have a part each, a chunk has one
        part = row_bytes if num_kept is not None else max(1, len(new))
        buffered.hidden.extend(new[i : i + part] for i in range(0, len(new), part))

    def deliver(self, delta: TokenDelta) -> None:
        """Put what is kept of its request into a delta."""
        buffered = self._buffered.pop(delta.rid, None)
        if buffered is not None:
            delta.prompt_logprobs = Logprobs.joined(buffered.prompt_logprobs)
            delta.logprobs = Logprobs.joined(buffered.logprobs)
            delta.hidden_states = buffered.hidden or None

    def retracted(self, request: Request) -> None:
        """Drop outputs of the prompt, which will be computed again."""
        if not request.num_output:
            self.release(request)

    def release(self, request: Request) -> None:
        """The request is over."""
        self._buffered.pop(request.rid, None)
        self._num_hidden.pop(request.rid, None)
