"""Sessions: requests that continue earlier ones by their id.

A session is a tree of finished requests. ``session_params`` of a new one:

- ``rid``: the request whose prompt and output come first; none: the prompt stands alone.
- ``offset``: keep only so many of those tokens; a negative one drops so many at the end.
- ``replace``: what was there is replaced: with ``rid`` the requests after it are forgotten, without
  it all requests of the session are.
- ``drop_previous_output``: go on from the prompt of ``rid`` only.

A streaming session is a line instead: a request goes on from the last one that ended well, whatever
its ``rid``, and one runs at a time.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from radixlm.base.errors import InvalidRequest, TooManyRequests
from radixlm.intake.identity import identity
from radixlm.intake.observer import Observer
from radixlm.intake.records import GenerateRequest
from radixlm.intake.request_state import RequestState
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish
from radixlm.wire.unknown import note_unknown

log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
MAX_TOKENS = 1 << 24  # of all sessions together: up to 0.7 GB
_FIELDS: dict[str, type] = {
    "id": str,
    "rid": str,
    "offset": int,
    "replace": bool,
    "drop_previous_output": bool,
}


@dataclass(slots=True)
class _Turn:
    """One request of a session. Its prompt is the first ``start`` tokens of ``parent``'s prompt and
    output, and ``ids``. ``output_ids`` is None while it runs."""

    ids: list[int]
    parent: str | None = None
    start: int = 0
    output_ids: list[int] | None = None

    def tokens(self, with_output: bool = True) -> list[int]:
        """What it has added."""
        return self.ids + (self.output_ids or []) if with_output else self.ids


@dataclass(slots=True)
class _Session:
    """``capacity``: most tokens that its requests may hold together; 0 is no limit."""

    capacity: int
    timeout_s: float
    owner: str
    streaming: bool = False
    turns: dict[str, _Turn] = field(default_factory=dict)
    num_tokens: int = 0  # of all turns
    used_s: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        """Whether no request of it runs."""
        return all(turn.output_ids is not None for turn in self.turns.values())

    def count(self) -> None:
        """Count its tokens again, after a change."""
        self.num_tokens = _num_tokens(self.turns)

    def tokens(self, rid: str, with_output: bool = True) -> list[int]:
        """The prompt and the output of a turn."""
        turn = self.turns[rid]
        parts, end = [turn.tokens(with_output)], turn.start
        while end and turn.parent is not None:
            turn = self.turns[turn.parent]
            parts.append(turn.tokens()[: max(0, end - turn.start)])
            end = min(end, turn.start)
        return [token for part in reversed(parts) for token in part]


class Sessions(Observer):
    """All open sessions of one intake."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, _Session] = {}
        self._running: dict[str, tuple[str, GenerateRequest]] = {}  # with the session, by rid

    @property
    def num_streaming(self) -> int:
        """Streaming sessions that are open."""
        return sum(session.streaming for session in self._open.values())

    def open(
        self,
        capacity: int,
        session_id: str | None = None,
        timeout_s: float = 0.0,
        streaming: bool = False,
    ) -> str:
        """A new session's id; InvalidRequest if it is in use."""
        self._expire()
        if session_id in self._open:
            raise InvalidRequest(f"session_id: {session_id!r} is open already", "session_id")
        if len(self._open) >= MAX_SESSIONS:
            raise TooManyRequests(f"{MAX_SESSIONS} sessions are open", retry_after_s=5.0)
        name = session_id or secrets.token_hex(16)
        self._open[name] = _Session(capacity, timeout_s, identity().owner, streaming)
        return name

    def close(self, session_id: str) -> None:
        """Forget a session of the caller. SGLang's clients close labels too, which never opened."""
        session = self._open.get(session_id)
        if session is not None and identity().may_see(session.owner):
            del self._open[session_id]

    def _expire(self) -> None:
        now_s = time.monotonic()
        for name, session in list(self._open.items()):
            if session.timeout_s and now_s - session.used_s > session.timeout_s:
                del self._open[name]

    def extend(self, request: GenerateRequest) -> None:
        """Put what came before in front of the request's prompt, and remember the request."""
        params = request.session
        if params is None:
            return
        name, session = self._session(params)
        if request.embeds is not None or request.sampling.n > 1:
            raise InvalidRequest(
                "session_params: a session needs a prompt of text or ids and n = 1",
                "session_params",
            )
        ids = self._ids(request)
        before, parent = self._before(session, params)
        gone = _replaced(session, parent) if params.get("replace") else set()
        if parent is not None and self._tokenizer is not None:
            bos = self._tokenizer.bos_id
            ids = ids[1:] if bos is not None and ids[:1] == [bos] else ids
        request.text, request.input_ids = None, before + ids
        request.rid = request.rid or secrets.token_hex(16)
        if request.rid in self._running:
            raise InvalidRequest(f"rid: Duplicate request ID detected: {request.rid}", "rid")
        kept = {name: turn for name, turn in session.turns.items() if name not in gone}
        if request.rid in kept:
            raise InvalidRequest(f"rid: {request.rid!r} is in this session already", "rid")
        held = _num_tokens(kept)
        if session.capacity and held + len(ids) > session.capacity:
            raise InvalidRequest(
                f"the session holds {held} tokens; {len(ids)} more exceed its "
                f"capacity of {session.capacity}",
                "session_params",
            )
        self._make_room(session, held + len(ids))
        session.turns = kept
        session.turns[request.rid] = _Turn(ids, parent, len(before))
        session.count()
        session.used_s = time.monotonic()
        self._running[request.rid] = name, request

    def _make_room(self, growing: _Session, num_tokens: int) -> None:
        """Forget idle sessions until ``growing`` may hold so many tokens: the oldest of whoever
        holds most first. TooManyRequests, and no change, if that is not enough."""
        others = {name: one for name, one in self._open.items() if one is not growing}
        excess = num_tokens + sum(one.num_tokens for one in others.values()) - MAX_TOKENS
        if excess <= 0:
            return
        held: Counter[str] = Counter()
        for one in self._open.values():
            held[one.owner] += one.num_tokens
        idle = [name for name, one in others.items() if one.num_tokens and one.is_idle]
        idle.sort(key=lambda name: (-held[others[name].owner], others[name].used_s))
        gone = []
        while idle and excess > 0:
            gone.append(idle.pop(0))
            excess -= others[gone[-1]].num_tokens
        if excess > 0:
            raise TooManyRequests(
                f"session_params: all sessions together may hold {MAX_TOKENS} tokens; these are "
                f"{excess} too many: close sessions, or give them a timeout or a capacity",
                retry_after_s=5.0,
            )
        for name in gone:
            del self._open[name]
        log.warning("forgot %d idle sessions: all may hold %d tokens", len(gone), MAX_TOKENS)

    @contextmanager
    def joined(self, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        """``extend`` them; those that no engine has got at the end are no part of their session."""
        try:
            for request in requests:
                self.extend(request)
            yield
        finally:
            for request in requests:
                self._forget(request)

    def _forget(self, request: GenerateRequest) -> None:
        rid = request.rid or ""
        name, running = self._running.get(rid, ("", None))
        if running is request:
            del self._running[rid]
            if name in self._open:
                self._open[name].turns.pop(rid, None)
                self._open[name].count()

    def _session(self, params: Mapping[str, Any]) -> tuple[str, _Session]:
        if not isinstance(params, Mapping):
            raise InvalidRequest("session_params must be an object", "session_params")
        for key, value in params.items():
            where = f"session_params.{key}"
            kind = _FIELDS.get(str(key))
            if kind is None:
                note_unknown(key, where="session_params.")
            elif value is not None and (type(value) is not kind):
                raise InvalidRequest(f"{where} must be of type {kind.__name__}", where)
        self._expire()
        name = params.get("id")
        session = self._open.get(name) if name else None
        if session is None or not identity().may_see(session.owner):
            raise InvalidRequest(
                f"session_params.id: no session {name!r:.200}", "session_params.id"
            )
        return str(name), session

    def _ids(self, request: GenerateRequest) -> list[int]:
        if request.input_ids is not None:
            return request.input_ids
        if self._tokenizer is None or request.text is None:
            raise InvalidRequest("text: the server has no tokenizer; send input_ids", "text")
        return self._tokenizer.encode(request.text, request.add_special_tokens)

    def _before(self, session: _Session, params: Mapping[str, Any]) -> tuple[list[int], str | None]:
        rid = params.get("rid")
        if session.streaming:
            unfit = [
                key for key in ("offset", "replace", "drop_previous_output") if params.get(key)
            ]
            if unfit:
                where = f"session_params.{unfit[0]}"
                raise InvalidRequest(f"{where}: the session is streaming; leave it out", where)
            rid = next(reversed(session.turns), None)
        if rid is None:
            return [], None
        turn = session.turns.get(rid)
        if turn is None:
            raise InvalidRequest(
                f"session_params.rid: no request {rid!r:.200} in this session",
                "session_params.rid",
            )
        if turn.output_ids is None:
            raise InvalidRequest(f"session_params.rid: {rid!r} still runs", "session_params.rid")
        before = session.tokens(rid, not params.get("drop_previous_output"))
        offset = params.get("offset")
        if offset:
            before = before[:offset]
        return before, rid

    def ended(self, state: RequestState, finish: Finish) -> None:
        """A request of a session is whole: later ones may go on from it."""
        name, _ = self._running.pop(state.rid, ("", None))
        session = self._open.get(name)
        if session is None:
            return
        if finish.kind == "error" or (session.streaming and finish.kind == "abort"):
            session.turns.pop(state.rid, None)
        elif turn := session.turns.get(state.rid):
            if session.streaming:
                turn = _Turn(session.tokens(state.rid))
                session.turns = {state.rid: turn}
            turn.output_ids = list(state.output_ids)
        session.count()


def _num_tokens(turns: Mapping[str, _Turn]) -> int:
    return sum(len(turn.ids) + len(turn.output_ids or ()) for turn in turns.values())


def _replaced(session: _Session, rid: str | None) -> set[str]:
    """The requests that go on from ``rid``; None: all."""
    if rid is None:
        return set(session.turns)
    gone: set[str] = set()
    for name, turn in session.turns.items():  # in order of arrival: parents come first
        if turn.parent == rid or turn.parent in gone:
            gone.add(name)
    return gone
