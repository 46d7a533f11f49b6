"""SamplingParams: every field has its bounds, and a bad value names its field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvalidRequest, NotSupported, RequestError
from radixlm.wire.sampling_params import SamplingParams, parallel_seed

VOCAB = 100


def read(**values: Any) -> SamplingParams:
    params = SamplingParams.from_dict(values)
    params.validate(VOCAB)
    return params


def test_defaults_are_valid_and_survive_the_wire() -> None:
    SamplingParams().validate(VOCAB)
    params = read(logit_bias={"5": 1}, stop="a", custom_params={"x": [1]}, sampling_seed=-3)
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert params.logit_bias == {5: 1.0}
    assert params.stop == ("a",)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("max_new_tokens", [0, 1, 5.0]),
        ("temperature", [0, 1e-9, 7]),
        ("top_p", [1e-9, 1]),
        ("top_k", [-1, 1, 1 << 30]),
        ("min_p", [0, 1]),
        ("frequency_penalty", [-2, 2]),
        ("presence_penalty", [-2, 2]),
        ("repetition_penalty", [0, 2]),
        ("n", [1, 3]),
        ("stream_interval", [1, 100]),
        ("stop", ["x", ["x", "y"], []]),
        ("stop_regex", ["x+", ["x", "y"]]),
        ("stop_token_ids", [[0, 99], [-1], [VOCAB], [10**9]]),
        ("logit_bias", [{}, {"0": -100, "99": 100}]),
        ("json_schema", ["{}", {"type": "object"}, "$$ANY$$"]),
        ("ignore_eos", [True, False]),
        ("sampling_seed", [0, -1, 2**63 - 1]),
    ],
)
def test_values_inside_the_bounds(name: str, good: list[Any]) -> None:
    for value in good:
        read(**{name: value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("max_new_tokens", [-1, 1.5, True, "x", "8.5", math.inf]),
        ("temperature", [-0.1, math.nan, math.inf, True, "x", "inf", "-1", 10**400]),
        ("top_p", [0, -1, 1.01, math.nan]),
        ("top_k", [0, -2, 1.5, True]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [-0.1, 2.1, math.nan]),
        ("min_new_tokens", [-1, 129, True]),
        ("n", [0, -1, 10**6, True]),
        ("stream_interval", [0, -1]),
        ("stop", [5, [5], [""], ["x" * 20000], ["x"] * 2000, {"a": 1}, "\ud800"]),
        ("stop_regex", [5, [None], [""]]),
        ("stop_token_ids", [5, ["5"], [True]]),
        ("logit_bias", [[1], {"x": 1}, {"-1": 1}, {str(VOCAB): 1}, {"1": math.nan}, {"1": "a"}]),
        ("json_schema", [5, ["a"]]),
        ("regex", [5, {}]),
        ("ignore_eos", [2, "maybe", []]),
        ("custom_params", [5, "x", {"a": 1 << 70}, {"a": "\ud800"}]),
        ("sampling_seed", [1.5, 1 << 63, True]),
        ("no_such_name", [1]),
    ],
)
def test_values_out_of_bounds_name_the_field(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            read(**{name: value})
        assert caught.value.param == name, value


def test_numbers_and_booleans_may_be_strings() -> None:
    params = read(temperature="0.5", max_new_tokens="7", ignore_eos="true", no_stop_trim=1)
    assert params == read(temperature=0.5, max_new_tokens=7, ignore_eos=True, no_stop_trim=True)


def test_validate_also_checks_what_was_built_by_hand() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=math.nan).validate(VOCAB)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(ignore_eos=1).validate(VOCAB)  # type: ignore[arg-type]


def test_one_grammar_at_most() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(regex="a", ebnf='root ::= "a"')
    assert str(caught.value) == "Only one of regex, json_schema, or ebnf can be set."
    with pytest.raises(InvalidRequest, match="structural_tag"):
        read(regex="a", structural_tag={"type": "structural_tag"})


def test_null_keeps_the_default_and_the_base_is_kept() -> None:
    base = SamplingParams(temperature=0.5, top_k=7)
    params = SamplingParams.from_dict({"temperature": None, "top_p": 0.5}, base)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 0.5)


def test_unsupported_features_are_named() -> None:
    for name, value in (("use_beam_search", True), ("watermark", {"a": 1})):
        with pytest.raises(NotSupported, match=name):
            read(**{name: value})
    read(use_beam_search=None, watermark=None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from([*SamplingParams.__struct_fields__, "x"]), JSON))
def test_any_json_gives_params_or_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = read(**values)
    except RequestError as error:
        assert error.param
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_parallel_samples_get_different_seeds() -> None:
    for seed in (42, 0, -1, 2**63 - 1, -(2**63)):
        seeds = [parallel_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 100
        assert all(-(2**63) <= item < 2**63 for item in seeds)
    assert parallel_seed(42, 1) == parallel_seed(42, 1) != parallel_seed(43, 1)
