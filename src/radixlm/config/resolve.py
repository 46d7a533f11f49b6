"""Fill in what the user left open, in a fixed order of pure functions.

Each step looks at (config, facts, given) and returns changes; the driver applies and logs them,
one line a change. A value that the user gave is changed only where it cannot be meant, and then
with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.config.conflicts import check
from radixlm.config.execute import BUILT_ATTENTION
from radixlm.config.host import HostInfo
from radixlm.config.option import options
from radixlm.config.server_config import ServerConfig
from radixlm.config.states import check_states, compile_notes, no_effect_notes, window_notes
from radixlm.config.values import show

logger = logging.getLogger(__name__)

CPU_DEFAULTS = {
    "page_size": 16,
    "chunked_prefill_size": 2048,
    "max_running_requests": 64,
    "mem_fraction_static": 0.6,
}
"""A CPU shares its memory with everything else, and a step of 2048 tokens keeps streams moving."""
GPU_DEFAULTS = {
    "page_size": 16,
    "chunked_prefill_size": 8192,
    "max_running_requests": 256,
}
"""Pages of 16 keep the page tables small, which graphs read whole."""


@dataclass(frozen=True, slots=True)
class Change:
    """Option ``name`` becomes ``value``, because of ``reason``. ``is_minor``: logged at debug."""

    name: str
    value: Any
    reason: str
    is_minor: bool = False


Step = Callable[[ServerConfig, HostInfo, frozenset[str]], Iterator[Change]]


def fill_device(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """The device: the machine's best that has an executor."""
    if config.execute.device not in (None, "auto"):
        return
    built = options()["device"].flag.built or ()
    if facts.device in built:
        yield Change("device", facts.device, "the best device here")
    else:
        yield Change("device", "cpu", f"there is no executor for {facts.device} yet")


def fill_names(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """Names and levels that follow another option."""
    path = config.model.model_path
    if config.model.tokenizer_path is None:
        yield Change("tokenizer_path", path, "same as --model-path", is_minor=True)
    if config.serve.served_model_name is None:
        yield Change("served_model_name", path, "same as --model-path", is_minor=True)
    if config.observe.log_level_http is None:
        level = config.observe.log_level
        yield Change("log_level_http", level, "same as --log-level", is_minor=True)


def fill_context(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """The context length: the model's, which a given one may not exceed."""
    longest = (facts.model or {}).get("context_len")
    asked = config.model.context_length
    if longest is None:
        return
    if asked is None:
        yield Change("context_length", longest, "the model's", is_minor=True)
    elif asked > longest and not facts.may_exceed_context:
        raise ConfigError(
            f"--context-length {asked} exceeds the {longest} tokens that the model was made for; "
            f"a value that works: {longest} (or set RADIXLM_ALLOW_LONGER_CONTEXT=1)"
        )


def fill_backends(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """Kernels, by device."""
    execute = config.execute
    backend = execute.attention_backend
    if backend is None:
        is_cpu = execute.device == "cpu"
        page_size = config.memory.page_size
        backend = _first_cpu_attention(page_size) if is_cpu else _first_gpu_attention()
        pages = f" with pages of {page_size}" if page_size and is_cpu else ""
        yield Change("attention_backend", backend, f"the best on {execute.device}{pages}")
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        if config.value(name) is None:
            yield Change(name, backend, "same as --attention-backend", is_minor=True)
    if execute.sampling_backend is None:
        yield Change("sampling_backend", "pytorch", "runs everywhere", is_minor=True)


def _first_cpu_attention(page_size: int | None) -> str:
    # a package that was installed without a C++ compiler has no kernels of its own, and those that
    # there are take pages of whole multiples of 16 tokens
    fits = page_size is None or page_size % 16 == 0
    return "cpu" if fits and find_spec("radixlm._cpu") else "torch_native"


def _first_gpu_attention() -> str:
    has_triton = find_spec("triton") is not None
    return "triton" if has_triton and "triton" in BUILT_ATTENTION else "torch_native"


def fill_grammar(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """The grammar library; none without a tokenizer."""
    if config.grammar.grammar_backend is not None:
        return
    if config.model.skip_tokenizer_init:
        reason = "a grammar needs the text of tokens, and there is no tokenizer"
        yield Change("grammar_backend", "none", reason)
    else:
        yield Change("grammar_backend", "llguidance", "always installed", is_minor=True)


def fill_sizes(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """Pages, budgets and shares, by device."""
    device = config.execute.device
    defaults = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    for name, value in defaults.items():
        if config.value(name) is None:
            yield Change(name, value, f"default on {device}")


def fill_threads(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """Threads and the seed."""
    if config.execute.cpu_threads is None:
        yield Change("cpu_threads", facts.num_cpus, "all cores", is_minor=True)
    if config.execute.random_seed is None:
        yield Change("random_seed", facts.seed, "drawn at start")


def settle_order(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> Iterator[Change]:
    """Policies that mean another option, or nothing without a prefix cache."""
    policy = config.schedule.schedule_policy
    if policy == "priority" and not config.schedule.enable_priority_scheduling:
        yield Change("enable_priority_scheduling", True, "required by --schedule-policy priority")
    if config.memory.disable_radix_cache and policy in ("lpm", "dfs-weight"):
        yield Change("schedule_policy", "fcfs", "without a prefix cache all prefixes are empty")


def settle_unchunked(
    config: ServerConfig, facts: HostInfo, given: frozenset[str]
) -> Iterator[Change]:
    """Without chunks, the longest prompt must fit into one step."""
    longest = config.model.context_length or 0
    schedule = config.schedule
    if schedule.chunked_prefill_size == -1 and longest > schedule.max_prefill_tokens:
        yield Change("max_prefill_tokens", longest, "an unchunked prompt fills one step")


def settle_adapters(
    config: ServerConfig, facts: HostInfo, given: frozenset[str]
) -> Iterator[Change]:
    """Paths of adapters switch adapters on."""
    if config.adapters.lora_paths and not config.adapters.enable_lora:
        yield Change("enable_lora", True, "required by --lora-paths")


STEPS: tuple[Step, ...] = (
    fill_device,
    fill_names,
    fill_context,
    fill_backends,
    fill_grammar,
    fill_sizes,
    fill_threads,
    settle_order,
    settle_unchunked,
    settle_adapters,
)


def apply(config: ServerConfig, change: Change, given: frozenset[str]) -> ServerConfig:
    """Set one option and log one line: "page_size unset -> 16: default on cpu"."""
    option = options()[change.name]
    old = config.value(change.name)
    if old == change.value:
        return config
    is_overruled = change.name in given and old is not None
    level = logging.DEBUG if change.is_minor else logging.INFO
    logger.log(
        logging.WARNING if is_overruled else level,
        "%s %s -> %s: %s",
        change.name,
        show(option, old),
        show(option, change.value),
        change.reason,
    )
    return config.with_values({change.name: change.value})


def resolve(config: ServerConfig, facts: HostInfo, given: frozenset[str]) -> ServerConfig:
    """``config`` with every option settled and checked, ready for the roles.

    Once resolved, no option whose default is AUTO is None. ConfigError if an option needs
    something that is not built, or if options contradict each other. Resolving again, with the
    model known, is allowed: settled options stay.
    """
    check_states(config)
    for step in STEPS:
        for change in step(config, facts, given):
            config = apply(config, change, given)
    check(config)
    has_window = (facts.model or {}).get("has_window")
    notes = (*no_effect_notes(config, config.execute.device), *window_notes(config, has_window))
    for note in (*notes, *compile_notes(config)):
        logger.info("%s", note)
    return config
