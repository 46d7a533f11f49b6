"""Environment variables: types, aliases, and errors that name malformed ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixlm.base import env
from radixlm.base.env import VARIABLES, Variable
from radixlm.base.errors import ConfigError


def test_defaults_hold_in_an_empty_environment() -> None:
    for variable in VARIABLES:
        assert variable.get({}) == variable.default
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


def test_values_are_typed() -> None:
    assert env.HEALTH_CHECK_TIMEOUT_S.get({"RADIXLM_HEALTH_CHECK_TIMEOUT_S": "3"}) == 3.0
    assert env.PROFILER_DIR.get({"RADIXLM_PROFILER_DIR": "/a"}) == Path("/a")
    for limit, value in (("-1", 0.0), ("0.5", 0.5)):
        assert env.QUEUE_TIMEOUT_S.get({"SGLANG_REQ_WAITING_TIMEOUT": limit}) == value
    for text, value in (("1", True), ("True", True), ("off", False), ("", False)):
        assert env.ALLOW_LONGER_CONTEXT.get({"RADIXLM_ALLOW_LONGER_CONTEXT": text}) is value


def test_the_own_name_takes_precedence_over_the_alias() -> None:
    both = {"RADIXLM_HEALTH_CHECK_TIMEOUT_S": "3", "SGLANG_HEALTH_CHECK_TIMEOUT": "4"}
    assert env.HEALTH_CHECK_TIMEOUT_S.get(both) == 3.0
    assert env.HEALTH_CHECK_TIMEOUT_S.get({"SGLANG_HEALTH_CHECK_TIMEOUT": "4"}) == 4.0


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXLM_ALLOW_LONGER_CONTEXT", "yes")
    assert env.ALLOW_LONGER_CONTEXT.get() is True


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.ALLOW_LONGER_CONTEXT, "maybe"),
        (env.HEALTH_CHECK_TIMEOUT_S, "soon"),
        (env.HEALTH_CHECK_TIMEOUT_S, "-1"),
        (env.HEALTH_CHECK_TIMEOUT_S, "inf"),
        (env.VERTEX_ROUTE, "predict"),
    ],
)
def test_a_malformed_value_is_named(variable: Variable[object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        variable.get({variable.name: text})
    assert f"{variable.name}={text!r}" in str(caught.value)
    assert repr(variable.default) in str(caught.value)


def test_routes_begin_with_a_slash() -> None:
    assert env.VERTEX_ROUTE.get({"AIP_PREDICT_ROUTE": "/predict"}) == "/predict"


def test_every_variable_is_read_somewhere() -> None:
    """A documented variable that nothing reads would be ignored silently."""
    source = Path(env.__file__).parents[1]
    files = [path for path in source.rglob("*.py") if path != Path(env.__file__)]
    read = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    names = {value.name: name for name, value in vars(env).items() if isinstance(value, Variable)}
    assert {name for name, ours in names.items() if not read & {name, ours}} == set()
