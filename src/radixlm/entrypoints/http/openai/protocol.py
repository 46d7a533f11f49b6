"""Requests of the OpenAI routes: every field by name, all others refused.

Fields of OpenAI's that have no meaning here are accepted; those that would change the answer and
are not built are refused by name (``refuse_unbuilt``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.request_model import Body, Int, Ints, Objects, Priority, Rid, Strings

MAX_STOPS = 1024
MAX_PROMPTS = 4096
MAX_TOP_LOGPROBS = 20
Stops = str | Annotated[Strings, Field(max_length=MAX_STOPS)]


class StreamOptions(Body):
    """``include_usage``: a last chunk with the usage; the other: usage in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None


class Generation(Body):
    """What chat and completions have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    n: Int | None = None
    seed: Int | None = None
    stop: Stops | None = None
    stop_token_ids: Ints | None = None
    stop_regex: Stops | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    custom_params: dict[str, Any] | None = None
    logit_processor: str | None = None
    custom_logit_processor: str | dict[str, Any] | list[Any] | None = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None
    data_parallel_rank: Int | None = None
    routed_dp_rank: Int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    session_params: dict[str, Any] | None = None
    return_hidden_states: bool | None = False
    return_token_ids: bool | None = False
    return_cached_tokens_details: bool | None = False

    # no meaning here, whatever their value
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    custom_labels: dict[str, str] | None = None
    return_spec_tokens_details: bool | None = None

    # a value other than the harmless ones is refused
    lora_path: Any = None
    watermark: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    images_config: Any = None
    mm_processor_kwargs: Any = None
    session_id: Any = None
    return_routed_experts: Any = None
    routed_experts_start_len: Any = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Ints | Strings | Annotated[list[Ints], Field(max_length=MAX_PROMPTS)]
    best_of: Int | None = None
    echo: bool | None = False
    logprobs: Int | None = None
    suffix: str | None = None


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Objects
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | float | None = None
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    return_meta_info: bool | None = False
    return_prompt_token_ids: bool | None = False
    input_ids: Ints | None = None

    modalities: list[Literal["text", "audio", "image"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    audio: Any = None
    prediction: dict[str, Any] | None = None  # makes an answer faster elsewhere, never another
    web_search_options: Any = None
    moderation: Any = None
    chat_template: Any = None
    task: Any = None
    use_audio_in_video: Any = None
    video_config: Any = None
    max_dynamic_patch: Any = None
    min_dynamic_patch: Any = None
    return_sampling_mask: Any = None
    sampling_logprobs_mode: Any = None
    return_flat_raw_output_top_logprobs: Any = None
    return_flat_raw_top_logprobs_b64: Any = None
    return_input_ids_in_sglext: Any = None
    return_output_ids_in_sglext: Any = None


_MEDIA = "this model reads text only"
_NOT_RETURNED = "this is not recorded"
UNBUILT: Mapping[str, str] = {
    "lora_path": "adapters are not built (--enable-lora)",
    "watermark": "watermarking is not built",
    "bootstrap_host": "disaggregation is not built (--disaggregation-mode)",
    "bootstrap_port": "disaggregation is not built (--disaggregation-mode)",
    "bootstrap_room": "disaggregation is not built (--disaggregation-mode)",
    "images_config": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "video_config": _MEDIA,
    "use_audio_in_video": _MEDIA,
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "session_id": "send session_params with the id of an open session",
    "return_routed_experts": _NOT_RETURNED,
    "routed_experts_start_len": _NOT_RETURNED,
    "return_sampling_mask": _NOT_RETURNED,
    "sampling_logprobs_mode": _NOT_RETURNED,
    "return_flat_raw_output_top_logprobs": _NOT_RETURNED,
    "return_flat_raw_top_logprobs_b64": _NOT_RETURNED,
    "return_input_ids_in_sglext": "send return_prompt_token_ids",
    "return_output_ids_in_sglext": "send return_token_ids",
    "task": _NOT_RETURNED,
    "functions": "the old form of tools: send tools",
    "function_call": "the old form of tool_choice: send tool_choice",
    "audio": "no speech model is supported",
    "web_search_options": "this server does not search the web",
    "moderation": "this server does not moderate",
    "chat_template": "templates are the operator's (--chat-template)",
}
IGNORED = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "custom_labels return_spec_tokens_details verbosity "
    "prediction prompt_cache_options".split()
)
"""Accepted, and without effect on the answer by their meaning."""
_HARMLESS: tuple[Any, ...] = (None, False, 0, [], {})


def refuse_unbuilt(request: Generation) -> None:
    """InvalidRequest for a field that would change the answer and cannot."""
    for name in request.model_fields_set:
        why = UNBUILT.get(name)
        if why is not None and not any(getattr(request, name) == h for h in _HARMLESS):
            raise InvalidRequest(f"{name}: {why}", param=name)
    other = set(getattr(request, "modalities", None) or ["text"]) - {"text"}
    if other:
        raise InvalidRequest("modalities: this server answers with text only", "modalities")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
