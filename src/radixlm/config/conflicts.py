"""Options that exclude each other, each pair with its reason, and rules for single options."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.config.adapters import read_lora_path
from radixlm.config.media import PROCESS_OPTIONS
from radixlm.config.observe import is_bucket_rule
from radixlm.config.option import options
from radixlm.config.parallel import ParallelConfig
from radixlm.config.schedule import MIN_WINDOW
from radixlm.config.server_config import ServerConfig
from radixlm.config.states import is_set


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two options that exclude each other. ``first`` and ``second`` are "name" (set to anything
    but its default) or "name=value|value"."""

    first: str
    second: str
    reason: str


_RANKS = "every rank is a process of its own"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NO_TEXT = "without a tokenizer there are only token ids, and no text"
_COMPILED = "a compiled step does not wait for weights that are copied meanwhile"
_NO_TREE = "without the radix tree there is no prefix to keep"
LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
TAKEN_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "le")

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "engine_in_process",
        "tokenizer_worker_num",
        "a scheduler inside one HTTP process cannot be reached from the others",
    ),
    Conflict("engine_in_process", "tp_size", _RANKS),
    Conflict("engine_in_process", "pp_size", _RANKS),
    Conflict("engine_in_process", "dp_size", _RANKS),
    Conflict("engine_in_process", "nnodes", _RANKS),
    Conflict("enable_eplb", "device=cuda", "experts do not move between GPUs"),
    *(
        Conflict("constrained_json_max_whitespace_cnt", other, "both say what is allowed in JSON")
        for other in (
            "constrained_json_whitespace_pattern",
            "constrained_json_disable_any_whitespace",
        )
    ),
    Conflict("skip_tokenizer_init", "chat_template", _NO_TEXT),
    Conflict("skip_tokenizer_init", "completion_template", _NO_TEXT),
    Conflict("skip_tokenizer_init", "grammar_backend=xgrammar|outlines|llguidance", _NO_TEXT),
    Conflict("disable_radix_cache", "enable_hierarchical_cache", _NO_TREE),
    Conflict("disable_radix_cache", "kv_events_config", _NO_TREE),
    Conflict("disable_radix_cache", "warm_restart", _NO_TREE),
    Conflict("engine_in_process", "warm_restart", "the engine ends with the server"),
    Conflict("device=cuda", "warm_restart", "memory of a GPU ends with its process"),
    Conflict("disable_radix_cache", "enable_lmcache", _NO_TREE),
    Conflict("cpu_offload_gb", "offload_group_size", "both say which layers stay on the host"),
    Conflict("cpu_offload_gb", "enable_torch_compile", _COMPILED),
    Conflict("offload_group_size", "enable_torch_compile", _COMPILED),
    Conflict(
        "disable_hybrid_swa_memory",
        "hybrid_kvcache_ratio",
        "one gives all layers full-length pools, the other shorter ones to window layers",
    ),
    Conflict(
        "is_embedding", "speculative_algorithm", "an embedding model has no next token to draft"
    ),
    Conflict("is_embedding", "streaming_window", "vectors are of whole texts"),
    Conflict("is_embedding", "disaggregation_mode=decode", "an embedding model does not decode"),
    Conflict(
        "enable_pdmux",
        "disaggregation_mode=prefill|decode",
        "the server runs only one of the phases",
    ),
    Conflict(
        "device=cpu",
        "attention_backend=flashinfer|fa3|fa4|flashmla|cutlass_mla|trtllm_mla|trtllm_mha"
        "|hybrid_linear_attn|aiter|wave|ascend",
        "its kernels run on a GPU; on a CPU --attention-backend cpu or torch_native work",
    ),
    Conflict(
        "device=cuda|xpu|hpu|npu",
        "attention_backend=cpu",
        "its kernels read host memory; --attention-backend torch_native works everywhere",
    ),
)


def _term(config: ServerConfig, term: str) -> str:
    """The term as a flag if ``config`` satisfies it, else ""."""
    name, _, values = term.partition("=")
    option, value = options()[name], config.value(name)
    is_active = value in values.split("|") if values else is_set(option, value)
    if not is_active:
        return ""
    return option.dashed if value is True else f"{option.dashed} {value}"


