"""The gateway's flags: one line a flag, in groups. A class adds its group to those above it.

Names, defaults and meanings are those of sglang-router 0.3.2 and of smg 1.9, then our own.
"""

from typing import Annotated

from radixlm.base.record import Record
from radixlm.config.flag import ABOVE_ZERO, NON_NEGATIVE, POSITIVE, Flag, no_op

_COUNT = Flag(within=POSITIVE)
_FROM_0 = Flag(within=NON_NEGATIVE)
_ABOVE_0 = Flag(within=ABOVE_ZERO)
_FRACTION = Flag(within="[0, 1]")
_SHARE = Flag(within="(0, 1]")
_FROM_1 = Flag(within="[1, inf)")
_PORT = Flag(within="[1, 65535]")
_SECRET = Flag(is_secret=True)
_ANY = Flag(const=())  # zero or more values
_NAMES = (
    "random round_robin cache_aware power_of_two manual consistent_hashing prefix_hash "
    "passthrough least_load least_work"
)
_POLICY = Flag(choices=tuple(_NAMES.split()))
_PREFILL_POLICY = Flag(choices=(*_NAMES.split(), "bucket"))


def _planned(needs: str) -> Flag:
    return Flag(state="planned", needs=needs)


_MESH = _planned("a protocol between gateways")
_ENCODE = _planned("a worker that encodes media alone")
_HOOKS = _planned("a WebAssembly runtime")


class Workers(Record):
    """Address and workers."""

    host: Annotated[str, "Address to listen on."] = "0.0.0.0"
    port: Annotated[int, "Port to listen on; 0: any that is free.", Flag(within="[0, 65535]")] = (
        30000
    )
    worker_urls: Annotated[tuple[str, ...], "URLs of workers: http://host:port.", _ANY] = ()
    worker_startup_timeout_secs: Annotated[int, "How long a worker may take to join.", _COUNT] = (
        1800
    )
    worker_startup_check_interval: Annotated[
        int, "Longest wait between two tries to join a worker, in seconds.", _COUNT
    ] = 30
    worker_startup_delay: Annotated[
        int, "Seconds before a worker is asked the first time.", _FROM_0
    ] = 0
    connect_timeout_secs: Annotated[int, "Seconds to connect to a worker.", _COUNT] = 5
    pool_idle_timeout_secs: Annotated[
        int, "Seconds that an idle connection to a worker is kept.", _FROM_0
    ] = 50
    pool_max_idle_per_host: Annotated[
        int, "Idle connections to a worker that are kept.", _FROM_0
    ] = 500
    tcp_keepalive_secs: Annotated[
        int, "Idle seconds after which TCP asks whether a worker is there; 0: never.", _FROM_0
    ] = 30
    model_alias: Annotated[
        tuple[str, ...],
        "A further name of a model, alias=model; repeatable.",
        Flag(is_repeatable=True),
    ] = ()
    dp_aware: Annotated[bool, "Make a worker of each data-parallel rank: URL@0, URL@1, ..."] = False
    enable_igw: Annotated[bool, "Several models, each with workers and a policy of its own."] = (
        False
    )
    reuse_port: Annotated[bool, "Share the port with a gateway that takes over."] = False
    backend: Annotated[
        str,
        "What the workers are: servers with SGLang's routes, or OpenAI endpoints.",
        Flag(("--runtime",), choices=("sglang", "vllm", "openai")),
    ] = "sglang"
    launch_servers: Annotated[
        int,
        "Start so many servers on this machine and route to them. Then all other flags are those "
        "of radixlm serve, and the gateway's begin with --router-.",
        _FROM_0,
    ] = 0
    dp_worker_base_port: Annotated[int, "First port of --launch-servers.", _PORT] = 31000


