"""StreamJournal: what the answer of a call is made of, so that another server can go on with it.

A client that asks for it (a gateway, header ``x-radixlm-journal``) gets records beside the blocks
of a stream: what was drawn at random, and all that the engine sent. If this server dies, the client
sends the body to another one with these records in the field ``resume``. There the same code makes
the same blocks of them; those that were sent are dropped, and the engine computes the rest
(``RequestState.resume_request``).
"""

from __future__ import annotations

import asyncio
import base64
import random
import secrets
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.request_state import RequestState
from radixlm.wire.codec import UNREADABLE
from radixlm.wire.replies import TokenDelta

_FIELD = "resume.journal"
_NONCE_BYTES = 16
_TURN_S = 30.0  # a replay only waits for others of its call
_TOGETHER = 64  # records that are replayed in one turn of the event loop
_WITHOUT_TOKENS = 16  # deltas of a sample that may tell of neither its prompt nor its output


class Head(msgspec.Struct, array_like=True, tag=0):
    """The first record. ``nonce``: of the generator of all that is drawn. ``digest``: of the server
    (``resume_digest``)."""

    nonce: bytes
    began_s: int
    request_id: str
    digest: str = ""


class News(msgspec.Struct, array_like=True, tag=1):
    """What one Output of sample ``index`` of request ``call`` was made of: a token that came
    alone is its id. ``prompt``: checksum of the prompt, in the first record of the request."""

    call: int
    index: int
    deltas: list[int | TokenDelta]
    prompt: int = 0


class Called(msgspec.Struct, array_like=True, tag=2):
    """What a tool said that this server ran: it is not run again."""

    text: str
    is_error: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head | News | Called)
_current: ContextVar[StreamJournal | None] = ContextVar("stream_journal", default=None)