def conflict_problems(config: ServerConfig) -> Iterator[str]:
    """One line for each conflict in ``config``."""
    for pair in CONFLICTS:
        first, second = _term(config, pair.first), _term(config, pair.second)
        if first and second:
            yield f"{first} cannot be combined with {second}: {pair.reason}"


def rank_problems(config: ServerConfig) -> Iterator[str]:
    """Ranks must divide evenly over nodes, replicas and experts."""
    p = config.parallel
    try:
        load("radixlm.distributed.topology:Topology")(
            p.tp_size, p.pp_size, p.dp_size if p.enable_dp_attention else 1, p.ep_size,
            nnodes=p.nnodes,
        )  # fmt: skip
    except ConfigError as error:
        yield str(error)
    if p.node_rank >= p.nnodes:
        yield f"--node-rank {p.node_rank} must be below --nnodes {p.nnodes}"
    is_placed_here = p.nnodes > 1 and not p.use_ray
    if is_placed_here and p.dist_init_addr is None:
        yield f"--nnodes {p.nnodes} needs --dist-init-addr host:port, where the nodes meet"
    if is_placed_here and p.cluster_secret_file is None:
        yield f"--nnodes {p.nnodes} needs --cluster-secret-file FILE, with a secret that they share"
    yield from _bootstrap_problems(config)
    if p.nnodes > 1 and p.num_replicas > 1:
        yield (
            f"--nnodes {p.nnodes}: a replica of several nodes has a server of its own: --dp-size 1 "
            "works, and a load balancer before the servers"
        )
    yield from _expert_problems(p)
    if p.moe_dense_tp_size not in (None, 1, p.tp_size):
        yield f"--moe-dense-tp-size {p.moe_dense_tp_size}: 1 and --tp-size {p.tp_size} work"


def _bootstrap_problems(config: ServerConfig) -> Iterator[str]:
    """Ranks of other hosts register at the bootstrap service, which listens at --host."""
    p, host = config.parallel, config.serve.host
    nodes_meet_at = (p.dist_init_addr or host).rpartition(":")[0] or host
    is_on_one_host = nodes_meet_at.startswith("127.") or nodes_meet_at.strip("[]") in _LOOPBACK
    is_pair = config.disagg.disaggregation_mode == "prefill" and p.nnodes > 1
    if is_pair and host in _LOOPBACK and not is_on_one_host:
        yield (
            f"--disaggregation-mode prefill --nnodes {p.nnodes}: ranks of other hosts cannot reach "
            f"--host {host}; 0.0.0.0 works, or an address of node 0"
        )


def attention_group_problems(config: ServerConfig) -> Iterator[str]:
    """Groups of ranks that attend to requests of their own."""
    p = config.parallel
    if p.enable_dp_lm_head and not p.enable_dp_attention:
        yield "--enable-dp-lm-head needs --enable-dp-attention, whose groups it splits"


def _expert_problems(p: ParallelConfig) -> Iterator[str]:
    """Experts move between ranks."""
    if p.enable_eplb and p.tp_size == 1:
        yield "--enable-eplb needs ranks to move experts between: --tp-size 2 --ep-size 2 works"
    if p.enable_eplb and (p.expert_distribution_recorder_buffer_size or 0) > (
        steps := p.eplb_rebalance_num_iterations
    ):
        yield (
            f"--expert-distribution-recorder-buffer-size must not exceed "
            f"--eplb-rebalance-num-iterations {steps}: --enable-eplb reads what is recorded"
        )


def schedule_problems(config: ServerConfig) -> Iterator[str]:
    """Budgets and priorities."""
    s, m = config.schedule, config.memory
    if s.chunked_prefill_size == -1 and s.target_itl_ms is not None:
        yield "--target-itl-ms shortens chunks: with it --chunked-prefill-size 2048 works, not -1"
    if s.chunked_prefill_size == 0:
        yield "--chunked-prefill-size 0 computes nothing; -1 disables chunks, 2048 works"
    most = (config.model.context_length or 1 << 30) - s.streaming_sinks
    if s.streaming_window and not MIN_WINDOW <= s.streaming_window <= most:
        yield (
            f"--streaming-window {s.streaming_window} with --streaming-sinks {s.streaming_sinks}: "
            f"{MIN_WINDOW} to {most} tokens work"
        )
    if m.max_total_tokens is not None and m.page_size and m.max_total_tokens < m.page_size:
        yield f"--max-total-tokens {m.max_total_tokens} holds no page of {m.page_size} tokens"