class Policies(Workers):
    """Routing policy."""

    policy: Annotated[str, "Which worker gets a request.", _POLICY] = "cache_aware"
    prefill_policy: Annotated[str | None, "Policy of prefill workers.", _PREFILL_POLICY] = None
    decode_policy: Annotated[str | None, "Policy of decode workers.", _POLICY] = None
    cache_threshold: Annotated[
        float, "cache_aware: share of a prompt that must match a worker's.", _FRACTION
    ] = 0.3
    balance_abs_threshold: Annotated[
        int, "Difference of loads above which the least loaded is taken.", _FROM_0
    ] = 64
    balance_rel_threshold: Annotated[
        float, "Ratio of loads above which the least loaded is taken.", _FROM_1
    ] = 1.5
    balance_token_usage_threshold: Annotated[
        float,
        "cache_aware: KV usage above that of the coolest worker from which a worker gets nothing "
        "new; 1: off.",
        _SHARE,
    ] = 1.0
    overload_token_usage_threshold: Annotated[
        float, "cache_aware: KV usage above which a worker gets nothing new; 1: off.", _SHARE
    ] = 1.0
    routing_key_override: Annotated[
        bool, "With every policy a call with X-SMG-Routing-Key stays with its key's worker."
    ] = False
    eviction_interval_secs: Annotated[
        int,
        "Seconds between two evictions.",
        Flag(
            ("--eviction-interval",),
            within=POSITIVE,
            state="no-op",
            why="the prefix tree keeps to its size at each request",
        ),
    ] = 60
    max_tree_size: Annotated[int, "Bytes of a model's prefix tree.", _COUNT] = 1 << 26
    bucket_adjust_interval_secs: Annotated[
        int, "bucket: seconds between two adjustments of the bounds.", _COUNT
    ] = 5
    max_idle_secs: Annotated[int, "manual: seconds after which a key is forgotten.", _COUNT] = 14400
    assignment_mode: Annotated[
        str, "manual: how a new key is assigned.", Flag(choices=("random", "min_load", "min_group"))
    ] = "random"
    prefix_token_count: Annotated[int, "prefix_hash: tokens that are hashed.", _COUNT] = 256
    prefix_hash_load_factor: Annotated[
        float, "prefix_hash: load over the mean above which the ring is walked on.", _FROM_1
    ] = 1.25
    least_load_kv_pressure_weight: Annotated[
        float, "least_load: seconds of waiting that a half full KV cache is worth.", _FROM_0
    ] = 0.15
    least_load_default_throughput: Annotated[
        float, "least_load: tokens a second, while no worker tells its rate.", _ABOVE_0
    ] = 2000.0
    least_load_mean_prefill_tokens: Annotated[
        int,
        "least_load: tokens of a prompt of unknown length.",
        no_op("the gateway estimates each prompt's tokens from its body", POSITIVE),
    ] = 1024
    load_monitor_interval: Annotated[
        int, "Seconds between two questions for workers' loads.", _COUNT
    ] = 10


class Index(Policies):
    """True cache and tokens."""

    block_size: Annotated[int, "Tokens of a block where a worker does not tell.", _COUNT] = 16
    disable_kv_events: Annotated[bool, "Do not read the workers' KV events."] = False
    index_max_mb: Annotated[int, "Memory of the index of cached blocks, in MB.", _COUNT] = 512
    placement_ttl_secs: Annotated[
        int, "Seconds that the gateway trusts its own placements without events.", _COUNT
    ] = 120
    disable_token_ids: Annotated[bool, "Send workers no token ids beside messages."] = False
    model_path: Annotated[str | None, "Model whose tokenizer the gateway uses."] = None
    tokenizer_path: Annotated[str | None, "Tokenizer, where it is not the model's."] = None
    disable_tokenizer_autoload: Annotated[
        bool, "Load no tokenizer but those of flags and of POST /v1/tokenizers."
    ] = False
    chat_template: Annotated[str | None, "Chat template, where it is not the model's."] = None
    tokenizer_cache_enable_l0: Annotated[bool, "Keep the tokens of whole texts."] = False
    tokenizer_cache_l0_max_entries: Annotated[int, "Texts in that cache.", _COUNT] = 10000
    tokenizer_cache_enable_l1: Annotated[bool, "Keep tokens of prefixes up to special tokens."] = (
        False
    )
    tokenizer_cache_l1_max_memory: Annotated[int, "Bytes of that cache.", _COUNT] = 50 << 20
    reasoning_parser: Annotated[str | None, "Parser of POST /parse/reasoning."] = None
    tool_call_parser: Annotated[str | None, "Parser of POST /parse/function_call."] = None


