"""Fill in options that the user left unset, in a fixed order of pure functions.

Each step reads (config, host) and returns changes; ``resolve`` applies and logs them, one
line each. A value that the user set is changed only if it cannot work, and then with a warning.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.config.conflicts import check
from radixlm.config.execute import BUILT_ATTENTION, MODEL_ATTENTION
from radixlm.config.host import HostInfo
from radixlm.config.option import options
from radixlm.config.server_config import ServerConfig
from radixlm.config.speculate import BLOCK_DRAFTS, MAX_STEPS, MAX_TREE
from radixlm.config.states import (
    check_states,
    compile_notes,
    draft_notes,
    expert_notes,
    no_effect_notes,
    tree_notes,
    window_notes,
)
from radixlm.config.values import show

logger = logging.getLogger(__name__)

_GRAMMAR_MODULES = {"xgrammar": ("xgrammar", "tvm_ffi"), "outlines": ("outlines_core",)}
CPU_DEFAULTS = {
    "page_size": 16,
    "chunked_prefill_size": 2048,
    "max_running_requests": 64,
    "mem_fraction_static": 0.6,
}
"""A CPU shares its memory with other processes; steps of 2048 tokens keep the latency low."""
GPU_DEFAULTS = {"page_size": 16, "chunked_prefill_size": 8192, "max_running_requests": 256}
"""Pages of 16 tokens keep the page tables small: CUDA graphs read them whole."""


@dataclass(frozen=True, slots=True)
class Change:
    """Option ``name`` becomes ``value``, because of ``reason``. ``is_minor``: logged at debug."""

    name: str
    value: Any
    reason: str
    is_minor: bool = False


_COMMON = ("default on", "the best ", "drawn at start")  # reasons that say no more than the value

Step = Callable[[ServerConfig, HostInfo], Iterator[Change]]


def fill_device(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """The best device of the machine that has an executor."""
    if config.execute.device not in (None, "auto"):
        return
    built = options()["device"].flag.built or ()
    if host.device in built:
        yield Change("device", host.device, "the best device of this machine")
    else:
        yield Change("device", "cpu", f"there is no executor for {host.device} yet")


def fill_names(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Names and levels that default to another option."""
    path = config.model.model_path
    if config.model.tokenizer_path is None:
        yield Change("tokenizer_path", path, "same as --model-path", is_minor=True)
    if config.serve.served_model_name is None:
        yield Change("served_model_name", path, "same as --model-path", is_minor=True)
    if config.observe.log_level_http is None:
        level = config.observe.log_level
        yield Change("log_level_http", level, "same as --log-level", is_minor=True)


