"""No flag is ignored silently: planned options stop the start, options without effect warn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.flag import Flag
from radixlm.config.option import Option, options
from radixlm.config.parallel import ParallelConfig
from radixlm.config.server_config import ServerConfig
from radixlm.config.states import (
    check_states,
    compile_notes,
    expert_notes,
    no_effect_notes,
    tree_notes,
    unbuilt_reason,
    window_notes,
)


def make(default: object = 1, kind: type = int, many: bool = False, **flag: object) -> Option:
    return Option("an_option", "g", kind, many, default, "Help.", Flag(**flag))  # type: ignore[arg-type]


def test_a_planned_value_names_flag_need_and_default() -> None:
    option = make(state="planned", needs="a rocket")
    assert unbuilt_reason(option, 1) == unbuilt_reason(option, None) == ""
    assert unbuilt_reason(option, 2) == (
        "--an-option 2 is not built yet. It needs a rocket. Leave it out (default: 1)."
    )
    switch = make(False, bool, state="planned", needs="a rocket")
    assert unbuilt_reason(switch, True).startswith("--an-option is not built yet.")


def test_a_planned_choice_names_those_that_work() -> None:
    option = make("a", str, choices=("a", "b", "c"), built=("a", "b"), needs="a rocket")
    assert unbuilt_reason(option, "b") == ""
    assert unbuilt_reason(option, "c") == (
        "--an-option c is not built yet. It needs a rocket. What works: a, b."
    )
    many = make(None, str, True, choices=("a", "b"), built=("a",), needs="a rocket")
    assert unbuilt_reason(many, ("a",)) == ""
    assert unbuilt_reason(many, ("a", "b")).startswith("--an-option a b is not built yet.")


def test_the_state_alone_decides() -> None:
    assert unbuilt_reason(make(state="works", needs="a rocket"), 2) == ""


def test_every_planned_option_stops_the_start() -> None:
    samples = {int: 7, float: 0.7, bool: True, str: "sample"}
    for name, option in options().items():
        if option.flag.state != "planned" or option.flag.part_of:
            continue
        sample = samples[option.kind]
        config = ServerConfig().with_values({name: (sample,) if option.is_many else sample})
        with pytest.raises(ConfigError) as caught:
            check_states(config)
        assert str(caught.value).startswith(option.dashed)
        assert option.flag.needs in str(caught.value)


def test_a_detail_of_an_option_that_is_off_has_no_effect() -> None:
    for name, option in options().items():
        if option.flag.part_of:
            sample: object = {int: 7, float: 0.7, bool: True, str: "sample"}[option.kind]
            value = (sample,) if option.is_many else sample
            config = ServerConfig().with_values({name: value})
            check_states(config)
            (note,) = no_effect_notes(config, "cpu")
            assert note.startswith(f"{option.dashed} has no effect: it is a detail of --")


def test_all_problems_are_listed_at_once() -> None:
    config = ServerConfig.from_kwargs(enable_pdmux=True, cpu_offload_gb=1, offload_mode="meta")
    with pytest.raises(ConfigError) as caught:
        check_states(config)
    assert len(str(caught.value).splitlines()) == 2


def test_the_defaults_start() -> None:
    check_states(ServerConfig())
    assert list(no_effect_notes(ServerConfig(), "cpu")) == []


def test_every_option_without_effect_warns() -> None:
    samples = {int: 7, float: 0.7, bool: True, str: "sample"}
    for name, option in options().items():
        if option.flag.state == "no-op":
            sample = samples[option.kind]
            config = ServerConfig().with_values({name: (sample,) if option.is_many else sample})
            (note,) = no_effect_notes(config, "cpu")
            assert note == f"{option.dashed} has no effect: {option.flag.why}"


def test_an_option_for_another_device_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    port = options()["port"]
    gpu_port = Option("port", "serve", int, False, 30000, "Help.", Flag(only_device="cuda"))
    monkeypatch.setattr("radixlm.config.states.options", lambda: {"port": gpu_port})
    config = ServerConfig.from_kwargs(port=1)
    assert list(no_effect_notes(config, "cpu")) == []  # nobody has given it
    config = replace(config, given=frozenset({"port"}))
    assert list(no_effect_notes(config, "cuda")) == []
    (note,) = no_effect_notes(config, "cpu")
    assert note == "--port has no effect: it is for cuda, this is cpu"
    assert port.flag.only_device == ""


def test_window_options_without_windows_warn() -> None:
    config = ServerConfig.from_kwargs(swa_full_tokens_ratio=0.5)
    assert len(list(window_notes(config, False))) == 1
    assert list(window_notes(config, True)) == []
    assert list(window_notes(config, None)) == []


def test_a_bound_without_compilation_warns() -> None:
    bound = {"torch_compile_max_bs": 8}
    config = ServerConfig().with_values(bound)
    (note,) = compile_notes(config)
    assert note.startswith("--torch-compile-max-bs has no effect")
    assert not list(compile_notes(config.with_values({"enable_torch_compile": True})))
    assert not list(compile_notes(ServerConfig()))


def test_a_policy_of_eviction_without_a_tree_warns() -> None:
    config = ServerConfig().with_values({"radix_eviction_policy": "lfu"})
    assert not list(tree_notes(config))
    (note,) = tree_notes(config.with_values({"disable_radix_cache": True}))
    assert note.startswith("--radix-eviction-policy has no effect")


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"ep_num_redundant_experts": 2}, ["--ep-num-redundant-experts"]),
        ({"ep_dispatch_algorithm": "static"}, ["--ep-dispatch-algorithm"]),
        ({"ep_dispatch_algorithm": "static", "tp_size": 2}, ["--ep-dispatch-algorithm"]),
        ({"ep_dispatch_algorithm": "fake", "tp_size": 2}, []),
        ({"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "static", "tp_size": 2}, []),
    ],
)
def test_places_of_experts_that_change_nothing_are_told(options: Any, flags: list[str]) -> None:
    notes = expert_notes(ServerConfig(parallel=ParallelConfig(**options)))
    assert [note.partition(" has no effect: ")[0] for note in notes] == flags