class Disaggregation(Index):
    """Prefill and decode."""

    pd_disaggregation: Annotated[bool, "Each request goes to a prefill and a decode worker."] = (
        False
    )
    prefill: Annotated[
        tuple[str, ...],
        "URL of a prefill worker and its bootstrap port, or none; repeatable.",
        Flag(is_repeatable=True),
    ] = ()
    decode: Annotated[
        tuple[str, ...], "URL of a decode worker; repeatable.", Flag(is_repeatable=True)
    ] = ()
    mini_lb: Annotated[
        bool,
        "The reference's debug balancer.",
        no_op("the gateway itself sends to prefill and decode"),
    ] = False
    encode: Annotated[
        tuple[str, ...],
        "URL of an encode worker.",
        Flag(is_repeatable=True, state="planned", needs=_ENCODE.needs),
    ] = ()


class Discovery(Disaggregation):
    """Discovery."""

    service_discovery: Annotated[bool, "Watch Kubernetes for workers."] = False
    selector: Annotated[tuple[str, ...], "Labels of worker pods: key=value.", _ANY] = ()
    prefill_selector: Annotated[tuple[str, ...], "Labels of prefill pods.", _ANY] = ()
    decode_selector: Annotated[tuple[str, ...], "Labels of decode pods.", _ANY] = ()
    service_discovery_port: Annotated[int, "Port of a pod's server.", _PORT] = 80
    service_discovery_namespace: Annotated[str | None, "Namespace; all if unset."] = None
    bootstrap_port_annotation: Annotated[str, "Annotation with a pod's bootstrap port."] = (
        "sglang.ai/bootstrap-port"
    )
    worker_ports_annotation: Annotated[str, "Annotation with the ports of a pod's servers."] = (
        "smg.ai/worker-ports"
    )
    model_id_from: Annotated[
        str | None, "Where a pod's model id stands: namespace, label:KEY or annotation:KEY."
    ] = None
    discovery_dns: Annotated[
        tuple[str, ...], "Names whose every address is a worker: host:port.", _ANY
    ] = ()
    discovery_file: Annotated[
        str | None, "File with a worker URL a line, read when it changes."
    ] = None
    discovery_interval_secs: Annotated[
        float, "Seconds between two looks at names and file.", _ABOVE_0
    ] = 5.0


class Limits(Discovery):
    """Limits and fairness."""

    max_payload_size: Annotated[int, "Bytes of a request's body.", _COUNT] = 512 << 20
    max_concurrent_requests: Annotated[
        int, "Requests at the same time; -1: no limit.", Flag(within="[-1, inf)")
    ] = -1
    queue_size: Annotated[int, "Requests that may wait for their turn.", _FROM_0] = 100
    queue_timeout_secs: Annotated[int, "Seconds that a request may wait.", _FROM_0] = 60
    rate_limit_tokens_per_second: Annotated[
        int | None, "Requests a second that may begin.", _FROM_0
    ] = None
    request_timeout_secs: Annotated[
        int, "Seconds that an answer may take, without the wait in the queue.", _COUNT
    ] = 1800
    shutdown_grace_period_secs: Annotated[
        int, "Seconds that running requests have after SIGTERM.", _FROM_0
    ] = 180
    fair_share: Annotated[bool, "Tenants share the workers fairly."] = False
    tenants: Annotated[
        str | None, "YAML file with tenants' weights and ceilings; implies --fair-share."
    ] = None
    fair_share_header: Annotated[str, "Header that names the tenant."] = "x-tenant"
    cors_allowed_origins: Annotated[
        tuple[str, ...], "Origins of browsers; all if empty.", _ANY
    ] = ()
    disable_ui: Annotated[bool, "Serve no page at /ui."] = False