def triton_problems(config: ServerConfig) -> Iterator[str]:
    """Triton's kernels run on a GPU, or in its interpreter."""
    e = config.execute
    used = (e.attention_backend, e.prefill_attention_backend, e.decode_attention_backend)
    if e.device == "cpu" and "triton" in used and not env.TRITON_INTERPRET.get():
        yield (
            "--device cpu cannot be combined with --attention-backend triton: its kernels run on a "
            "GPU; on a CPU --attention-backend cpu or torch_native work"
        )


def invariance_problems(config: ServerConfig) -> Iterator[str]:
    """Kernels whose results depend on the batch."""
    e = config.execute
    if not e.enable_deterministic_inference:
        return
    works = "triton" if e.device == "cuda" else "cpu"
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if (backend := config.value(name)) not in (None, works, "triton"):
            yield (
                "--enable-deterministic-inference cannot be combined with "
                f"{options()[name].dashed} {backend}: its rows depend on the batch; {works} works"
            )
            return
    if e.enable_torch_compile:
        yield (
            "--enable-deterministic-inference: --enable-torch-compile computes a step's rows by "
            "kernels that depend on their number; leave one of them out"
        )


def bucket_problems(config: ServerConfig) -> Iterator[str]:
    """Rules and lists of histogram buckets."""
    o = config.observe
    for name in ("prompt_tokens_buckets", "generation_tokens_buckets"):
        rule = config.value(name)
        if rule is not None and not is_bucket_rule(rule):
            yield (
                f"{options()[name].dashed} {' '.join(rule)}: not a rule; 'default', "
                "'tse 1000 2 8' (middle, base above 1, count) and 'customer 10 50 100' work"
            )
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        values = getattr(o, f"bucket_{name}")
        if values is not None and list(values) != sorted(set(values)):
            flag = options()[f"bucket_{name}"].dashed
            works = " ".join(map(str, sorted(set(values))))
            yield f"{flag} must rise from value to value; {works} works"


def label_problems(config: ServerConfig) -> Iterator[str]:
    """Labels of customers, and their header."""
    o = config.observe
    labels = o.tokenizer_metrics_allowed_customer_labels or ()
    for place, label in enumerate(labels):
        is_taken = label.startswith("__") or label in TAKEN_LABELS or label in labels[:place]
        if is_taken or not LABEL.fullmatch(label):
            flag = "--tokenizer-metrics-allowed-customer-labels"
            yield f"{flag} {label}: no name of a new Prometheus label; {flag} customer team works"
    for label, value in json.loads(o.extra_metric_labels or "{}").items():
        is_taken = label.startswith("__") or label in TAKEN_LABELS or label in labels
        if is_taken or not isinstance(value, str) or not LABEL.fullmatch(label):
            flag = "--extra-metric-labels"
            yield f'{flag} {label}: no new Prometheus label and its text; {{"team": "a"}} works'
    header = o.tokenizer_metrics_custom_labels_header
    if not re.fullmatch("[!#$%&'*+.^_`|~0-9A-Za-z-]+", header):
        flag = "--tokenizer-metrics-custom-labels-header"
        yield f"{flag} {header!r}: no name of an HTTP header; x-customer-labels works"


def media_problems(config: ServerConfig) -> Iterator[str]:
    """The JSON of --limit-mm-data-per-request and --mm-process-config."""
    for kind, most in json.loads(config.media.limit_mm_data_per_request or "{}").items():
        is_number = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        if kind not in ("image", "video", "audio") or not is_number:
            yield f'--limit-mm-data-per-request {kind!r}: {most!r}; {{"image": 4}} works'
    yield from _processing_problems(json.loads(config.media.mm_process_config))


