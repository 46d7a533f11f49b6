"""How likely a generating model finds given tokens as the next one."""

import math
from collections.abc import Sequence

from radixlm.entrypoints.http.middleware import fair_share_key
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.records import GenerateRequest, Output
from radixlm.multimodal.processor import Prompt
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams


async def next_tokens(
    state: ServerState, prompts: Sequence[list[int] | Prompt], token_ids: Sequence[int]
) -> list[Output]:
    """One step after each prompt, with the log-probabilities of ``token_ids``."""
    need = LogprobParams(-1, 0, tuple(token_ids))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(
            sampling=sampling,
            input_ids=one if isinstance(one, list) else None,
            prompt=None if isinstance(one, list) else one,
            logprobs=need,
            fair_key=fair_share_key(),
        )
        for one in prompts
    ]
    return [outputs[0] for outputs in await generate.collect(state, requests)]


def label_logprobs(output: Output, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of ``token_ids`` as the next token."""
    rows = output.logprobs.asked if output.logprobs else []
    by_token = {token: logprob for logprob, token in (rows[0] if rows else None) or []}
    return [by_token.get(i, -math.inf) for i in token_ids]


def softmax(logprobs: Sequence[float]) -> list[float]:
    """The softmax of log-probabilities; equal shares if all are -inf."""
    top = max(logprobs)
    weights = [math.exp(value - top) if top > -math.inf else 1.0 for value in logprobs]
    return [weight / sum(weights) for weight in weights]
