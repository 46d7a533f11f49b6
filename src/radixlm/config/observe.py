"""Logs, metrics, traces."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import AUTO, NON_NEGATIVE, POSITIVE, Flag, Group, no_op

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL = Flag(choices=LOG_LEVELS, old_values=(("warn", "warning"), ("trace", "debug")))
MAX_BUCKETS = 100
LOG_STEPS, LOG_EVERY_S = 40, 5.0
_BUCKET_RULE = "'default', 'tse MIDDLE BASE COUNT' or 'customer VALUE ...'."


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ObserveConfig(Group):
    """Logging and metrics."""

    log_level: Annotated[str, "Level of the logs.", _LEVEL] = "info"
    log_level_http: Annotated[
        str, "Level of the HTTP server's logs; --log-level when unset.", _LEVEL
    ] = AUTO
    log_format: Annotated[
        str,
        "text: lines for people, coloured on a terminal; json: an object a line.",
        Flag(choices=("text", "json")),
    ] = "text"
    log_requests: Annotated[bool, "Log every request."] = False
    log_requests_level: Annotated[
        int,
        "0: metadata; 1: sampling parameters too; 2: the start of input and output; 3: all of it.",
        Flag(choices=(0, 1, 2, 3)),
    ] = 2
    log_requests_format: Annotated[
        str,
        "Lines of --log-requests: text, or json: an object with rid, obj and out.",
        Flag(choices=("text", "json"), part_of=("log_requests",)),
    ] = "text"
    log_requests_target: Annotated[
        tuple[str, ...] | None,
        "Where --log-requests writes: stdout, and folders for a file an hour; the log when unset.",
        Flag(part_of=("log_requests",)),
    ] = None
    crash_dump_folder: Annotated[
        str | None,
        "Folder for the requests of the last 5 minutes before a crash; `radixlm replay` sends "
        "them again. The files contain prompts and outputs.",
    ] = None
    show_time_cost: Annotated[
        bool,
        "Log the time of marked sections.",
        no_op("no section of the code is marked, nor is one in SGLang"),
    ] = False
    decode_log_interval: Annotated[
        int,
        f"Steps between two log lines about the load; with {LOG_STEPS} at most one in 5 s.",
        Flag(within=POSITIVE),
    ] = LOG_STEPS
    enable_request_time_stats_logging: Annotated[
        bool, "Log how long each part of a request took, as SGLang does."
    ] = False
    gc_warning_threshold_secs: Annotated[
        float,
        "Warn about garbage collections that take longer; 0 disables it.",
        Flag(within=NON_NEGATIVE),
    ] = 0.0
    enable_metrics: Annotated[bool, "Serve Prometheus metrics at /metrics."] = False
    enable_metrics_for_all_schedulers: Annotated[
        bool, "Every scheduler reports its own metrics.", no_op("there is one scheduler")
    ] = False
    enable_mfu_metrics: Annotated[
        bool,
        "Metrics of the floating point operations, and of the bytes read and written, estimated.",
        Flag(part_of=("enable_metrics",)),
    ] = False
    export_metrics_to_file: Annotated[
        bool, "Append counts and times of each request to a file an hour, without texts."
    ] = False
    export_metrics_to_file_dir: Annotated[
        str | None,
        "The folder of these files.",
        Flag(part_of=("export_metrics_to_file",)),
    ] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        "Header with labels for the metrics of requests, a JSON object.",
        Flag(part_of=("tokenizer_metrics_allowed_customer_labels",)),
    ] = "x-customer-labels"
    tokenizer_metrics_allowed_customer_labels: Annotated[
        tuple[str, ...] | None,
        "Labels that the header may set; 100 different sets are counted, the rest as 'other'.",
        Flag(part_of=("enable_metrics",)),
    ] = None
    extra_metric_labels: Annotated[
        str | None,
        'JSON object: further labels of every metric, such as {"team": "search"}.',
        Flag(is_json=True, part_of=("enable_metrics",)),
    ] = None
    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        "Histogram bounds of the time to the first token, in seconds.",
        Flag(within="(0, inf)"),
    ] = None
    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None,
        "Histogram bounds of the time between two tokens, in seconds.",
        Flag(within="(0, inf)"),
    ] = None
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None,
        "Histogram bounds of the time of a whole request, in seconds.",
        Flag(within="(0, inf)"),
    ] = None
    collect_tokens_histogram: Annotated[bool, "Histograms of prompt and output lengths."] = False
    prompt_tokens_buckets: Annotated[
        tuple[str, ...] | None, "Buckets of prompt lengths: " + _BUCKET_RULE
    ] = None
    generation_tokens_buckets: Annotated[
        tuple[str, ...] | None, "Buckets of output lengths: " + _BUCKET_RULE
    ] = None
    kv_events_config: Annotated[
        str | None,
        "JSON object: where events of the KV cache are published (docs/kv-events.md).",
        Flag(is_json=True),
    ] = None
    enable_trace: Annotated[bool, "OpenTelemetry traces (docs/tracing.md)."] = False
    oltp_traces_endpoint: Annotated[
        str,
        "OpenTelemetry collector: host:port or a URL.",
        Flag(("--otlp-traces-endpoint",), part_of=("enable_trace",)),
    ] = "localhost:4317"


def is_bucket_rule(rule: tuple[str, ...]) -> bool:
    """Whether ``rule`` is default | tse MIDDLE BASE COUNT | customer VALUE ..."""
    kind, *words = " ".join(rule).split() or [""]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return False
    if kind == "default":
        return not numbers
    if kind == "tse":
        if len(numbers) != 3 or not words[2].isdecimal():
            return False
        middle, base, count = numbers
        return abs(middle) < 1e18 and 1 < base <= 1e3 and 1 <= count <= MAX_BUCKETS
    distinct = len(set(numbers)) == len(numbers) > 0
    return kind == "customer" and distinct and all(0 <= number < 1e18 for number in numbers)


def bucket_values(rule: tuple[str, ...] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    """The rising bounds that a checked rule stands for; ``default`` for None and 'default'.

    'tse M B N' is M and the N bounds M +- B^1, M +- B^2, ... nearest to it.
    """
    kind, *words = " ".join(rule or ("default",)).split()
    if kind == "default":
        return default
    if kind == "customer":
        return tuple(sorted(float(word) for word in words))
    middle, base, count = float(words[0]), float(words[1]), int(words[2])
    distances = [base**power for power in range(1, (count + 1) // 2 + 1)]
    bounds = {middle, *(middle + d for d in distances), *(max(0.0, middle - d) for d in distances)}
    return tuple(sorted(bounds))
