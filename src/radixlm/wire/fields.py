"""The fields of request bodies: which API takes them, under which name, and what becomes of them.

Two tables list every field that is not part of one API's own structure: ``SAMPLING_FIELDS``
(``sampling_params.py``) and ``FIELDS`` here. Request models, checks, the names in error messages
and docs/api.md are made of them.

The APIs: ``generate`` and its ``sampling_params``; OpenAI's ``completions``, ``chat`` ("openai" is
both) and ``responses``; Anthropic's ``messages`` and ``count_tokens``; ``ollama`` and its
``ollama_options``, ``ollama_generate`` and ``ollama_embed``; ``encode``; ``embeddings``;
``score``; ``tgi``;
``speech`` (the form of a transcription); ``checkpoint`` (generation_config.json, which
holds defaults).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta

from radixlm.base.errors import InvalidRequest, RequestError

# works        the field does what its documentation says
# ignored      it is accepted and has no effect on the answer
# unsupported  it is accepted while it asks for nothing; any other value is an error with a reason
State = Literal["works", "ignored", "unsupported"]

# values by which clients say that they do not use a field; many send all fields of the reference
EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})


class Field(NamedTuple):
    """One field. ``type``: a Python type, with ``msgspec.Meta`` where it has bounds. ``names``: API
    -> the field's name there. ``off``: the values of an unsupported field that ask for nothing."""

    name: str
    type: Any
    names: Mapping[str, str]
    state: State = "works"
    reason: str = ""
    default: Any = None
    off: tuple[Any, ...] = EMPTY

    @property
    def kind(self) -> Any:
        """The type without its bounds."""
        return get_args(self.type)[0] if self.bounds else self.type

    @property
    def is_json(self) -> bool:
        """Whether the string may also be sent as a JSON object."""
        return self.bounds is not None and self.bounds.title == "JSON"

    @property
    def bounds(self) -> Meta | None:
        """The bounds, None where the type has none."""
        return next(iter(getattr(self.type, "__metadata__", ())), None)


def api_names(name: str, apis: str) -> dict[str, str]:
    """API -> the field's name there, of a list such as "openai ollama_options:repeat_penalty"."""
    names = {}
    for entry in apis.split():
        api, _, alias = entry.partition(":")
        for each in ("completions", "chat") if api == "openai" else (api,):
            names[each] = alias or name
    return names


def fields_of(api: str, *tables: Iterable[Field]) -> dict[str, Field]:
    """The fields of an API by their names there."""
    return {field.names[api]: field for table in tables for field in table if api in field.names}


def renames(source: str, target: str, *tables: Iterable[Field]) -> dict[str, str]:
    """Names of ``source`` -> names of ``target``, for the fields that both APIs have."""
    fields = fields_of(source, *tables)
    return {name: field.names[target] for name, field in fields.items() if target in field.names}


def check_unsupported(
    fields: Mapping[str, Field],
    values: Mapping[str, Any],
    error: type[RequestError] = InvalidRequest,
) -> None:
    """Raise ``error`` for the first value that asks for what is not supported."""
    for name, value in values.items():
        field = fields.get(name)
        if field is not None and field.state == "unsupported" and value not in field.off:
            raise error(f"{name}: {field.reason}", param=name)


def _works(*rows: tuple[str, Any, str]) -> tuple[Field, ...]:
    return tuple(Field(name, type_, api_names(name, apis)) for name, type_, apis in rows)


def _ignored(apis: str, type_: Any, names: str) -> tuple[Field, ...]:
    return tuple(Field(name, type_, api_names(name, apis), "ignored") for name in names.split())


def _unsupported(
    apis: str, reason: str, names: str, off: tuple[Any, ...] = EMPTY
) -> tuple[Field, ...]:
    return tuple(
        Field(name, Any, api_names(name, apis), "unsupported", reason, off=off)
        for name in names.split()
    )


_NO_PROCESSOR_OPTIONS = "a request cannot set options of the media processor"
_ANTHROPIC = "messages count_tokens"
_PAIRED = "generate openai responses messages ollama ollama_generate tgi"

