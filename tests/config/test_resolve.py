"""Resolution of options that the user left open."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.config import resolve as resolving
from radixlm.config.flag import AUTO, Flag
from radixlm.config.flat_options import read_values
from radixlm.config.groups import GROUPS
from radixlm.config.host import HostInfo
from radixlm.config.option import Option, options
from radixlm.config.resolve import STEPS, Change, apply, resolve
from radixlm.config.server_config import ServerConfig, flat

CPU = HostInfo(device="cpu", num_cpus=2, seed=7)
AUTO_NAMES = {
    field.name
    for owner in GROUPS.values()
    for field in fields(owner)
    if field.default is AUTO and type(None) not in get_args(get_args(field.type)[0])
}
"""Options whose type says that they are settled, although they are open by default."""


def settle(facts: HostInfo = CPU, **flat_values: Any) -> ServerConfig:
    values = read_values(flat_values)
    return resolve(ServerConfig().with_values(values), facts, frozenset(values))


def test_a_cpu_gets_its_defaults() -> None:
    config = settle()
    assert {name: config.value(name) for name in AUTO_NAMES} == {
        "tokenizer_path": "radix-tiny",
        "served_model_name": "radix-tiny",
        "log_level_http": "info",
        "device": "cpu",
        "attention_backend": "cpu",
        "prefill_attention_backend": "cpu",
        "decode_attention_backend": "cpu",
        "sampling_backend": "pytorch",
        "grammar_backend": "llguidance",
        "page_size": 16,
        "chunked_prefill_size": 2048,
        "max_running_requests": 64,
        "cpu_threads": 2,
        "random_seed": 7,
    }
    assert config.memory.mem_fraction_static == 0.6


def test_options_with_non_optional_types_are_resolved() -> None:
    assert len(AUTO_NAMES) == 14
    assert not [name for name in AUTO_NAMES if settle().value(name) is None]


def test_options_left_open_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "radixlm"):
        settle()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("options left open: device cpu, ") and ", page_size 16, " in line
    with caplog.at_level(logging.INFO, "radixlm"):
        settle(replace(CPU, device="xpu"))
    assert "device cpu (there is no executor for xpu yet), " in caplog.records[-1].getMessage()


def test_each_change_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "radixlm"):
        settle()
    lines = [record.getMessage() for record in caplog.records]
    assert "page_size unset -> 16: default on cpu" in lines
    # --mem-fraction-static, open on a GPU; all in one line
    assert len(lines) == len(AUTO_NAMES) + 2
    assert all("\n" not in line for line in lines)


def test_values_of_the_user_stay(caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {
        "device": "cpu",
        "tokenizer_path": "t",
        "served_model_name": "s",
        "log_level_http": "error",
        "attention_backend": "torch_native",
        "decode_attention_backend": "torch_native",
        "grammar_backend": "none",
        "page_size": 64,
        "chunked_prefill_size": 100,
        "max_running_requests": 3,
        "mem_fraction_static": 0.2,
        "cpu_threads": 1,
        "random_seed": 1,
    }
    config = settle(**asked)
    assert {name: config.value(name) for name in asked} == asked
    assert config.execute.prefill_attention_backend == "torch_native"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


SAFE: dict[str, st.SearchStrategy[Any]] = {
    "page_size": st.integers(1, 64),
    "chunked_prefill_size": st.sampled_from([-1, 1, 512]),
    "schedule_policy": st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]),
    "disable_radix_cache": st.booleans(),
    "skip_tokenizer_init": st.booleans(),
    "attention_backend": st.sampled_from([None, "cpu", "torch_native"]),
    "max_prefill_tokens": st.integers(1, 10_000),
    "context_length": st.integers(1, 4096),
    "device": st.sampled_from([None, "auto", "cpu"]),
}


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.fixed_dictionaries({}, optional=SAFE), st.sampled_from([None, {"context_len": 4096}]))
def test_resolving_is_stable_and_loud(asked: dict[str, Any], model: dict[str, int] | None) -> None:
    """Resolving twice changes nothing, and a user's value changes only with a warning."""
    facts = replace(CPU, model=model)
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    resolving.logger.addHandler(handler)
    try:
        config = settle(facts, **asked)
    finally:
        resolving.logger.removeHandler(handler)
    again = resolve(config, replace(facts, seed=99), frozenset(asked))
    assert flat(again) == flat(config)
    for name, value in asked.items():
        is_open = value is None or value == "auto"
        said = any(line.startswith(f"{name} ") for line in seen)
        assert is_open or said == (config.value(name) != value)


def test_a_gpu_without_an_executor_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "radixlm"):
        config = settle(replace(CPU, device="xpu"))
    assert config.execute.device == "cpu"
    assert "device unset -> cpu: there is no executor for xpu yet" in caplog.text


def test_a_built_gpu_gets_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    old = options()["device"]
    flag = Flag(choices=old.flag.allowed, built=("auto", "cpu", "cuda"), needs="x")
    new = Option(old.name, old.group, old.kind, old.is_many, old.default, old.help, flag)
    table = {**options(), "device": new}
    monkeypatch.setattr(resolving, "options", lambda: table)
    monkeypatch.setattr("radixlm.config.states.options", lambda: table)
    monkeypatch.setattr(resolving, "BUILT_ATTENTION", ("cpu", "torch_native", "triton"))
    config = settle(replace(CPU, device="cuda"))
    assert config.execute.attention_backend == "triton"
    assert (config.memory.page_size, config.schedule.max_running_requests) == (16, 256)
    assert config.schedule.chunked_prefill_size == 8192
    assert config.memory.mem_fraction_static is None  # a trial run decides


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_every_page_size_has_the_fast_attention(page_size: int) -> None:
    config = settle(page_size=page_size)
    assert config.memory.page_size == page_size
    assert config.execute.attention_backend == "cpu"


