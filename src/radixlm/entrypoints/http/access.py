"""The access line: one record for each request that is answered, with its tokens and times."""

import logging
import time
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from radixlm.base.log import ACCESS
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState

log = logging.getLogger(ACCESS)

CLIENT_LEFT = 499  # nginx's status for a client that left before it was answered
MAX_PATH = 200
# asked every few seconds by probes, scrapers and gateways; beside them files and events of the page
QUIET_PATHS = frozenset(
    "/health /ready /health_generate /ping /v1/health /metrics /get_load /get_loads "
    "/v1/loads /server_info /live/events /live/tree".split()
)
_current: ContextVar["Access | None"] = ContextVar("access", default=None)


def begin_access(scope: Any) -> "Access | None":
    """The record of the request whose ASGI scope this is; None where none is written."""
    path = scope["path"].rstrip("/") or "/"
    is_quiet = path in QUIET_PATHS or path.startswith(("/ui/", "/live/"))
    access = None if is_quiet or not log.isEnabledFor(logging.INFO) else Access(scope)
    _current.set(access)
    return access


class Access:
    """An HTTP request while it is answered, and the sequences that it has asked for."""

    def __init__(self, scope: Any) -> None:
        self._method, self._path = scope["method"], quote(scope["path"], "/:~")[:MAX_PATH]
        self._began_s = time.monotonic()
        self._states: list[RequestState] | None = []
        self.status = CLIENT_LEFT

    def add(self, state: RequestState) -> None:
        """Count a sequence, unless the answer is over: batches go on after it."""
        if self._states is not None:
            self._states.append(state)

    def end(self, name: str | None) -> None:
        """Write the line. ``name``: the X-Request-Id."""
        seconds = time.monotonic() - self._began_s
        fields: dict[str, Any] = {"method": self._method, "route": self._path}
        fields |= {"status": self.status, "request_id": name, "seconds": round(seconds, 4)}
        states, self._states = self._states or [], None
        fields |= _tokens(states, self._began_s) if states else {}
        line = f"{self._method} {self._path} {self.status} in {seconds:.3f} s"
        log.info("%s%s; id %s", line, _shown(fields), name, extra={"fields": fields})


def _tokens(states: list[RequestState], began_s: float) -> dict[str, Any]:
    """What the sequences took. Samples of one prompt count it once; the queue's time is that of
    the last to begin; tokens/s counts from the first token to the last."""
    firsts = [state for state in states if state.index == 0]
    begun = [state for state in states if state.first_token_s]
    num_out = sum(len(state.output_ids) for state in states)
    fields: dict[str, Any] = {
        "prompt_tokens": sum(state.prompt_tokens for state in firsts),
        "cached_tokens": sum(state.last_delta.cached_tokens for state in firsts),
        "completion_tokens": num_out,
        "queue_seconds": round(max(state.last_delta.queue_time_s for state in states), 4),
    }
    if begun:
        first_s = min(state.first_token_s for state in begun)
        span_s = max(state.last_token_s for state in begun) - first_s
        fields["first_token_seconds"] = round(first_s - began_s, 4)
        if span_s > 0 and num_out > 1:
            fields["tokens_per_second"] = round((num_out - 1) / span_s, 1)
    if not all(state.ended for state in states):
        fields["client_left"] = True
    return fields


def _shown(fields: dict[str, Any]) -> str:
    """The tokens and times of an access line as text."""
    if "prompt_tokens" not in fields:
        return ""
    text = (
        f": {fields['prompt_tokens']} tokens in ({fields['cached_tokens']} cached), "
        f"{fields['completion_tokens']} out, queue {fields['queue_seconds']:.3f} s"
    )
    if "first_token_seconds" in fields:
        text += f", first token {fields['first_token_seconds']:.3f} s"
    if "tokens_per_second" in fields:
        text += f", {fields['tokens_per_second']:.1f} tokens/s"
    return text + ", the client left" * ("client_left" in fields)


class AccessObserver(Observer):
    """Adds each sequence to the line of the request that asks for it."""

    def submitted(self, state: RequestState) -> None:
        access = _current.get()
        if access is not None:
            access.add(state)