FIELDS: tuple[Field, ...] = (
    # request options that several APIs share
    *_works(
        ("messages", list[dict[str, Any]], "chat messages responses:input"),
        ("reasoning_effort", str | float, "chat ollama:think"),
        ("prediction", dict[str, Any], "chat"),  # makes an answer faster, never another
        ("return_hidden_states", bool | Literal["last"], "generate openai"),
        ("return_routed_experts", bool, "generate openai"),
        ("routed_experts_start_len", Annotated[int, Meta(ge=0, lt=1 << 31)], "generate openai"),
        # a list has a value a prompt
        ("extra_key", str | list[str], "generate openai responses"),
        ("cache_salt", str | list[str], "generate openai responses"),
        # the first and the last tokens that a stream sees, which may go on for ever
        ("streaming_window", Annotated[int, Meta(ge=0, le=1 << 30)], "generate openai"),
        ("streaming_sinks", Annotated[int, Meta(ge=1, le=1 << 30)], "generate openai"),
        (
            "priority",
            Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)],
            "generate openai responses",
        ),
        ("data_parallel_rank", int, "generate openai responses"),
        ("routed_dp_rank", int, "generate openai responses"),
        # of a router before prefill and decode servers; a list has a value a prompt
        ("bootstrap_host", str | list[str], _PAIRED),
        ("bootstrap_port", int | None | list[int | None], _PAIRED),
        ("bootstrap_room", int | list[int], _PAIRED),
        ("disagg_prefill_dp_rank", int | list[int], _PAIRED),
        ("session_params", dict[str, Any], "generate openai"),
        ("lora_path", str | list[str | None], "generate openai"),
        ("logit_processor", str, "generate openai"),
        ("mm_processor_kwargs", dict[str, Any], "generate openai"),
        ("routing_key", str, "generate"),  # of OpenAI's routes: the header x-smg-routing-key
        ("require_reasoning", bool, "generate"),
        (
            "max_thinking_tokens",
            Annotated[int, Meta(ge=0)],
            "generate openai:thinking_token_budget",
        ),
        ("custom_logit_processor", Any, "generate openai"),
    ),
    # ignored: they have no effect on the answer by their meaning
    *_ignored("openai responses", str, "user service_tier safety_identifier prompt_cache_key"),
    *_ignored("openai responses", str, "prompt_cache_retention"),
    *_ignored("openai responses", Any, "prompt_cache_options"),
    *_ignored("openai", bool, "store"),
    *_ignored("openai messages", dict[str, Any], "metadata"),
    *_ignored("openai", dict[str, str], "custom_labels"),
    *_ignored(
        "openai", Any, "keep_alive options guided_decoding_backend guided_whitespace_pattern"
    ),
    *_ignored("openai", Any, "early_stopping cache_prompt id_slot n_keep"),
    *_ignored("generate", Any, "model user stream_options"),
    # which cached prefixes are evicted first: the tree keeps those that were used last
    *_ignored("generate openai responses", str, "session_id"),
    *_ignored("chat", Literal["low", "medium", "high"], "verbosity"),
    *_ignored("responses", Any, "access_programs background_options client_metadata"),
    *_ignored("responses", dict[str, Any], "stream_options"),
    *_ignored(_ANTHROPIC, Any, "cache_control speed billing_policy betas"),
    *_ignored("count_tokens", Any, "mcp_servers compaction"),
    *_ignored("messages", str, "service_tier"),
    *_ignored("messages", Any, "inference_geo diagnostics fallbacks fallback_credit_token"),
    *_ignored("ollama ollama_generate ollama_embed", str | float, "keep_alive"),
    *_ignored("ollama ollama_generate", bool, "shift"),
    *_ignored("ollama ollama_generate ollama_embed", bool, "truncate"),
    *_ignored("ollama_embed", dict[str, Any], "options"),
    *_ignored(
        "ollama_options",  # how Ollama's own engine is run
        Any,
        "num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap "
        "use_mlock embedding_only num_thread num_keep numa repeat_last_n penalize_newline "
        "mirostat_eta mirostat_tau",
    ),
    *_ignored(
        "generate",
        Any,
        "log_metrics modalities background conversation_id label return_bytes no_logs "
        "custom_labels bootstrap_pair_key decode_tp_size external_trace_header "
        "received_time",
    ),
    *_ignored("encode", bool, "log_metrics background"),
    *_ignored("encode", Any, "routing_key external_trace_header received_time"),
    *_ignored("encode", Any, "sampling_params modalities"),
    # unsupported
    *_unsupported("generate encode", "send lora_path, the name of the adapter", "lora_id"),
    *_unsupported("encode", "send embed_overrides", "input_embeds positional_embed_overrides"),
    *_unsupported(
        "encode",
        "a prompt has one vector: send each item as a prompt",
        "multi_item_delimiter_indices token_indices_to_pool decision_layout",
    ),
    *_unsupported("encode", "send the text to /tokenize", "return_prompt_token_ids"),
    *_unsupported("score", "scores are of the end of each item", "score_extraction_token"),
    *_unsupported("generate", "encoders are part of the server", "encoder_urls"),
    *_unsupported("generate", "indexers are not recorded", "return_indexer_topk"),
    *_unsupported("generate openai", "watermarking is not supported", "watermark"),
    *_unsupported("sampling_params", "watermarking is not supported", "watermark"),
    *_unsupported("sampling_params", "send beam_width", "use_beam_search"),
    *_unsupported(
        "generate chat",
        "log-probabilities are computed as the server was started",
        "sampling_logprobs_mode",
    ),
    *_unsupported("generate openai", _NO_PROCESSOR_OPTIONS, "images_config"),
    *_unsupported(
        "generate chat",
        _NO_PROCESSOR_OPTIONS,
        "video_config use_audio_in_video max_dynamic_patch min_dynamic_patch",
    ),
    *_unsupported(
        "generate chat",
        "log-probabilities are not returned as flat arrays",
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64",
    ),
    *_unsupported(
        "generate",
        "not supported",
        "image_max_dynamic_patch video_max_dynamic_patch mm_hashes mm_content_hashes "
        "need_wait_for_mm_inputs num_items_assigned positional_embed_overrides "
        "multi_item_delimiter_indices token_indices_to_pool kv_hints "
        "return_flat_raw_top_logprobs http_worker_ipc",
    ),
    # of vLLM and llama.cpp
    *_unsupported(
        "openai sampling_params", "this sampler is not supported", "typical_p", (*EMPTY, 1)
    ),
    *_unsupported(
        "openai sampling_params",
        "this sampler is not supported",
        "mirostat dynatemp_range dry_multiplier xtc_probability",
    ),
    *_unsupported("openai", "register a class with --logit-processor", "logits_processors"),
    *_unsupported(
        "openai", "register a class with --logit-processor, send custom_params", "vllm_xargs"
    ),
    *_unsupported("openai", "loops are not looked for: send stop", "repetition_detection"),
    *_unsupported("responses", "send token_ids_logprob to /generate", "logprob_token_ids"),
    *_unsupported("chat", "a chat gives no candidates: send n", "best_of", (*EMPTY, 1)),
    *_unsupported(
        "sampling_params", "send return_logprob and logprob_start_len 0", "prompt_logprobs", (None,)
    ),
    *_unsupported("chat", "task prompts are not supported: write the task in a message", "task"),
    *_unsupported("chat", "this server answers with text only", "audio"),
    *_unsupported("chat", "this server does not search the web", "web_search_options"),
    *_unsupported("chat responses", "this server does not moderate", "moderation"),
    *_unsupported("responses", "not supported: send the input itself", "prompt image"),
    *_unsupported("responses", "this server does not edit conversations", "context_management"),
    *_unsupported("messages", "this server runs no tools itself", "container"),
    *_unsupported("messages", "this route calls no tools itself", "mcp_servers"),
    *_unsupported("messages", "this server does not summarise conversations", "compaction"),
    *_unsupported("messages", "this server holds no threads: send all messages", "thread"),
    *_unsupported("ollama_generate", "not supported on this route", "template context"),
    *_unsupported("ollama_options", "mirostat is not supported", "mirostat"),
    *_unsupported(
        "ollama_options", "this sampler is not supported", "tfs_z typical_p", (*EMPTY, 1)
    ),
)
