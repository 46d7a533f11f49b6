"""The requests that intake gets from the APIs, and the outputs that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.processor import Prompt
from radixlm.text.answer_check import UnheldSchema
from radixlm.wire.replies import Finish, Logprobs
from radixlm.wire.requests import AdapterRef, GrammarSpec, LogprobParams, PoolingParams
from radixlm.wire.sampling_params import SamplingParams
from radixlm.wire.transfer import Hint

MAX_ID_BYTES = 512  # must fit into the engine's inflight log


@dataclass(slots=True)
class GenerateRequest:
    """One prompt. Exactly one of ``text``, ``input_ids``, ``prompt`` (with media) and ``embeds``
    (float32 bytes of [num_embeds, dim]) is given. ``sampling.n`` > 1 asks for parallel samples."""

    sampling: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    prompt: Prompt | None = None
    embeds: bytes | None = None
    num_embeds: int = 0
    rid: str | None = None
    stream: bool = False
    logprobs: LogprobParams | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    routed_from: int = 0  # the first token whose experts the answer has
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None  # None: the server's
    streaming_window: int | None = None  # 0: none; None: the server's
    streaming_sinks: int | None = None
    grammar: GrammarSpec | None = None
    replica: int | None = None  # the one to compute it while it states; None: any
    adapter: str | None = None
    processor: str | None = None
    pooling: PoolingParams | None = None
    timeout_s: float | None = None
    fair_key: str | None = None
    routing_key: str | None = None  # None: that of the call
    session: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)  # of fields, as the client wrote them
    add_special_tokens: bool = True
    clamp_max_tokens: bool = False  # a limit beyond the context is the context's end
    prediction: Sequence[int] = ()  # token ids that the output may repeat: it is faster then
    unheld: UnheldSchema | None = None  # of the answer, which is checked against it
    hint: Hint | None = None  # of a router before prefill and decode servers
    emitted: Sequence[int] = ()  # output that the client has: the answer goes on after it
    default_rid: str | None = None  # the rid if it is free; another one if it is not
    requires_reasoning: bool = False  # the output begins with it, and a grammar comes after
    max_thinking_tokens: int | None = None
    reasoning_bound: dict[str, Any] | None = None  # of a thinking_budget beside ``processor``
    reasoning_end: str | None = None  # the marker after which the answer begins
    shows_prompt_ids: bool = False  # ``text`` becomes ``input_ids``, which the answer has
    scored_after: str | None = None  # the start of ``text`` whose log-probabilities nobody needs


@dataclass(slots=True)
class Output:
    """What is new of one sample since the last Output; counts are totals.

    ``text`` never holds a part of a stop string nor of a character.
    """

    index: int = 0
    rid: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None
    """Of the cached tokens, those that tiers brought for this request."""
    predicted: tuple[int, int] | None = None
    """Tokens of the request's prediction that the output holds, and those that it does not."""
    retractions: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: list[bytes] | None = None
    routed_experts: list[bytes] | None = None  # of each computed token: int32 [layers, top_k]
    pooled: list[float] | None = None
    queue_time_s: float = 0.0
    score: float | None = None  # of a beam search
    draft_rounds: list[int] | None = None
    num_drafted: int = 0
    prefill_s: float = 0.0  # from the arrival to the first token; 0 before it
    adapter: AdapterRef | None = None
    weight_version: str = ""
    """Label of the weights that computed the last token; "" before the first."""

    def absorb(self, later: Output) -> None:
        """Join what came next, for a reader who was slower than the engine."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        self.finish = later.finish
        self.prompt_tokens = later.prompt_tokens
        self.completion_tokens = later.completion_tokens
        self.cached_tokens, self.cached_by_tier = later.cached_tokens, later.cached_by_tier
        self.predicted = later.predicted
        self.draft_rounds, self.num_drafted = later.draft_rounds, later.num_drafted
        self.retractions = later.retractions
        self.weight_version = later.weight_version
        self.queue_time_s = later.queue_time_s
        self.prefill_s = later.prefill_s
        self.pooled = later.pooled or self.pooled
        self.logprobs = Logprobs.joined((self.logprobs, later.logprobs))
        self.prompt_logprobs = Logprobs.joined((self.prompt_logprobs, later.prompt_logprobs))
        if later.hidden_states:
            self.hidden_states = (self.hidden_states or []) + later.hidden_states
        if later.routed_experts:
            self.routed_experts = (self.routed_experts or []) + later.routed_experts


def grammar_of(sampling: SamplingParams) -> GrammarSpec | None:
    """The grammar that the sampling parameters name."""
    for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
        value = getattr(sampling, kind)
        if value is not None:
            return GrammarSpec(kind, value)
    return None


def in_client_words(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error with the name that the client has for its field, and for the limit of tokens."""
    if (name := names.get(error.param or "")) is None:
        return error
    message = error.message.replace(str(error.param), name, 1)
    message = message.replace("max_new_tokens", names.get("max_new_tokens", "max_new_tokens"))
    return type(error)(message, name)


def check_names(request: GenerateRequest) -> None:
    """Strings that travel to the engine must be text, and an id must fit its records."""
    keys = ("cache_salt", "extra_key", "fair_key", "routing_key")
    for name in ("rid", *keys, "adapter", "processor"):
        value = getattr(request, name)
        try:
            size = len(value.encode()) if value is not None else 0
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} holds a lone surrogate, not text", name) from None
        if name == "rid" and (size > MAX_ID_BYTES or "\0" in (value or "")):
            raise InvalidRequest(f"rid: at most {MAX_ID_BYTES} bytes without NUL", "rid")