def _processing_problems(given: Mapping[str, Any]) -> Iterator[str]:
    flag = "--mm-process-config"
    for kind, chosen in given.items():
        known = PROCESS_OPTIONS.get(kind)
        if known is None or not isinstance(chosen, Mapping):
            yield f'{flag} {kind!r}: {chosen!r}; {{"image": {{"max_pixels": 1048576}}}} works'
            continue
        for name, value in chosen.items():
            if name not in known:
                yield f"{flag} {kind}.{name}: options of {kind} are {', '.join(known) or 'none'}"
            elif isinstance(value, bool) or not isinstance(value, known[name]) or not value > 0:
                yield f"{flag} {kind}.{name}: {value!r} is no number above 0; 1 works"
        least, most = chosen.get("min_pixels"), chosen.get("max_pixels")
        if isinstance(least, int) and isinstance(most, int) and least > most:
            yield f"{flag} {kind}: min_pixels {least} are more than max_pixels {most}"


def kv_events_problems(config: ServerConfig) -> Iterator[str]:
    """The JSON of --kv-events-config."""
    text = config.observe.kv_events_config
    if not text:
        return
    try:
        load("radixlm.kv_events.options:read_options")(text, config.parallel.dp_size)
    except ConfigError as error:
        yield str(error)


def adapter_problems(config: ServerConfig) -> Iterator[str]:
    """Adapters: names, ranks, targets and limits."""
    a = config.adapters
    names = [read_lora_path(text).name for text in a.lora_paths or ()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"--lora-paths names the adapter {name!r} twice"
    if "all" in (a.lora_target_modules or ()) and len(a.lora_target_modules or ()) > 1:
        yield "--lora-target-modules all stands alone"
    limit = a.max_loaded_loras if a.enable_lora or names else None  # else it bounds nothing
    most = a.max_loras_per_batch
    if limit is not None and most is not None and limit < most:
        yield f"--max-loaded-loras {limit} is below --max-loras-per-batch {most}"
    pinned = sum(read_lora_path(text).is_pinned for text in a.lora_paths or ())
    if most is not None and pinned > most - 1:
        yield (
            f"--lora-paths pins {pinned} adapters, --max-loras-per-batch {most} allows {most - 1}"
        )
    if a.enable_lora and config.execute.enable_torch_compile:
        yield "--enable-lora: compiled steps have no adapters; leave out --enable-torch-compile"
    if limit is not None and len(names) > limit:
        yield f"--lora-paths lists {len(names)} adapters, --max-loaded-loras allows {limit}"


def name_problems(config: ServerConfig) -> Iterator[str]:
    """Repeatable NAME=VALUE options."""
    for name, works in (("kernel", "rms_norm=reference"), ("logit_processor", "x=package.mod:Cls")):
        seen: set[str] = set()
        for text in config.value(name):
            key, _, target = text.partition("=")
            if not key or not target or (name == "logit_processor" and ":" not in target):
                yield f"{options()[name].dashed} {text}: not NAME=VALUE; {works} works"
            elif key in seen:
                yield f"{options()[name].dashed} sets {key} twice"
            seen.add(key)


def key_problems(config: ServerConfig) -> Iterator[str]:
    """Options that need API keys; keys and names that are empty, as of an unset variable."""
    serve = config.serve
    for name, text in (("api_key", "KEY"), ("admin_api_key", "KEY"), ("served_model_name", "NAME")):
        if config.value(name) == "":
            flag = options()[name].dashed
            yield f"{flag} is empty; leave it out, or give {flag} {text}"
    if serve.isolate_cache_by == "key" and not (serve.api_key or serve.api_key_file):
        yield "--isolate-cache-by key: clients have no keys; add --api-key-file FILE"


Rule = Callable[[ServerConfig], Iterable[str]]

RULES: tuple[Rule, ...] = (
    triton_problems,
    invariance_problems,
    kv_events_problems,
    conflict_problems,
    rank_problems,
    attention_group_problems,
    schedule_problems,
    bucket_problems,
    label_problems,
    media_problems,
    adapter_problems,
    name_problems,
    key_problems,
)


def problems(config: ServerConfig) -> list[str]:
    """Every conflict and violated rule, one line each."""
    return [line for rule in RULES for line in rule(config)]


def check(config: ServerConfig) -> None:
    """ConfigError that lists every problem."""
    if lines := problems(config):
        raise ConfigError("\n".join(lines))
