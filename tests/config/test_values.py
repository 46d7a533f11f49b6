"""Parsing of single option values."""

from __future__ import annotations

import logging

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.option import options
from radixlm.config.parser import parse
from radixlm.config.server_config import ServerConfig
from radixlm.config.values import coerce, example, is_within, show


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[1, inf)", (1, 1e9), (0, -1, float("nan"), float("inf"))),
        ("(0, 1)", (0.5,), (0, 1)),
        ("(0, 1]", (1,), (0, 1.1)),
        ("[-1, 5]", (-1, 5), (-1.1, 5.1)),
    ],
)
def test_intervals(interval: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    assert all(is_within(value, interval) for value in inside)
    assert not any(is_within(value, interval) for value in outside)


def test_the_example_of_every_option_works() -> None:
    for option in options().values():
        read = coerce(option, example(option))
        assert read is not None, option.name


def test_numbers_keep_their_kind() -> None:
    assert coerce(options()["port"], 30000.0) == 30000
    assert type(coerce(options()["port"], 30000.0)) is int
    assert type(coerce(options()["watchdog_timeout"], 3)) is float
    for name, value in (("watchdog_timeout", True), ("port", True), ("port", "1e3")):
        with pytest.raises(ConfigError, match="is not a"):
            coerce(options()[name], value)
    with pytest.raises(ConfigError, match="is not an integer"):
        coerce(options()["port"], float("inf"))


def test_switches_take_words_in_yaml() -> None:
    switch = options()["enable_metrics"]
    assert [coerce(switch, word) for word in ("yes", "OFF", True)] == [True, False, True]
    for word in ("maybe", 1, []):
        with pytest.raises(ConfigError, match="is not true or false; a value that works: false"):
            coerce(switch, word)


def test_values_are_shown_as_a_user_writes_them() -> None:
    assert show(options()["api_key"], "hunter2") == "***"
    assert show(options()["api_key"], None) == "unset"
    assert show(options()["enable_metrics"], True) == "true"
    assert show(options()["cuda_graph_bs"], (1, 2)) == "1 2"
    assert show(options()["kernel"], ()) == "nothing"


def test_a_deprecated_switch_that_is_off_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    assert ServerConfig.from_kwargs(enable_ep_moe=False) == ServerConfig()
    assert not caplog.records


def test_groups_compare_hash_and_print_by_value() -> None:
    one, same = ServerConfig.from_kwargs(port=1), parse(["--port", "1"])[0]
    assert one == same
    assert hash(one) == hash(same)
    assert one.serve != ServerConfig().serve
    assert one.serve != one.model
    assert repr(one.serve) == "ServeConfig(port=1)"


def test_a_renamed_level_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ServerConfig.from_kwargs(log_level="warn").observe.log_level == "warning"
    assert "--log-level warn is taken as warning" in caplog.text
