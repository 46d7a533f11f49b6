"""Whether the server gives what a request wants of each token, and for how many tokens it may."""

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.hidden_outputs.token_rows import TokenRows
from radixlm.intake.call import Call, current_call
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.wire.requests import TokenizedRequest


class OutputRules:
    """What a server gives of each token."""

    def rows(
        self, wire: TokenizedRequest, routed_from: int, facts: IntakeFacts
    ) -> TokenRows | None:
        """What a sample of the request needs for its rows; None if it wants none. ``routed_from``:
        the first token whose experts are wanted."""
        return TokenRows(wire, routed_from, facts) if wire.wants_rows else None

    def check(
        self, facts: IntakeFacts, request: GenerateRequest, num_prompt: int, count: int
    ) -> int:
        """The number of new tokens, ``count`` at most, whose log-probabilities fit the call's
        bound. InvalidRequest where the client asked for more, or for what the server does not
        give."""
        if request.return_hidden_states and not facts.hidden_states_enabled:
            raise InvalidRequest(
                "return_hidden_states needs --enable-return-hidden-states",
                param="return_hidden_states",
            )
        _check_routed(facts, request, num_prompt)
        _check_logprobs(facts, request, num_prompt)
        return _bound_logprobs(facts, request, num_prompt, count)


def _check_routed(facts: IntakeFacts, request: GenerateRequest, num_prompt: int) -> None:
    if not request.return_routed_experts:
        return
    if facts.routed_shape is None:
        message = "return_routed_experts needs --enable-return-routed-experts"
        raise InvalidRequest(message, "return_routed_experts")
    if not 0 <= request.routed_from <= num_prompt:
        raise InvalidRequest(
            f"routed_experts_start_len: {request.routed_from} is not from 0 to {num_prompt}, "
            "the tokens of the prompt",
            "routed_experts_start_len",
        )


def _check_logprobs(facts: IntakeFacts, request: GenerateRequest, num_prompt: int) -> None:
    start = request.logprobs.prompt_from if request.logprobs else -1
    if start > num_prompt:
        raise InvalidRequest(
            f"logprob_start_len: {start} is higher than the number of input tokens, "
            f"{num_prompt}; -1 asks for none of the prompt",
            param="logprob_start_len",
        )
    if request.logprobs and start == num_prompt:  # where the prompt ends, there is none
        request.logprobs = msgspec.structs.replace(request.logprobs, prompt_from=-1)
    for token in request.logprobs.token_ids if request.logprobs else ():
        if not 0 <= token < facts.vocab:
            raise InvalidRequest(
                f"token_ids_logprob: {token} is out-of-vocabulary: ids are from 0 to "
                f"{facts.vocab - 1}",
                param="token_ids_logprob",
            )
    if request.logprobs and request.logprobs.top > facts.vocab:
        raise InvalidRequest(
            f"top_logprobs: {request.logprobs.top} exceeds the vocabulary of {facts.vocab}",
            param="top_logprobs",
        )
    sampling = request.sampling
    if request.logprobs and request.logprobs.kept and not sampling.is_greedy:
        if not 0 < sampling.top_k < facts.vocab:
            raise InvalidRequest(
                "return_sampling_mask: top_p-only sampling is valid but can return huge masks in "
                'the tail; bound them: {"top_k": 50}',
                "return_sampling_mask",
            )


def _bound_logprobs(
    facts: IntakeFacts, request: GenerateRequest, num_prompt: int, count: int
) -> int:
    """The number of new tokens whose log-probabilities fit the call's bound; InvalidRequest
    where the client asked for more of them."""
    need, most = request.logprobs, facts.max_logprobs
    if need is None:
        return count
    kept = max(0, request.sampling.top_k) if need.kept else 0
    numbers = 1 + need.top + len(need.token_ids) + kept + need.entropy
    of_position = numbers * max(1, request.sampling.n)
    from_prompt = max(0, num_prompt - need.prompt_from) if need.prompt_from >= 0 else 0
    if request.sampling.max_new_tokens is None:
        count = min(count, max(1, most // of_position - from_prompt))
    call = current_call() or Call()
    add_logprobs(call, of_position * (from_prompt + count), most)
    return count


def add_logprobs(call: Call, count: int, most: int) -> None:
    """Count ``count`` entries of log-probabilities; InvalidRequest beyond ``most``."""
    if call.num_logprobs + count > most:
        raise InvalidRequest(
            f"top_logprobs: this call may return {call.num_logprobs + count} log-probabilities "
            f"(positions times 1 + top + asked ids), the limit is {most} (--max-logprobs): ask "
            "for fewer tokens, positions or prompts",
            param="top_logprobs",
        )
    call.num_logprobs += count
