"""Sessions through the gateway: a session lives in one worker, which gets all of its requests.

Of prefill and decode workers it is a decode worker, which computes them whole: what came before is
in its prefix cache. The name of a session decides where it is opened, so that a gateway that was
started later, or serves the same workers, finds it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import orjson

from radixlm.base.errors import InvalidRequest
from radixlm.router.call import Call
from radixlm.router.dispatch import Dispatch
from radixlm.router.retry import Failure
from radixlm.router.worker import Worker, WorkerType

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

MAX_SESSIONS: Final = 1 << 16
OPEN, CLOSE = "/open_session", "/close_session"
KINDS: Final[tuple[WorkerType, ...]] = ("regular", "decode")  # that have sessions


class Sessions:
    """Which worker has each session, and who opened it; the longest unused is forgotten first."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._held: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> worker, principal

    def holder(self, call: Call) -> Worker | None:
        """The worker that has the session of a call, or is to have it; None where no session is
        named. InvalidRequest for one that another key opened."""
        name = _session_of(call)
        if name is None:
            return None
        if (held := self._held.get(name)) is None:
            known = [one for one in self._gateway.registry if one.worker_type in KINDS]
            if call.path == OPEN:
                known = [one for one in known if one.is_available] or known
            return _place(name, known)
        worker_id, principal = held
        if principal != call.principal:
            raise InvalidRequest(f"session_params.id: no session {name!r:.200}", "session_params")
        self._held.move_to_end(name)
        found: Worker | None = self._gateway.registry.get(worker_id)
        return found

    def opened(self, name: str, call: Call) -> None:
        """The worker that was asked last has opened a session."""
        assert call.worker is not None
        self._held[name] = call.worker.id, call.principal
        if len(self._held) > MAX_SESSIONS:
            self._held.popitem(last=False)

    def closed(self, call: Call) -> None:
        self._held.pop(_session_of(call) or "", None)


class SessionCall(Dispatch):
    """A call to open or to close a session."""

    async def attempt(self) -> Failure | None:
        pool = self.gateway.registry.pool
        self.worker_type = next((kind for kind in KINDS if pool(self.model, kind)), "regular")
        self.edit = self._answered
        call = self.call
        if call.path == OPEN and call.fields and _session_of(call) is None:
            call.replace_body(call.overridden({"session_id": secrets.token_hex(16)}))
        return await super().attempt()

    def _answered(self, content: bytes) -> bytes:
        sessions = self.gateway.sessions
        if self.call.path == CLOSE:
            sessions.closed(self.call)
        elif isinstance(name := orjson.loads(content), str):
            sessions.opened(name, self.call)
        return content


def _place(name: str, workers: Sequence[Worker]) -> Worker | None:
    """The worker of a session's name, as long as ``workers`` has it; None if there is none."""

    def rank(worker: Worker) -> bytes:
        text = f"{worker.url} {worker.dp_rank} {name}"
        return blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()

    return max(workers, key=rank, default=None)


def _session_of(call: Call) -> str | None:
    """The id of the session that a call names; few bodies are read for it."""
    name: Any = None
    if call.path in (OPEN, CLOSE):
        name = call.fields.get("session_id")
    elif b'"session_params"' in call.body:
        params = call.fields.get("session_params")
        several = params if isinstance(params, list) else [params]  # of a batch
        name = next((one.get("id") for one in several if isinstance(one, dict)), None)
    return name if isinstance(name, str) else None


def attach(gateway: Gateway) -> None:
    """Serve the routes of sessions, and send requests to where their session is."""
    sessions = gateway.sessions = Sessions(gateway)
    gateway.dispatcher.holder = sessions.holder
    for path in (OPEN, CLOSE):
        gateway.add_data_route(path, path.strip("/"))
        gateway.dispatcher.kinds[path] = SessionCall
