"""Server: addresses, keys, templates, parsers, processes, recovery."""

from dataclasses import dataclass, field
from typing import Annotated

from radixlm.config.flag import ABOVE_ZERO, AUTO, NON_NEGATIVE, POSITIVE, Flag, Group, no_op

# vLLM's names
_TOOL_PARSERS = (
    ("llama3_json", "llama3"),
    ("llama4_json", "llama3"),
    ("llama4_pythonic", "pythonic"),
    ("openai", "gpt-oss"),
    ("hunyuan_a13b", "hunyuan"),
    ("phi4_mini_json", "phi4"),
    ("qwen3_xml", "qwen3_coder"),
)
_REASONING_PARSERS = (
    ("openai_gptoss", "gpt-oss"),
    ("hunyuan_a13b", "hunyuan"),
    ("nemotron_v3", "nemotron_3"),
    ("minimax_m2", "minimax"),
    ("minimax_m2_append_think", "minimax-append-think"),
)
_BATCHED = "texts that arrive together are always tokenized together"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServeConfig(Group):
    """Server."""

    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 chooses a free one.", Flag(within="[0, 65535]")] = (
        30000
    )
    uds: Annotated[
        str | None, "Listen on this unix socket, which --host and --port then do not name."
    ] = None
    ssl_certfile: Annotated[
        str | None, "Serve TLS with this certificate (PEM, the chain after it)."
    ] = None
    ssl_keyfile: Annotated[str | None, "Key of --ssl-certfile; unset: it is in that file."] = None
    ssl_keyfile_password: Annotated[
        str | None, "Password of --ssl-keyfile.", Flag(is_secret=True)
    ] = field(default=None, repr=False)
    ssl_ca_certs: Annotated[
        str | None, "Clients must show a certificate that one of these authorities has signed."
    ] = None
    enable_ssl_refresh: Annotated[
        bool, "Read certificate, key and authorities again when the files change."
    ] = False
    fastapi_root_path: Annotated[
        str, "Path before every route, as a proxy has it: /api. Requests come with or without it."
    ] = ""
    disable_ui: Annotated[bool, "Serve no page at /ui, and no /live routes."] = False
    ui_show_text: Annotated[
        bool, "Show operators the texts of requests and of cached prefixes in the page at /ui."
    ] = False
    api_key: Annotated[str | None, "Key that clients must send.", Flag(is_secret=True)] = field(
        default=None, repr=False
    )
    api_key_file: Annotated[
        str | None, "File with one accepted key per line, besides --api-key."
    ] = None
    admin_api_key: Annotated[
        str | None,
        "Key for the routes that change the server (weights, cache, logging, profiles).",
        Flag(is_secret=True),
    ] = field(default=None, repr=False)
    isolate_cache_by: Annotated[
        str,
        "Whose requests share cached prefixes, compiled grammars and encoder outputs: all (none), "
        "or those with the same API key (key), so that no answer's time tells what others asked.",
        Flag(choices=("none", "key")),
    ] = "none"
    cors_allowed_origins: Annotated[
        str,
        "Origins of web pages that may call this server (CORS), with commas. * allows all on the "
        "routes of inference, and none on those that change the server or read what is stored; "
        "none allows none.",
    ] = "*"
    allowed_hosts: Annotated[
        str | None,
        "Further names, with commas, under which a server without keys may be reached (the Host "
        "of a proxy, a public DNS name); * allows all.",
    ] = None
    max_request_bytes: Annotated[int, "Largest request body in bytes.", Flag(within=POSITIVE)] = (
        64 * 1024 * 1024
    )
    max_sequences_per_call: Annotated[
        int, "Most sequences that one call may ask for: its prompts times n.", Flag(within=POSITIVE)
    ] = 8192
    max_logprobs: Annotated[
        int,
        "Most log-probabilities that the answers of one call may hold: its positions times one "
        "plus the top ones and the ids that are asked for.",
        Flag(within=POSITIVE),
    ] = 1 << 20
    response_store_bytes: Annotated[
        int,
        "Bytes of stored responses that are kept in memory; the oldest are dropped beyond it.",
        Flag(within=POSITIVE),
    ] = 256 * 1024 * 1024
    served_model_name: Annotated[
        str, "Model name in /v1/models and in responses; --model-path when unset."
    ] = AUTO
    strict_model_name: Annotated[
        bool, "Refuse other model names with 404; else the one model serves every name."
    ] = False
    unknown_fields: Annotated[
        str,
        "What to do with unknown fields of HTTP request bodies: ignore, ignore and warn (log and "
        "header X-RadixLM-Ignored), or refuse with 400.",
        Flag(choices=("ignore", "warn", "refuse")),
    ] = "warn"
    chat_template: Annotated[
        str | None, "Chat template: a built-in name or a file; the tokenizer's when unset."
    ] = None
    trust_request_chat_template: Annotated[
        bool, "Requests may bring a chat template of their own (chat_template)."
    ] = False
    default_chat_template_kwargs: Annotated[
        str | None,
        "JSON object: variables of the chat template that requests may override, such as "
        '{"enable_thinking": false}.',
        Flag(is_json=True),
    ] = None
    completion_template: Annotated[
        str | None, "Fill-in-the-middle template for code completion: a built-in name or a file."
    ] = None
    stream_response_default_include_usage: Annotated[
        bool, "End every stream with the usage, also where stream_options does not ask for it."
    ] = False
    sampling_defaults: Annotated[
        str,
        "Defaults for sampling parameters that a request omits: the model's "
        "generation_config.json, or OpenAI's.",
        Flag(choices=("model", "openai")),
    ] = "model"
    preferred_sampling_params: Annotated[
        str | None,
        "JSON object of sampling parameters for what a request omits, before --sampling-defaults; "
        "/get_model_info shows it.",
        Flag(is_json=True),
    ] = None
    tool_call_parser: Annotated[
        str,
        "Format of tool calls; 'auto' (and 'response_template') reads it from the chat template.",
        Flag(choices="radixlm.text.tools.table:CHOICES", old_values=_TOOL_PARSERS),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "Format of reasoning; 'auto' (and 'response_template') reads it from the chat template.",
        Flag(choices="radixlm.text.reasoning.table:CHOICES", old_values=_REASONING_PARSERS),
    ] = "auto"
    enable_strict_thinking: Annotated[
        bool, "Reasoning holds neither tool calls nor the end of the answer."
    ] = False
    drop_unknown_tools: Annotated[
        bool, "Drop calls of tools that the request does not list; else they are passed on."
    ] = False
    tool_server: Annotated[
        str | None,
        "MCP tool servers for /v1/responses, with commas: [label=]http://host/path or host:port; "
        "'demo' for built-in Python (docker) and search (EXA_API_KEY).",
    ] = None
    response_store: Annotated[
        str | None,
        "Where responses of /v1/responses are stored: memory, sqlite or redis://host:port; unset: "
        "memory, or sqlite if --file-storage-path is set.",
    ] = None
    file_storage_path: Annotated[
        str,
        "Folder for uploaded files and batches; a folder other than the default also stores the "
        "responses of /v1/responses (--response-store).",
    ] = "sglang_storage"
    enable_cache_report: Annotated[
        bool, "Report in 'usage' how many prompt tokens were cached."
    ] = False
    return_input_ids: Annotated[
        bool, "Answer every chat with its prompt's token ids (return_input_ids_in_sglext)."
    ] = False
    return_output_ids: Annotated[
        bool, "Answer every chat with its tokens' ids (return_output_ids_in_sglext)."
    ] = False
    stream_output: Annotated[
        bool, "Stream only the new text in /generate instead of all text so far."
    ] = False
    allow_auto_truncate: Annotated[
        bool, "Truncate a prompt that is too long instead of refusing it."
    ] = False
    clamp_max_tokens: Annotated[
        bool,
        "Lower a max_tokens beyond the context to what fits instead of refusing it; Anthropic's "
        "and Ollama's routes always do.",
    ] = False
    queue_full_status: Annotated[
        int,
        "Status of the routes under /v1 when the queue is full; other routes answer 503.",
        Flag(choices=(503, 429)),
    ] = 503
    tokenizer_worker_num: Annotated[
        int, "HTTP processes, which also tokenize.", Flag(within=POSITIVE)
    ] = 1
    enable_tokenizer_batch_encode: Annotated[
        bool, "Tokenize the texts of a request together.", no_op(_BATCHED)
    ] = False
    enable_dynamic_batch_tokenizer: Annotated[
        bool, "Tokenize the texts of several requests together.", no_op(_BATCHED)
    ] = False
    dynamic_batch_tokenizer_batch_size: Annotated[
        int, "Maximum number of texts that are tokenized together.", no_op(_BATCHED, POSITIVE)
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float, "Seconds to wait for more texts.", no_op(_BATCHED, NON_NEGATIVE)
    ] = 0.002
    engine_in_process: Annotated[bool, "Run scheduler and model inside the HTTP process."] = False
    skip_server_warmup: Annotated[bool, "Start without a warm-up request."] = False
    warmups: Annotated[
        str | None,
        "Warm-up functions to run before the server is ready, with commas: voice_chat, or "
        "module:function of your own (an async function of the TokenizerManager).",
    ] = None
    watchdog_timeout: Annotated[
        float,
        "Seconds without a heartbeat after which the scheduler is considered dead.",
        Flag(within=ABOVE_ZERO),
    ] = 300.0
    load_timeout_s: Annotated[
        float,
        "Seconds that an engine may take to load its model before it is considered hung; a "
        "restarted one may take 5 times the longest load so far and 30 s, if that is less.",
        Flag(within=ABOVE_ZERO),
    ] = 1800.0
    enable_http2: Annotated[
        bool,
        "Serve HTTP/2 beside HTTP/1.1 on the same port: with prior knowledge, or by ALPN over TLS. "
        "Needs the extra http2.",
    ] = False
    http2_max_concurrent_streams: Annotated[
        int,
        "Requests that may run at once on one connection of HTTP/2; others wait at the client.",
        Flag(within="[1, 4294967295]"),
    ] = 200
    http2_initial_connection_window_size: Annotated[
        int,
        "Bytes that a client may send on a connection of HTTP/2, and on each stream of it, before "
        "the server has read them. Less than 65535 works as that many.",
        Flag(within="[1024, 2147483647]"),
    ] = 1 << 20
    stall_timeout_s: Annotated[
        float,
        "Seconds that a client may leave its answer unread, or its request half sent, before its "
        "request is ended and its connection closed.",
        Flag(within=ABOVE_ZERO),
    ] = 60.0
    drain_timeout: Annotated[
        float, "Seconds that running requests may take after SIGTERM.", Flag(within=NON_NEGATIVE)
    ] = 30.0
    max_engine_restarts: Annotated[
        int,
        "Engine restarts within --restart-window-s after which the server exits.",
        Flag(within=NON_NEGATIVE),
    ] = 3
    restart_window_s: Annotated[
        float, "Seconds over which restarts are counted.", Flag(within=ABOVE_ZERO)
    ] = 600.0
