"""The message that a request becomes, and what turns its tokens back into text."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from radixlm.intake.call import current_call
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.identity import identity
from radixlm.intake.records import GenerateRequest, grammar_of
from radixlm.text.detokenize import Detokenizer
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.media import of_tenant
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams, parallel_seed


def tokenized(
    request: GenerateRequest,
    sampling: SamplingParams,
    facts: IntakeFacts,
    index: int,
    **found: Any,
) -> TokenizedRequest:
    """The message of a request's sample ``index``. ``found``: rid, input_ids, adapter, bad_words
    and streaming."""
    media, tenant, call = request.prompt, identity().tenant, current_call()
    now_s, max_queue_s = time.monotonic(), facts.max_queue_time_s
    timeout_s = request.timeout_s or facts.request_timeout_s
    return TokenizedRequest(
        sampling=msgspec.structs.replace(
            sampling, n=1, sampling_seed=parallel_seed(sampling.sampling_seed or 0, index)
        ),
        logprobs=request.logprobs,
        return_hidden_states=request.return_hidden_states,
        return_routed_experts=request.return_routed_experts,
        cache_salt=request.cache_salt,
        extra_key=request.extra_key,
        tenant=tenant,
        owner=identity().owner,
        priority=facts.priority_of(request.priority),
        arrival_s=now_s,
        deadline_s=now_s + timeout_s if timeout_s else 0.0,
        queue_deadline_s=now_s + max_queue_s if max_queue_s else 0.0,
        grammar=request.grammar or grammar_of(sampling),
        embeds=request.embeds,
        media=of_tenant(media.media, tenant) if media is not None else (),
        rope_ids=media.packed_rope_ids() if media is not None else None,
        processor=request.processor,
        pooling=request.pooling,
        fair_key=request.fair_key,
        call_key=call.key if call else None,
        routing_key=request.routing_key or (call.routing_key if call else None),
        stream=request.stream,
        prediction=pack_ids(request.prediction),
        hint=request.hint,
        reasoning_bound=request.reasoning_bound,
        **found,
    )


def detokenizer(
    tokenizer: Tokenizer | None, sampling: SamplingParams, prompt_ids: Sequence[int]
) -> Detokenizer | None:
    """What turns the tokens behind a prompt into text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return Detokenizer(
        tokenizer,
        sampling.skip_special_tokens,
        sampling.spaces_between_special_tokens,
        prompt_ids,
    )
