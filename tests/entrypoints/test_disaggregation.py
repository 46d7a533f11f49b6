"""What prefill and decode servers make of the fields that a router adds."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.disaggregation import apply_role, hint_of
from radixlm.intake.records import GenerateRequest
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams
from radixlm.wire.transfer import Hint

FIELDS = {"bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 5}


def _request(**fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=20, min_new_tokens=4)
    hint = hint_of((FIELDS | fields).get)
    return GenerateRequest(sampling, input_ids=[1], hint=hint, logprobs=LogprobParams(0, 2))


def _config(mode: str, **more: Any) -> ServerConfig:
    return ServerConfig.from_kwargs(disaggregation_mode=mode, **more)


def test_a_body_without_the_fields_is_served_whole() -> None:
    assert hint_of({}.get) is None
    request = GenerateRequest(SamplingParams(max_new_tokens=20), input_ids=[1])
    apply_role(_config("prefill"), request)
    assert request.sampling.max_new_tokens == 20


def test_prefill_gives_one_token_and_the_logprobs_of_the_prompt() -> None:
    request = _request()
    apply_role(_config("prefill"), request, is_native=True)
    assert (request.sampling.max_new_tokens, request.sampling.min_new_tokens) == (1, 1)
    assert request.logprobs == LogprobParams(0, 2)
    assert request.hint == Hint("h", 8998, 5)


def test_prefill_computes_a_room_on_the_replica_that_decode_asks() -> None:
    request = _request()
    apply_role(_config("prefill", dp_size=3), request)
    assert request.replica == 2
    named = _request(disagg_prefill_dp_rank=1)
    apply_role(_config("prefill", dp_size=3), named)
    assert named.replica == 1  # where the decode server asks for it


def test_a_rank_of_no_server_is_refused() -> None:
    request = _request()
    request.replica = 1 << 70
    with pytest.raises(InvalidRequest, match="data_parallel_rank must be 0 to 4095"):
        apply_role(_config("decode"), request)


def test_decode_gives_all_tokens() -> None:
    request = _request(bootstrap_port=None)
    apply_role(_config("decode", disaggregation_bootstrap_port=77), request, is_native=True)
    assert request.sampling.max_new_tokens == 20
    assert request.hint == Hint("h", 77, 5)
    assert request.logprobs == LogprobParams(-1, 2)
    none = _request()  # it generates nothing
    none.sampling = SamplingParams(max_new_tokens=0)
    apply_role(_config("decode"), none, is_native=True)
    assert none.logprobs == LogprobParams(-1, 2)
    whole = _request()
    apply_role(_config("decode"), whole)  # of OpenAI's routes, whose answers no router joins
    assert whole.logprobs == LogprobParams(0, 2)


def test_decode_reads_data_parallel_rank_as_that_of_prefill() -> None:
    request = _request()
    request.replica = 1
    apply_role(_config("decode", dp_size=2), request)
    assert request.replica is None
    assert request.hint is not None
    assert request.hint.dp_rank == 1


def test_a_server_without_a_role_refuses_by_name() -> None:
    with pytest.raises(InvalidRequest, match="--disaggregation-mode prefill or decode"):
        apply_role(_config("null"), _request())


def test_lists_have_a_value_for_each_prompt() -> None:
    fields = {
        "bootstrap_host": ["a", "b"],
        "bootstrap_port": [None, 9],
        "bootstrap_room": [1, 2],
    }
    assert hint_of(fields.get, 0, 2) == Hint("a", 0, 1)
    assert hint_of(fields.get, 1, 2) == Hint("b", 9, 2)
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        hint_of(fields.get, 0, 3)


def test_lists_may_have_a_value_for_each_choice() -> None:
    """As SGLang's router sends them with a chat of several."""
    fields: dict[str, Any] = {
        "n": 2,
        "bootstrap_host": ["a", "a"],
        "bootstrap_port": [9, 9],
        "bootstrap_room": [1, 2],
    }
    assert hint_of(fields.get) == Hint("a", 9, 1)
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        hint_of((fields | {"n": 3}).get)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_port": 70000}, "bootstrap_port"),
        ({"bootstrap_host": "h\nforged line"}, "bootstrap_host"),
        ({"disagg_prefill_dp_rank": -1}, "disagg_prefill_dp_rank"),
        ({"disagg_prefill_dp_rank": 1 << 70}, "disagg_prefill_dp_rank"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        hint_of((FIELDS | fields).get)
    assert caught.value.param == name
