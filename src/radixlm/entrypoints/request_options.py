"""The options that /generate and OpenAI's routes share, as fields of intake's GenerateRequest."""

from collections.abc import Callable
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.intake.validation import processor_name


def request_options(value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Keyword arguments of a GenerateRequest. ``value_of``: a body's value by the field's name."""
    names = {}
    if value_of("routed_dp_rank") is not None:
        names["data_parallel_rank"] = "routed_dp_rank"
    return {
        "return_hidden_states": bool(value_of("return_hidden_states")),
        "cache_salt": value_of("cache_salt"),
        "extra_key": value_of("extra_key"),
        "priority": value_of("priority") or 0,
        "replica": replica_of(value_of("data_parallel_rank"), value_of("routed_dp_rank")),
        "timeout_s": value_of("timeout"),
        "session": value_of("session_params"),
        "processor": processor_name(
            value_of("custom_logit_processor"), value_of("logit_processor")
        ),
        "names": names,
    }


def replica_of(data_parallel_rank: int | None, routed_dp_rank: int | None) -> int | None:
    """The replica that a request wants, under its older and its newer name."""
    if None not in (data_parallel_rank, routed_dp_rank) and data_parallel_rank != routed_dp_rank:
        raise InvalidRequest("routed_dp_rank differs from data_parallel_rank", "routed_dp_rank")
    return data_parallel_rank if routed_dp_rank is None else routed_dp_rank
