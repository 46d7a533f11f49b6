"""The request bodies of OpenAI's completions and chat. Their sampling parameters, and the fields
that are ignored or not supported, come from the wire tables (``wire/fields.py``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.request_model import (
    Body,
    Ints,
    Objects,
    Priority,
    ResumeBody,
    Rid,
    Strings,
    reject_unsupported,
    with_fields,
)
from radixlm.wire.unknown import note_warning

MAX_PROMPTS = 4096


def _with_plain_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with their roles in small letters: "User" is read as "user"."""
    for message in messages:
        role = message.get("role")
        if isinstance(role, str):
            message["role"] = role.lower()
    return messages


class StreamOptions(Body):
    """``include_usage``: a last chunk with the usage; the other: usage in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None


class Reasoning(Body):
    """``reasoning`` of SGLang's chat: how much the model reasons, and whether it does."""

    effort: str | float | None = None
    enabled: bool | None = None


class Generation(Body):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    rid: Rid | list[Rid] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None  # -1, of vLLM: no bound
    resume: ResumeBody | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    priority: Priority | None = None
    service_tier: str | None = None
    return_token_ids: bool | None = False
    return_cached_tokens_details: bool | None = False
    return_spec_tokens_details: bool | None = False
    return_routed_experts: bool | None = False
    # of vLLM
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool | None = False  # the n likeliest sequences
    return_tokens_as_token_ids: bool | None = False
    logprob_token_ids: Ints | None = None  # in the place of the likeliest tokens


@with_fields("completions")
class CompletionRequest(Generation):
    """POST /v1/completions. ``prompt_embeds`` (vLLM's): vectors [tokens, width] in the place of a
    prompt, as base64 of a file of ``torch.save``, safetensors or numpy, or a list of them."""

    prompt: str | Ints | Strings | Annotated[list[Ints], Field(max_length=MAX_PROMPTS)] | None = (
        None
    )
    prompt_embeds: str | Annotated[Strings, Field(max_length=MAX_PROMPTS)] | None = None
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None  # of vLLM; -1: all tokens


@with_fields("chat")
class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[Objects, AfterValidator(_with_plain_roles)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    functions: Objects | None = None  # the older form of tools
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool | None = True
    include_reasoning: bool | None = True  # of vLLM
    stream_reasoning: bool | None = True
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    return_meta_info: bool | None = False
    return_sampling_mask: bool | None = False  # in meta_info
    return_prompt_token_ids: bool | None = False
    return_input_ids_in_sglext: bool | None = False
    return_output_ids_in_sglext: bool | None = False
    input_ids: Ints | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None  # of vLLM; -1: all tokens
    echo: bool | None = False  # of vLLM: a message that is continued comes with its beginning
    modalities: list[Literal["text", "audio", "image"]] | None = None


def check_request(request: Generation) -> None:
    """InvalidRequest for what would change the answer and is not supported."""
    reject_unsupported(request)
    if request.stream_options is not None and not request.stream:
        note_warning("stream_options: without stream they have no effect")
    if isinstance(request, ChatRequest) and set(request.modalities or ()) - {"text"}:
        raise InvalidRequest("modalities: this server answers with text only", "modalities")
