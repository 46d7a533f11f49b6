"""LogprobBudget: how many log-probabilities of prompts a step may compute. They become lists of
Python, and thousands of them would keep the other requests of the step waiting."""

from radixlm.scheduler.request import Request

MAX_LOGPROBS = 8192
MIN_TOKENS = 16


class LogprobBudget:
    """What is left of a step's log-probabilities."""

    def __init__(self) -> None:
        self._left = MAX_LOGPROBS

    def start_step(self) -> None:
        """Another step begins."""
        self._left = MAX_LOGPROBS

    def limit(self, request: Request) -> int:
        """The most tokens of the request's next chunk, which are taken from the budget; 0 if the
        request must wait for the next step."""
        need = request.wire.logprobs
        if need is None or not 0 <= need.prompt_from <= request.prompt_len:
            return request.prefill_len
        if self._left <= 0:
            return 0
        of_token = 1 + need.top + len(need.token_ids)
        count = max(self._left // of_token, MIN_TOKENS)
        self._left -= min(count, request.prefill_len - request.num_computed) * of_token
        return count