class StreamJournal:
    """Of one call. ``num_to_drop``: blocks of its answer that the client has. ``kills``: servers
    in a row that died of it. It records if the client ``is_asked`` to, and the answer streams."""

    __slots__ = (
        "_called",
        "_news",
        "_num_calls",
        "_pending",
        "_place",
        "_turns",
        "head",
        "is_begun",
        "is_recording",
        "is_wanted",
        "kills",
        "num_news",
        "num_to_drop",
        "rng",
    )

    def __init__(self, request_id: str, is_wanted: bool) -> None:
        self.is_wanted, self.is_recording = is_wanted, False
        self.is_begun = False  # elsewhere
        self.num_to_drop = self.kills = self.num_news = 0
        self._num_calls = 0
        self._pending: list[bytes] = []
        self._news: dict[int, list[tuple[int, News]]] = defaultdict(list)
        self._called: deque[Called] = deque()
        self._place = 0  # of the record that is replayed
        self._turns: dict[int, asyncio.Event] = {}  # by the place that is awaited
        self._begin(Head(secrets.token_bytes(_NONCE_BYTES), int(time.time()), request_id))

    def _begin(self, head: Head) -> None:
        self.head = head
        self.rng = random.Random(head.nonce)

    def resume(self, records: Sequence[Any], num_events: int, kills: int) -> None:
        """Go on with a stream. InvalidRequest for records that no server has made."""
        for place, text in enumerate(records):
            try:
                record = _decoder.decode(base64.b64decode(text, validate=True))
            except (*UNREADABLE, ValueError, TypeError) as error:
                raise InvalidRequest(f"{_FIELD}[{place}]: {error!s:.200}", _FIELD) from None
            if isinstance(record, Head) is not (place == 0):
                raise InvalidRequest(f"{_FIELD}[{place}]: a head comes first, and once", _FIELD)
            if isinstance(record, Head):
                self._begin(record)
                self.is_begun = True
            elif isinstance(record, Called):
                self._called.append(record)
            else:
                self._news[record.call].append((self.num_news, record))
                self.num_news += 1
        self.num_to_drop, self.kills = num_events, kills

    @property
    def is_resumed(self) -> bool:
        return self.num_news > 0

    def block(self, block: bytes) -> bytes:
        """A block of the answer, after the records that came before it."""
        if not self._pending:
            return block
        records, self._pending = self._pending, []
        return b": j %s\n%s" % (b" ".join(records), block)

    async def call(self, tool: Callable[[], Awaitable[tuple[str, bool]]]) -> tuple[str, bool]:
        """What ``tool`` says, (text, whether it is an error), or has said elsewhere."""
        if self._called:
            called = self._called.popleft()
            return called.text, called.is_error
        text, is_error = await tool()
        if self.is_recording:
            self.put(Called(text, is_error))
        return text, is_error

    def put(self, record: Head | News | Called) -> None:
        self._pending.append(base64.b64encode(_encoder.encode(record)))

    def share(self, request: GenerateRequest) -> Share:
        """The share of the next request of the call, which gets a seed if it has none. Requests
        come in a fixed order."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if request.sampling.sampling_seed is None:
            seed = random.Random(b"%s:%d" % (self.head.nonce, call)).getrandbits(62)
            request.sampling = msgspec.structs.replace(request.sampling, sampling_seed=seed)
        return Share(self, call)

    def news_of(self, call: int) -> list[tuple[int, News]]:
        """The records of a request, with their places among all; they are given once."""
        return self._news.pop(call, [])

    async def reach(self, place: int) -> None:
        """Wait until the records before ``place`` are replayed: blocks come in the old order."""
        if self._place >= place:
            return
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turns.setdefault(place, asyncio.Event()).wait()
        except TimeoutError:
            where = f"{_FIELD}[{self._place + 1}]"
            raise InvalidRequest(f"{where}: the body has no such request", _FIELD) from None

    def advance(self) -> None:
        """The next record may be replayed."""
        self._place += 1
        if (turn := self._turns.pop(self._place, None)) is not None:
            turn.set()


class Share:
    """One request of a journaled call: its samples. ``outputs``: what they had elsewhere, with the
    places of the records."""

    __slots__ = ("_call", "_journal", "_noted", "outputs")

    def __init__(self, journal: StreamJournal, call: int) -> None:
        self._journal, self._call = journal, call
        self._noted: set[int] = set()
        self.outputs: list[tuple[int, Output]] = []

    @property
    def is_resumed(self) -> bool:
        """Whether the call began elsewhere, be it with other requests."""
        return self._journal.is_resumed

    def begin(self, states: Sequence[RequestState], vocab: int) -> None:
        """Give the samples what they had elsewhere, and record what comes next."""
        journal = self._journal
        num_deltas: Counter[int] = Counter()
        for place, news in journal.news_of(self._call):
            if not 0 <= news.index < len(states):
                raise InvalidRequest(f"{_FIELD}[{place + 1}]: no sample {news.index}", _FIELD)
            state = states[news.index]
            num_deltas[news.index] += max(1, len(news.deltas))
            _check(state, news, num_deltas[news.index], vocab, f"{_FIELD}[{place + 1}]")
            output = state.replay(news.deltas)
            if output is not None:
                self.outputs.append((place, output))
            self._noted.add(news.index)
        for state in states:
            if journal.kills:
                state.crash_count, state.is_quarantined = journal.kills, True
            if journal.is_recording:
                state.news = []

    async def replayed(self, states: Sequence[RequestState]) -> AsyncIterator[Output]:
        """The Outputs of the records; then all that come may follow."""
        goes_on = not all(state.ended for state in states)
        for place, output in self.outputs:
            await self._journal.reach(place)
            if place % _TOGETHER == 0:
                await asyncio.sleep(0)
            yield output
            self._journal.advance()
        if goes_on:
            await self._journal.reach(self._journal.num_news)

    def note(self, state: RequestState) -> None:
        """Record what the Output was made of that ``state`` has just given."""
        if not state.news:
            return
        prompt = 0 if state.index in self._noted else _checksum(state)
        self._noted.add(state.index)
        self._journal.put(News(self._call, state.index, state.news, prompt))
        state.news = []


def _checksum(state: RequestState) -> int:
    adapter = state.wire.adapter
    digest = zlib.crc32(adapter.digest.encode()) if adapter is not None else 0
    return zlib.crc32(state.wire.input_ids, digest)


def _check(state: RequestState, news: News, num_deltas: int, vocab: int, where: str) -> None:
    """InvalidRequest unless an engine may have sent it. ``num_deltas``: of the sample so far."""
    if news.prompt and news.prompt != _checksum(state):
        raise InvalidRequest(
            f"{where}: this server makes another prompt of the body, or has another adapter", _FIELD
        )
    count = len(state.output_ids)
    for delta in news.deltas:
        count += 1 if isinstance(delta, int) else len(delta.tokens)
        bad = _first_bad(delta, vocab)
        if bad is not None:
            text = f"{where}: {bad} is not a token id; the vocabulary has {vocab}"
            raise InvalidRequest(text, _FIELD)
        if isinstance(delta, TokenDelta) and not _is_possible(state, delta):
            raise InvalidRequest(f"{where}: its parts do not fit each other", _FIELD)
    most = state.wire.sampling.max_new_tokens or 0
    is_long = num_deltas > state.prompt_tokens + most + _WITHOUT_TOKENS
    if state.ended or count > most or is_long:
        raise InvalidRequest(f"{where}: more tokens than the request may have", _FIELD)


def _first_bad(delta: int | TokenDelta, vocab: int) -> int | None:
    """The first id that is none, of tokens and of log-probabilities."""
    if isinstance(delta, int):
        return None if 0 <= delta < vocab else delta
    ids: list[int] = list(delta.tokens)
    for found in (delta.logprobs, delta.prompt_logprobs):
        if found is not None:
            ids += [token for _, token in found.chosen]
            rows = chain(found.top, found.asked)
            ids += [token for row in rows for _, token in row or ()]
            ids += chain(*(row for _, row in found.kept))
    return next((token for token in ids if not 0 <= token < vocab), None)


def _is_possible(state: RequestState, delta: TokenDelta) -> bool:
    finish, found, hidden = delta.finish, delta.logprobs, delta.hidden_states or ()
    return (
        delta.prompt_tokens == state.prompt_tokens
        and delta.pooled is None
        and (found is None or len(found.chosen) == len(delta.tokens))
        and not any(len(part) % 4 for part in hidden)
        and (finish is None or not finish.status or 400 <= finish.status < 600)
    )


# ---- of the running call -------------------------------------------------------------------


def current_journal() -> StreamJournal | None:
    """The journal of the running call; None unless the client asks for one."""
    return _current.get()


def begin_journal(request_id: str | None, is_wanted: bool = True) -> StreamJournal | None:
    """Begin a journal in the running task and those that it starts; None: without one."""
    journal = None if request_id is None else StreamJournal(request_id, is_wanted)
    _current.set(journal)
    return journal


def draws() -> random.Random | None:
    """What the running call draws its ids from, if they must be the same elsewhere."""
    journal = _current.get()
    return None if journal is None else journal.rng


def draw_hex(num_bytes: int) -> str:
    """A new id of ``num_bytes`` random bytes, in hex."""
    rng = draws()
    return secrets.token_hex(num_bytes) if rng is None else rng.randbytes(num_bytes).hex()


def draw_time() -> int:
    """When the running call began, Unix time; now, where it has no journal."""
    journal = _current.get()
    return int(time.time()) if journal is None else journal.head.began_s