class Retries(Limits):
    """Retries, resume and hedging."""

    retry_max_retries: Annotated[int, "Tries of a request in all.", _COUNT] = 5
    retry_initial_backoff_ms: Annotated[int, "Wait before the second try.", _COUNT] = 50
    retry_max_backoff_ms: Annotated[int, "Longest wait between tries.", _COUNT] = 30000
    retry_backoff_multiplier: Annotated[float, "Growth of the wait.", _FROM_1] = 1.5
    retry_jitter_factor: Annotated[float, "Random share of the wait.", _FRACTION] = 0.2
    disable_retries: Annotated[bool, "Try once."] = False
    resume_foreign: Annotated[
        bool, "Go on with greedy text on SGLang and vLLM too, from prompt and text so far."
    ] = False
    journal_memory_mb: Annotated[
        int, "Memory of all streams' journals, in MB; 0: no stream is moved.", _FROM_0
    ] = 256
    hedge: Annotated[bool, "Ask a second worker when the first token is late."] = False
    hedge_fraction: Annotated[float, "Share of requests that may be hedged.", _FRACTION] = 0.05
    rolling: Annotated[str | None, "Command that restarts a worker, run for each in turn."] = None
    drain_deadline_secs: Annotated[
        float, "Seconds after which a draining worker's streams move.", _FROM_0
    ] = 30.0


class Health(Retries):
    """Health and breaker."""

    health_check_endpoint: Annotated[str, "Path of the check."] = "/health"
    health_check_port: Annotated[int | None, "Port of the check, if another.", _PORT] = None
    health_check_interval_secs: Annotated[int, "Seconds between two checks.", _COUNT] = 60
    health_check_timeout_secs: Annotated[int, "Seconds that a check may take.", _COUNT] = 5
    health_failure_threshold: Annotated[int, "Failed checks until unhealthy.", _COUNT] = 3
    health_success_threshold: Annotated[int, "Good checks until ready again.", _COUNT] = 2
    disable_health_check: Annotated[bool, "Make no checks."] = False
    remove_unhealthy_workers: Annotated[bool, "Remove a worker that becomes unhealthy."] = False
    cb_failure_threshold: Annotated[int, "Failures that open a breaker.", _COUNT] = 10
    cb_success_threshold: Annotated[int, "Successes that close it.", _COUNT] = 3
    cb_timeout_duration_secs: Annotated[int, "Seconds that it stays open.", _COUNT] = 60
    cb_window_duration_secs: Annotated[int, "Seconds in which failures count.", _COUNT] = 120
    disable_circuit_breaker: Annotated[bool, "Keep no breakers."] = False


class Observe(Health):
    """Logs, metrics and traces."""

    log_dir: Annotated[str | None, "Directory for a log file as well."] = None
    log_level: Annotated[
        str, "Level of the log.", Flag(choices=("debug", "info", "warn", "error"))
    ] = "info"
    log_json: Annotated[bool, "Write log lines as JSON.", Flag(("--json-log",))] = False
    access_log: Annotated[bool, "One log line a request."] = False
    prometheus_host: Annotated[str, "Address of the metrics."] = "0.0.0.0"
    prometheus_port: Annotated[
        int, "Port of the metrics; -1: none.", Flag(within="[-1, 65535]")
    ] = 29000
    prometheus_duration_buckets: Annotated[
        tuple[float, ...], "Buckets of durations, in seconds.", _ANY
    ] = ()
    request_id_headers: Annotated[
        tuple[str, ...], "Headers whose first value is the request's id.", _ANY
    ] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    enable_trace: Annotated[bool, "Export a span a call, by OTLP over gRPC."] = False
    otlp_traces_endpoint: Annotated[
        str, "Collector of traces.", Flag(part_of=("enable_trace",))
    ] = "localhost:4317"


class History(Observe):
    """Stored responses and conversations."""

    history_backend: Annotated[
        str,
        "Where responses and conversations are kept.",
        Flag(choices=("memory", "none", "oracle", "postgres", "redis")),
    ] = "memory"
    history_memory_mb: Annotated[int, "Memory of the history in memory, in MB.", _COUNT] = 256
    oracle_wallet_path: Annotated[str | None, "Directory of the wallet."] = None
    oracle_tns_alias: Annotated[str | None, "Alias in tnsnames.ora."] = None
    oracle_connect_descriptor: Annotated[
        str | None, "Connection descriptor.", Flag(("--oracle-dsn",))
    ] = None
    oracle_username: Annotated[str | None, "User.", Flag(("--oracle-user",))] = None
    oracle_password: Annotated[str | None, "Password.", _SECRET] = None
    oracle_pool_min: Annotated[
        int, "Fewest connections.", no_op("connections are opened when they are needed", POSITIVE)
    ] = 1
    oracle_pool_max: Annotated[int, "Most connections.", _COUNT] = 16
    oracle_pool_timeout_secs: Annotated[int, "Seconds to wait for a connection.", _COUNT] = 30
    postgres_db_url: Annotated[str | None, "URL of the database.", _SECRET] = None
    postgres_pool_max: Annotated[
        int, "Most connections.", Flag(("--postgres-pool-max-size",), within=POSITIVE)
    ] = 16
    redis_url: Annotated[str | None, "URL of the server.", _SECRET] = None
    redis_pool_max: Annotated[
        int, "Most connections.", Flag(("--redis-pool-max-size",), within=POSITIVE)
    ] = 16
    redis_retention_days: Annotated[int, "Days that entries are kept; -1: for ever."] = 30
    mcp_config_path: Annotated[
        str | None, "MCP servers.", _planned("tools that the gateway itself calls")
    ] = None


