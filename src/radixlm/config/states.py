"""No flag is ignored silently: one that is not built is an error, one without effect is logged."""

from collections.abc import Iterator
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.config.option import Option, options
from radixlm.config.server_config import ServerConfig
from radixlm.config.values import show


def is_set(option: Option, value: Any) -> bool:
    """Whether ``value`` is neither unset nor the default."""
    return value is not None and value != option.default


def is_idle(option: Option, config: ServerConfig) -> bool:
    """Whether the option is a detail of features that are all left off."""
    parents = [options()[name] for name in option.flag.part_of]
    return bool(parents) and not any(is_set(one, config.value(one.name)) for one in parents)


def _is_built(option: Option, value: Any) -> bool:
    """Whether the value's choices work."""
    values = value if option.is_many else (value,)
    return option.flag.built is None or all(item in option.flag.built for item in values)


def unbuilt_reason(option: Option, value: Any) -> str:
    """Why ``value`` does not work yet, or ""."""
    flag = option.flag
    if not is_set(option, value):
        return ""
    written = f"{option.dashed} {show(option, value)}" if value is not True else option.dashed
    needs = f" It needs {flag.needs}." if flag.needs else ""
    if flag.state == "planned":
        default = show(option, option.default)
        return f"{written} is not built yet.{needs} Leave it out (default: {default})."
    if flag.why or _is_built(option, value):
        return ""
    works = ", ".join(map(str, flag.built or ())) or "leaving it out"
    return f"{written} is not built yet.{needs} What works: {works}."


def check_states(config: ServerConfig) -> None:
    """ConfigError that lists every option whose value is not built yet."""
    problems = [
        unbuilt_reason(option, config.value(name))
        for name, option in options().items()
        if not is_idle(option, config)
    ]
    if any(problems):
        raise ConfigError("\n".join(filter(None, problems)))


WINDOW_OPTIONS = ("hybrid_kvcache_ratio", "swa_full_tokens_ratio", "disable_hybrid_swa_memory")


def window_notes(config: ServerConfig, has_window: bool | None) -> Iterator[str]:
    """One line for each option about sliding windows that is set for a model without them."""
    for name in WINDOW_OPTIONS:
        if has_window is False and is_set(options()[name], config.value(name)):
            yield f"{options()[name].dashed} has no effect: no layer has a sliding window"


def expert_notes(config: ServerConfig) -> Iterator[str]:
    """One line for each option about places of experts that leaves all where they are."""
    names = ("ep_num_redundant_experts", "init_expert_location", "ep_dispatch_algorithm")
    given = [name for name in names if is_set(options()[name], config.value(name))]
    is_alone = config.parallel.tp_size == 1
    draws_copies = config.parallel.ep_dispatch_algorithm in ("static", "dynamic")
    has_no_copies = given == ["ep_dispatch_algorithm"] and draws_copies
    why = "the only rank has all experts" if is_alone else "no expert has a copy"
    for name in given if is_alone or has_no_copies else ():
        yield f"{options()[name].dashed} has no effect: {why}"


def compile_notes(config: ServerConfig) -> Iterator[str]:
    """One line if --torch-compile-max-bs is set without --enable-torch-compile."""
    option = options()["torch_compile_max_bs"]
    is_limited = is_set(option, config.execute.torch_compile_max_bs)
    if is_limited and not config.execute.enable_torch_compile:
        yield f"{option.dashed} has no effect: it is for --enable-torch-compile"


def tree_notes(config: ServerConfig) -> Iterator[str]:
    """One line if --radix-eviction-policy is set and nothing is cached."""
    option = options()["radix_eviction_policy"]
    is_chosen = is_set(option, config.memory.radix_eviction_policy)
    if is_chosen and config.memory.disable_radix_cache:
        yield f"{option.dashed} has no effect: --disable-radix-cache leaves nothing to evict"


def draft_notes(config: ServerConfig) -> Iterator[str]:
    """One line for each option of another drafter than the one that is used."""
    algorithm = config.speculate.speculative_algorithm
    for name, option in options().items() if algorithm is not None else ():
        is_ngram = name.startswith("speculative_ngram_")
        others = name in ("speculative_draft_model_path", "speculative_eagle_topk")
        is_idle_here = is_ngram if algorithm != "NGRAM" else others
        if is_idle_here and is_set(option, config.value(name)):
            yield f"{option.dashed} has no effect: --speculative-algorithm is {algorithm}"


def no_effect_notes(config: ServerConfig, device: str) -> Iterator[str]:
    """One line for each option that is set and has no effect."""
    for name, option in options().items():
        flag = option.flag
        value = config.value(name)
        if not is_set(option, value):
            continue
        if flag.part_of and is_idle(option, config):
            features = " or ".join(options()[parent].dashed for parent in flag.part_of)
            yield f"{option.dashed} has no effect: it is a detail of {features}"
        elif flag.state == "no-op":
            yield f"{option.dashed} has no effect: {flag.why}"
        elif flag.why and not _is_built(option, value):
            yield f"{option.dashed} {show(option, value)} has no effect: {flag.why}"
        elif flag.only_device and flag.only_device != device and name in config.given:
            yield f"{option.dashed} has no effect: it is for {flag.only_device}, this is {device}"
