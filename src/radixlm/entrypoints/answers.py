"""Types of what ``radixlm.Engine`` returns. At run time they are plain dicts."""

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict


class MetaInfo(TypedDict):
    """Facts of one answer. Times are in seconds; ``finish_reason`` is {"type": "stop"|"length"|
    "abort", ...}, None before the end. Log-probabilities are [logprob, token id, text or None]."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    num_retractions: int
    queue_time: float
    e2e_latency: NotRequired[float]
    input_token_logprobs: NotRequired[list[Any]]
    output_token_logprobs: NotRequired[list[Any]]
    input_top_logprobs: NotRequired[list[Any]]
    output_top_logprobs: NotRequired[list[Any]]
    hidden_states: NotRequired[list[Any]]
    routed_experts: NotRequired[str]
    lora_name: NotRequired[str]
    reasoning_tokens: NotRequired[int]
    output_token_sampling_mask: NotRequired[list[list[int]]]
    output_token_sampling_logprobs: NotRequired[list[float]]
    output_token_sampling_mask_length: NotRequired[int]
    output_token_entropy_val: NotRequired[list[float]]


class Generation(TypedDict):
    """One answer of ``generate``. ``text`` is missing with ``skip_tokenizer_init``."""

    text: str
    output_ids: list[int]
    prompt_token_ids: NotRequired[list[int]]
    meta_info: MetaInfo


class ScoreResult(list[list[float]]):
    """What ``score`` returns: for each item its scores, also as ``scores`` (SGLang's name).
    ``pooled_hidden_states``: of each item, where they were asked for."""

    def __init__(
        self, scores: Iterable[list[float]], prompt_tokens: int, hidden: list[Any] | None
    ) -> None:
        super().__init__(scores)
        self.prompt_tokens, self.pooled_hidden_states = prompt_tokens, hidden

    @property
    def scores(self) -> list[list[float]]:
        """The list itself."""
        return self


class Encoding(TypedDict):
    """One answer of ``encode``: the vector, or the score or scores of a reward model, a classifier
    or a cross-encoder."""

    embedding: Any
    meta_info: dict[str, Any]
    pooled_hidden_state: NotRequired[list[float]]
