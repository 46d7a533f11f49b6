"""The fields of a request that a router sends to a prefill and a decode server at once, and what
they mean for each: prefill answers with one token, decode with all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.request_model import of_prompt
from radixlm.intake.records import GenerateRequest
from radixlm.wire.transfer import Hint

_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")
MAX_ROOM, MAX_REPLICAS = (1 << 63) - 1, 4096
_HOST = re.compile(r"[\[\]\w.:%-]{1,255}", re.ASCII)  # names and addresses; no line break for logs


def pair_fields(body: object) -> dict[str, Any]:
    """The fields of a body, to be taken over to chat's form of it."""
    return {name: getattr(body, name, None) for name in _FIELDS}


def hint_of(value_of: Callable[[str], Any], index: int = 0, count: int = 1) -> Hint | None:
    """Where the prompt ``index`` of ``count`` is computed; None of a body without these fields.
    ``value_of``: a body's value by the field's name. Port 0: that of the server's option."""
    choices = value_of("n") or 1

    def own(name: str) -> Any:
        value = value_of(name)
        if isinstance(value, list) and len(value) == count * choices:
            value = value[::choices]  # SGLang's router names a room for each choice of a chat
        return of_prompt(name, value, index, count)

    host, port, room, rank = map(own, _FIELDS)
    if host is None and room is None:
        return None
    if not host or not _HOST.fullmatch(host):
        raise InvalidRequest("bootstrap_host: name the prefill server's host", "bootstrap_host")
    if room is None or not 0 <= room <= MAX_ROOM:
        raise InvalidRequest(f"bootstrap_room must be 0 to {MAX_ROOM}", "bootstrap_room")
    if port is not None and not 0 < port <= 65535:
        raise InvalidRequest("bootstrap_port must be 1 to 65535, or null", "bootstrap_port")
    _check_rank(rank, "disagg_prefill_dp_rank")
    return Hint(host, port or 0, room, dp_rank=-1 if rank is None else rank)


def _check_rank(rank: int | None, name: str) -> None:
    if rank is not None and not 0 <= rank < MAX_REPLICAS:
        raise InvalidRequest(f"{name} must be 0 to {MAX_REPLICAS - 1}", name)


def apply_role(config: ServerConfig, request: GenerateRequest, *, is_native: bool = False) -> None:
    """Make of a request with a hint what this server does of it. ``is_native``: of /generate, whose
    answers a router joins: there the prefill server gives the log-probabilities of the prompt."""
    hint, disagg = request.hint, config.disagg
    if hint is None:
        return
    if disagg.disaggregation_mode == "null":
        raise InvalidRequest(
            "bootstrap_room: this server does not share requests with others; start it with "
            "--disaggregation-mode prefill or decode, or leave the field out",
            "bootstrap_room",
        )
    changes: dict[str, Any] = {}
    if not hint.bootstrap_port:
        changes["bootstrap_port"] = disagg.disaggregation_bootstrap_port
    if disagg.disaggregation_mode == "prefill":
        sampling = request.sampling
        request.sampling = msgspec.structs.replace(
            sampling,
            max_new_tokens=1
            if sampling.max_new_tokens is None
            else min(sampling.max_new_tokens, 1),
            min_new_tokens=min(sampling.min_new_tokens, 1),
        )
        if request.replica is None:
            request.replica = hint.replica(config.parallel.num_replicas)
    else:
        if hint.dp_rank < 0 and request.replica is not None:
            # to a decode server, data_parallel_rank names the replica of the prefill server
            _check_rank(request.replica, "data_parallel_rank")
            changes["dp_rank"], request.replica = request.replica, None
        if is_native and request.logprobs is not None:
            request.logprobs = msgspec.structs.replace(request.logprobs, prompt_from=-1)
    request.hint = msgspec.structs.replace(hint, **changes)