class Security(History):
    """TLS and keys."""

    tls_cert_path: Annotated[str | None, "Certificate of this server, PEM."] = None
    tls_key_path: Annotated[str | None, "Its private key, PEM."] = None
    client_cert_path: Annotated[str | None, "Certificate shown to workers, PEM."] = None
    client_key_path: Annotated[str | None, "Its private key, PEM."] = None
    ca_cert_paths: Annotated[
        tuple[str, ...],
        "Authorities that sign workers' certificates.",
        Flag(("--ca-cert-path",), const=()),
    ] = ()
    api_key: Annotated[str | None, "Key of clients, sent to workers too.", _SECRET] = None
    control_plane_api_keys: Annotated[
        tuple[str, ...],
        "Keys of the admin routes: id:name:role:key, where role is admin or user.",
        Flag(is_secret=True, const=()),
    ] = ()
    control_plane_audit_enabled: Annotated[bool, "One log line an admin request."] = False
    jwt_issuer: Annotated[str | None, "Issuer of admins' tokens (OIDC)."] = None
    jwt_audience: Annotated[str | None, "Audience that tokens must name."] = None
    jwt_jwks_uri: Annotated[str | None, "Where the issuer's keys are, if not discovered."] = None
    jwt_role_claim: Annotated[str, "Claim of a token that holds roles."] = "roles"
    jwt_role_mapping: Annotated[
        tuple[str, ...], "Role of a token to ours: role=admin or role=user.", _ANY
    ] = ()


class Flags(Security):
    """Not built."""

    enable_mesh: Annotated[bool, "Gossip between gateways.", _MESH] = False
    mesh_server_name: Annotated[str | None, "Name among the gateways.", _MESH] = None
    mesh_host: Annotated[str, "Address of the gossip.", _MESH] = "0.0.0.0"
    mesh_advertise_host: Annotated[str | None, "Address that others are told.", _MESH] = None
    mesh_port: Annotated[int, "Port of the gossip.", _MESH] = 39527
    mesh_peer_urls: Annotated[tuple[str, ...], "Other gateways.", _MESH] = ()
    router_selector: Annotated[tuple[str, ...], "Labels of gateways' pods.", _MESH] = ()
    epd_disaggregation: Annotated[bool, "Encode, prefill and decode apart.", _ENCODE] = False
    encode_policy: Annotated[str | None, "Policy of encode workers.", _ENCODE] = None
    encode_selector: Annotated[tuple[str, ...], "Labels of encode pods.", _ENCODE] = ()
    dp_minimum_tokens_scheduler: Annotated[
        bool,
        "Pairs: the rank with the fewest tokens.",
        _planned("a choice of ranks beside that of workers; --dp-aware makes ranks workers"),
    ] = False
    schema_config: Annotated[
        str | None, "Names of the history's tables.", _planned("tables of other names")
    ] = None
    storage_context_headers: Annotated[
        tuple[str, ...], "Headers that hooks of the history are told.", _HOOKS
    ] = ()
    storage_hook_wasm_path: Annotated[str | None, "Hooks of the history.", _HOOKS] = None
    oracle_external_auth: Annotated[
        bool, "Let Oracle's wallet say who we are.", _planned("a login without a name")
    ] = False
    enable_wasm: Annotated[bool, "WebAssembly plug-ins.", _planned("a WebAssembly runtime")] = False