def fill_context(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """The context length: the model's, or a shorter one that the user set."""
    longest = (host.model or {}).get("context_len")
    asked = config.model.context_length
    if longest is None:
        return
    if asked is None:
        yield Change("context_length", longest, "the model's", is_minor=True)
    elif asked > longest and not host.may_exceed_context:
        raise ConfigError(
            f"--context-length {asked} exceeds the model's {longest} tokens; "
            f"a value that works: {longest} (or set RADIXLM_ALLOW_LONGER_CONTEXT=1)"
        )


def fill_backends(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Kernels, by device."""
    execute = config.execute
    backend = execute.attention_backend
    if backend in (None, *MODEL_ATTENTION):
        is_cpu = execute.device == "cpu"
        best = _first_cpu_attention() if is_cpu else _first_gpu_attention()
        why = f"the best on {execute.device}"
        if backend:
            why = "the layers of such models choose among the keys, over any backend"
        yield Change("attention_backend", best, why)
        backend = best
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        if config.value(name) in (None, *MODEL_ATTENTION):
            yield Change(name, backend, "same as --attention-backend", is_minor=True)
    if execute.sampling_backend is None:
        yield Change("sampling_backend", "pytorch", "runs everywhere", is_minor=True)


def _first_cpu_attention() -> str:
    # a package installed without a C++ compiler has no CPU kernels
    return "cpu" if find_spec("radixlm._cpu") else "torch_native"


def attention_notes(config: ServerConfig) -> Iterator[str]:
    """That this CPU has faster attention than what is asked for."""
    execute = config.execute
    is_slow = execute.attention_backend == "torch_native" and _first_cpu_attention() == "cpu"
    if execute.device == "cpu" and is_slow:
        yield (
            "--attention-backend torch_native is a slow reference on a CPU: without the flag "
            "attention takes a tenth of the time or less"
        )


def _first_gpu_attention() -> str:
    has_triton = find_spec("triton") is not None
    return "triton" if has_triton and "triton" in BUILT_ATTENTION else "torch_native"


def fill_grammar(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """The grammar library; none without a tokenizer. ConfigError if the one that is asked for is
    not installed: it would fail the first request that needs it."""
    name = config.grammar.grammar_backend
    missing = [m for m in _GRAMMAR_MODULES.get(name or "", ()) if find_spec(m) is None]
    if missing:
        raise ConfigError(
            f"--grammar-backend {name} needs the package {missing[0]!r}: "
            f"pip install 'radixlm[grammar]', or use --grammar-backend llguidance"
        )
    if name is not None:
        return
    if config.model.skip_tokenizer_init:
        reason = "a grammar needs the text of tokens, and there is no tokenizer"
        yield Change("grammar_backend", "none", reason)
    else:
        yield Change("grammar_backend", "llguidance", "always installed", is_minor=True)


def fill_sizes(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Defaults that depend on the device."""
    device = config.execute.device
    defaults = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    for name, value in defaults.items():
        if config.value(name) is None:
            yield Change(name, value, f"default on {device}")


def fill_threads(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Threads and the seed."""
    if config.execute.cpu_threads is None:
        yield Change("cpu_threads", host.num_cpus, "all cores", is_minor=True)
    if config.execute.random_seed is None:
        yield Change("random_seed", host.seed, "drawn at start")


def adjust_pairs(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Prefill and decode servers keep a prefix cache, into which pages come."""
    disagg = config.disagg
    is_paired = disagg.disaggregation_mode != "null"
    if is_paired and disagg.disaggregation_transfer_backend != "fake":
        yield Change("disable_radix_cache", False, "pages of the other server come into it")


def adjust_order(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Policies that imply another option, or that need a prefix cache."""
    policy = config.schedule.schedule_policy
    if policy == "priority" and not config.schedule.enable_priority_scheduling:
        yield Change("enable_priority_scheduling", True, "required by --schedule-policy priority")
    if config.memory.disable_radix_cache and policy in ("lpm", "dfs-weight"):
        yield Change("schedule_policy", "fcfs", "there is no prefix cache")


def adjust_unchunked(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Without chunks the longest prompt must fit into one step."""
    longest = config.model.context_length or 0
    schedule = config.schedule
    if schedule.chunked_prefill_size == -1 and longest > schedule.max_prefill_tokens:
        yield Change("max_prefill_tokens", longest, "an unchunked prompt fills one step")


def adjust_groups(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Data-parallel attention of one group is attention."""
    if config.parallel.enable_dp_attention and config.parallel.dp_size == 1:
        for name in ("enable_dp_attention", "enable_dp_lm_head"):
            yield Change(name, False, "--dp-size 1 is one group, which attends to all requests")


def adjust_adapters(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """--lora-paths implies --enable-lora. On a GPU adapters share the memory of the KV cache."""
    if config.adapters.lora_paths and not config.adapters.enable_lora:
        yield Change("enable_lora", True, "required by --lora-paths")
    has_adapters = config.adapters.enable_lora or config.adapters.lora_paths
    is_open = config.adapters.max_loras_per_batch is None
    if has_adapters and is_open and config.execute.device == "cuda":
        yield Change("max_loras_per_batch", 8, "default on cuda", is_minor=True)


TREE_TOKENS = 8


def fill_drafts(config: ServerConfig, host: HostInfo) -> Iterator[Change]:
    """Lengths of drafts: of two that are set, the steps count, but for the one step that makes a
    block. The automatic ones are SGLang's. A tree has as many tokens as are set, or eight."""
    s = config.speculate
    algorithm, steps = s.speculative_algorithm, s.speculative_num_steps
    tokens = s.speculative_num_draft_tokens
    if algorithm is None or host.model is None:
        return
    if algorithm in BLOCK_DRAFTS and steps == 1:
        steps = None
    branches = s.speculative_eagle_topk or 1
    is_tree = branches > 1 and algorithm not in ("NGRAM", *BLOCK_DRAFTS)
    if tokens is not None and (steps is None or algorithm == "NGRAM") and not is_tree:
        steps = max(1, tokens - 1)
        yield Change("speculative_num_steps", steps, "the draft tokens but the first")
    elif steps is None:
        table = load("radixlm.arch.registry:DRAFT_STEPS").get(host.model.get("architecture", ""), 5)
        steps = {"STANDALONE": 3, "NGRAM": 11, "DFLASH": 15, "DSPARK": 7}.get(algorithm, table)
        yield Change("speculative_num_steps", steps, f"where {algorithm} starts")
        if tokens is None:
            yield Change("speculative_adaptive", True, "no length of drafts is set")
    if steps > MAX_STEPS:
        steps = MAX_STEPS
        yield Change("speculative_num_steps", steps, "the longest draft")
    if is_tree:
        most = 1 + branches + (steps - 1) * branches * branches
        size = min(max(tokens or TREE_TOKENS, 2), most, MAX_TREE)
        if tokens != size:
            yield Change("speculative_num_draft_tokens", size, "the tree and the token before it")
    elif tokens != steps + 1:
        yield Change("speculative_num_draft_tokens", steps + 1, "the draft and the token before it")


STEPS: tuple[Step, ...] = (
    fill_device,
    fill_names,
    fill_context,
    fill_backends,
    fill_grammar,
    fill_sizes,
    fill_threads,
    adjust_pairs,
    adjust_order,
    adjust_unchunked,
    adjust_groups,
    adjust_adapters,
    fill_drafts,
)


def apply(config: ServerConfig, change: Change, explicit: frozenset[str]) -> ServerConfig:
    """Set one option. A line about it: a warning where it overrides the user's value; else for
    debugging, since ``resolve`` tells all of them in one."""
    option = options()[change.name]
    old = config.value(change.name)
    if old == change.value:
        return config
    is_override = change.name in explicit and old is not None
    logger.log(
        logging.WARNING if is_override else logging.DEBUG,
        "%s %s -> %s: %s",
        change.name,
        show(option, old),
        show(option, change.value),
        change.reason,
    )
    was = config.reasons.get(change.name, (show(option, old), ""))[0]
    reasons = {**config.reasons, change.name: (was, change.reason)}
    return replace(config.with_values({change.name: change.value}), reasons=reasons)


def _filled(change: Change) -> str:
    """An option left open and its value; the reason where it is not the common one."""
    text = f"{change.name} {show(options()[change.name], change.value)}"
    return text if change.reason.startswith(_COMMON) else f"{text} ({change.reason})"


def resolve(
    config: ServerConfig, host: HostInfo, explicit: frozenset[str], tells: bool = True
) -> ServerConfig:
    """``config`` with every option resolved and checked.

    Once resolved, no option whose default is AUTO is None. ConfigError if an option needs
    something that is not built, or if options contradict each other. Resolving again, with the
    model known, is allowed: resolved options stay. ``tells``: log what has no effect.
    """
    check_states(config)
    config = replace(config, given=explicit)
    filled: dict[str, str] = {}
    for step in STEPS:
        for change in step(config, host):
            before, config = config, apply(config, change, explicit)
            if before is not config and change.name not in explicit and not change.is_minor:
                filled[change.name] = _filled(change)
    check(config)
    if filled:
        logger.info("options left open: %s", ", ".join(filled.values()))
    has_window = (host.model or {}).get("has_window")
    notes = (*no_effect_notes(config, config.execute.device), *window_notes(config, has_window))
    others = (attention_notes, compile_notes, draft_notes, expert_notes, tree_notes)
    for note in (*notes, *(note for of in others for note in of(config))) if tells else ():
        logger.info("%s", note)
    return config
