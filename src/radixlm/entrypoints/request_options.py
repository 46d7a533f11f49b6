"""The options that /generate and OpenAI's routes share, as fields of intake's GenerateRequest."""

import json
from collections.abc import Callable
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.disaggregation import hint_of
from radixlm.entrypoints.request_model import of_prompt
from radixlm.entrypoints.sglang_processors import known_processor
from radixlm.intake.records import Output
from radixlm.intake.validation import PROCESSOR, SAFE_WAY
from radixlm.text.answer_check import UnheldSchema, unheld_schema
from radixlm.wire.unknown import note_warning


def request_options(
    value_of: Callable[[str], Any], index: int = 0, count: int = 1
) -> dict[str, Any]:
    """Keyword arguments of the GenerateRequest of prompt ``index`` of ``count``. ``value_of``: a
    body's value by the field's name."""
    names = {}

    def own(name: str) -> Any:
        return of_prompt(name, value_of(name), index, count)

    if value_of("routed_dp_rank") is not None:
        names["data_parallel_rank"] = "routed_dp_rank"
    return {
        "return_hidden_states": bool(value_of("return_hidden_states")),
        "return_routed_experts": bool(value_of("return_routed_experts")),
        "routed_from": value_of("routed_experts_start_len") or 0,
        "cache_salt": own("cache_salt"),
        "extra_key": own("extra_key"),
        "priority": value_of("priority"),
        "streaming_window": value_of("streaming_window"),
        "streaming_sinks": value_of("streaming_sinks"),
        "replica": replica_of(value_of("data_parallel_rank"), value_of("routed_dp_rank")),
        "timeout_s": value_of("timeout"),
        "session": _session(value_of("session_params")),
        "adapter": own("lora_path") or None,
        "processor": processor_name(own("custom_logit_processor"), value_of("logit_processor")),
        "hint": hint_of(value_of, index, count),
        "names": names,
    }


def _session(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """``session_params``; none if all its values are null, as SGLang reads it."""
    is_empty = params is not None and all(value is None for value in params.values())
    return None if is_empty else params


def unheld_of(json_schema: str | None, where: str) -> UnheldSchema | None:
    """The keywords of a schema that are not enforced, of which the client is told."""
    try:
        schema = json.loads(json_schema or "{}")
    except (ValueError, RecursionError):
        return None  # the compiler says what is wrong, or it is "$$ANY$$"
    unheld = unheld_schema(schema, where)
    if unheld is not None:
        note_warning(unheld.note)
    return unheld


def answer_error(unheld: UnheldSchema | None, output: Output, text: str | None = None) -> str:
    """Why an answer does not fit its schema, of which the client is told; empty if it fits, is cut,
    or needs no check. ``text``: of the answer, where it is not that of ``output``."""
    if unheld is None or output.finish is None or output.finish.kind != "stop":
        return ""
    return unheld.error(output.text if text is None else text)


def replica_of(data_parallel_rank: int | None, routed_dp_rank: int | None) -> int | None:
    """The replica that a request wants, under its older and its newer name."""
    if None not in (data_parallel_rank, routed_dp_rank) and data_parallel_rank != routed_dp_rank:
        raise InvalidRequest("routed_dp_rank differs from data_parallel_rank", "routed_dp_rank")
    return data_parallel_rank if routed_dp_rank is None else routed_dp_rank


def processor_name(custom: Any, plain: Any = None) -> str | None:
    """The logit processor that a request names, in ``custom_logit_processor`` or in
    ``logit_processor``. SGLang puts pickled code into the first: InvalidRequest, unless it is the
    name of a class that is known here."""
    if isinstance(custom, str) and custom.startswith("{"):
        custom = known_processor(custom) or custom
    name = plain if custom is None else custom
    if name is None or name == "":
        return None
    if custom is not None and plain is not None and custom != plain:
        raise InvalidRequest(f"{PROCESSOR} and logit_processor differ: send one", PROCESSOR)
    if not isinstance(name, str) or not name.isprintable() or "{" in name:
        raise InvalidRequest(f"{PROCESSOR} must be the name of a processor. {SAFE_WAY}", PROCESSOR)
    return name
