"""LogprobBudget: how many log-probabilities of prompts a step may compute. They become lists of
Python, and thousands of them would keep the other requests of the step waiting."""

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request

MAX_LOGPROBS = 8192
MIN_TOKENS = 16


class LogprobBudget(Feature):
    """What is left of a step's log-probabilities. ``is_chunked``: prompts may be computed in
    parts."""

    def __init__(self, is_chunked: bool = True) -> None:
        self._left = MAX_LOGPROBS
        self._is_chunked = is_chunked

    def begin_step(self) -> None:
        """Another step begins."""
        self._left = MAX_LOGPROBS

    def limit_chunk(self, request: Request, end: int) -> int:
        """Take the log-probabilities of the chunk from the budget, of as many tokens as it has
        room for."""
        need = request.wire.logprobs
        if need is None or not 0 <= need.prompt_from <= request.prompt_len or not self._is_chunked:
            return end
        if self._left <= 0:
            return request.num_computed
        of_token = 1 + need.top + len(need.token_ids)
        count = max(self._left // of_token, MIN_TOKENS)
        self._left -= min(count, request.prefill_len - request.num_computed) * of_token
        return min(end, request.num_computed + count)