@pytest.mark.parametrize(("has_kernels", "is_told"), [(True, True), (False, False)])
def test_slow_attention_is_told_where_there_is_a_fast_one(
    has_kernels: bool,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolving, "find_spec", lambda name: object() if has_kernels else None)
    with caplog.at_level(logging.INFO, "radixlm"):
        settle(attention_backend="torch_native")
    assert ("without the flag attention takes a tenth" in caplog.text) == is_told
    caplog.clear()
    with caplog.at_level(logging.INFO, "radixlm"):
        settle()
    assert "a tenth" not in caplog.text


def test_context_length_comes_from_the_model() -> None:
    facts = replace(CPU, model={"context_len": 100})
    assert settle(facts).model.context_length == 100
    assert settle(facts, context_length=50).model.context_length == 50
    with pytest.raises(ConfigError, match=r"--context-length 101 exceeds .* works: 100"):
        settle(facts, context_length=101)
    longer = settle(replace(facts, may_exceed_context=True), context_length=101)
    assert longer.model.context_length == 101
    assert settle(context_length=101).model.context_length == 101


def test_an_unchunked_prompt_needs_a_step_of_its_length(caplog: pytest.LogCaptureFixture) -> None:
    facts = replace(CPU, model={"context_len": 40_000})
    config = settle(facts, chunked_prefill_size=-1)
    assert config.schedule.max_prefill_tokens == 40_000
    assert not caplog.records
    config = settle(facts, chunked_prefill_size=-1, max_prefill_tokens=10)
    assert config.schedule.max_prefill_tokens == 40_000
    assert "max_prefill_tokens 10 -> 40000: an unchunked prompt" in caplog.text
    assert settle(facts, max_prefill_tokens=10).schedule.max_prefill_tokens == 10


def test_attention_of_one_group_is_attention(caplog: pytest.LogCaptureFixture) -> None:
    got = settle(enable_dp_attention=True, enable_dp_lm_head=True)
    assert not got.parallel.enable_dp_attention and not got.parallel.enable_dp_lm_head
    assert "enable_dp_attention true -> false: --dp-size 1 is one group" in caplog.text


def test_policies_that_mean_something_else(caplog: pytest.LogCaptureFixture) -> None:
    assert settle(schedule_policy="priority").schedule.enable_priority_scheduling
    assert settle(schedule_policy="lpm").schedule.schedule_policy == "lpm"
    assert not caplog.records
    config = settle(schedule_policy="lpm", disable_radix_cache=True)
    assert config.schedule.schedule_policy == "fcfs"
    assert "schedule_policy lpm -> fcfs: there is no prefix cache" in caplog.text


def test_servers_of_a_pair_keep_a_prefix_cache(caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("prefill", "decode"):
        config = settle(disaggregation_mode=mode, disable_radix_cache=True)
        assert not config.memory.disable_radix_cache
        assert "disable_radix_cache true -> false: pages of the other server" in caplog.text
        alone = {"disaggregation_transfer_backend": "fake"}
        config = settle(disaggregation_mode=mode, disable_radix_cache=True, **alone)
        assert config.memory.disable_radix_cache


@pytest.mark.parametrize(
    ("name", "package"), [("xgrammar", "xgrammar"), ("outlines", "outlines_core")]
)
def test_a_grammar_library_that_is_missing_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def find(module: str) -> object | None:
        return None if module == package else object()

    monkeypatch.setattr("radixlm.config.resolve.find_spec", find)
    with pytest.raises(ConfigError, match=f"--grammar-backend {name} needs the package.*llguid"):
        settle(grammar_backend=name)
    assert settle(grammar_backend="llguidance").grammar.grammar_backend == "llguidance"


def test_no_tokenizer_means_no_grammar() -> None:
    assert settle(skip_tokenizer_init=True).grammar.grammar_backend == "none"


def test_paths_of_adapters_switch_adapters_on() -> None:
    config = ServerConfig.from_kwargs(lora_paths=["a=/a"])
    (change,) = resolving.adjust_adapters(config, CPU)
    assert (change.name, change.value) == ("enable_lora", True)


def test_planned_contradictory_and_idle_options_are_met(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="--enable-pdmux is not built yet"):
        settle(enable_pdmux=True)
    with pytest.raises(ConfigError, match="cannot be combined"):
        settle(engine_in_process=True, tokenizer_worker_num=2)
    with pytest.raises(ConfigError, match="--dp-size 2"):
        settle(engine_in_process=True, dp_size=2)
    with caplog.at_level(logging.INFO, "radixlm"):
        settle(disable_cuda_graph=True)
    assert caplog.text.count("--disable-cuda-graph has no effect") == 1
    given = frozenset({"disable_cuda_graph"})
    with caplog.at_level(logging.INFO, "radixlm"):  # as the engine's process does
        resolve(settle(disable_cuda_graph=True), CPU, given, tells=False)
    assert caplog.text.count("--disable-cuda-graph has no effect") == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_automatic_value_is_called_idle(device: str, caplog: pytest.LogCaptureFixture) -> None:
    facts = replace(CPU, device=device)
    with caplog.at_level(logging.INFO, "radixlm"):
        assert settle(facts).adapters.max_loras_per_batch is None
    assert "no effect" not in caplog.text
    most = settle(facts, lora_paths=["a=/a"]).adapters.max_loras_per_batch
    assert most == (8 if device == "cuda" else None)


def test_a_step_returns_changes_and_touches_nothing() -> None:
    config = ServerConfig()
    before = flat(config)
    for step in STEPS:
        list(step(config, CPU))
    assert flat(config) == before


def test_an_equal_value_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig()
    assert apply(config, Change("port", 30000, "why"), frozenset()) is config
    assert not caplog.records
