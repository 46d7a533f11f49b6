"""MultiChannel: connects one engine with one or several intakes; each delta goes to the intake that
sent its request.

It also checks what comes in. Intake has made it, so it should be valid; an invalid message is
dropped, counted and, where it names a request or a command, answered. Replies are cut to the size
of a message.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import zmq

from radixlm.base.errors import InvalidRequest
from radixlm.observe.log_tail import LogTail
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import MAX_MESSAGE_BYTES, MalformedMessage
from radixlm.wire.replies import ControlReply, Finish, Heartbeat, Moment, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, Shutdown, TokenizedRequest

log = logging.getLogger(__name__)

MAX_TOP = 1 << 20  # log-probabilities of one token
RESERVED_BYTES = 4 << 20  # of a message, for all but hidden states


class MultiChannel:
    """A Channel over one zmq PAIR for each intake process. It remembers which intake sent a request
    or a command; messages for no particular intake go to all."""

    def __init__(self, channels: list[ZmqChannel], max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """``max_bytes``: size of one outgoing message."""
        self._channels = channels
        self._poller = zmq.Poller()
        for index, channel in enumerate(channels):
            self._poller.register(channel.socket, zmq.POLLIN)
            channel.on_malformed = partial(self._answer_malformed, index)
            if len(channels) > 1:
                self._poller.register(channel.watch(), zmq.POLLIN)
        self._owner: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._orphans: dict[int, set[str]] = {}  # requests of intakes that have died
        self._num_untold: dict[int, int] = {}  # of them, by intakes that took the place of one
        self._max_hidden_bytes = max_bytes - min(RESERVED_BYTES, max_bytes // 2)
        self.log_tail: LogTail | None = None  # sent with the heartbeats
        self._num_lines = 0
        self.vocab = self.embed_dim = 0  # 0: not known yet, so not checked

    @property
    def num_dropped(self) -> int:
        """Messages that could not be read, and invalid requests."""
        return sum(channel.num_dropped for channel in self._channels)

    def receive(self, timeout_s: float | None) -> list[Any]:
        wait_ms = None if timeout_s is None else round(timeout_s * 1000)
        ready = dict(self._poller.poll(wait_ms))
        if not ready:
            return []
        messages: list[Any] = []
        for index, channel in enumerate(self._channels):
            if channel.monitor is not None and channel.monitor in ready:
                channel.monitor.recv_multipart()
                messages += self._end_requests_of(index)
            for message in channel.receive(0):
                accepted = self._accept(message, index)
                if accepted is not None:
                    messages.append(accepted)
        return messages

    def _accept(self, message: Any, index: int) -> Any:
        """The message for the scheduler; None if it is dropped."""
        if isinstance(message, TokenizedRequest):
            try:
                self._check(message)
            except (InvalidRequest, ValueError, OverflowError) as error:
                self._channels[index].drop(error)
                self._refuse(message.rid, index, f"the engine got an invalid request: {error}", 500)
                return None
        if len(self._channels) == 1:
            return message  # there is one intake only
        if isinstance(message, TokenizedRequest):
            if self._owner.setdefault(message.rid, index) != index:
                # another intake uses this id and would lose its answers
                text = f"rid: Duplicate request ID detected: {message.rid}"
                self._refuse(message.rid, index, text, 400)
                return None
        elif isinstance(message, Control):
            self._calls[message.call_id] = index
        elif isinstance(message, AbortRequest) and message.quiet:
            if message.all:  # of this intake, whose process has died
                message = msgspec.structs.replace(message, all=False, rids=self._rids_of(index))
                orphans = self._orphans.pop(index, set()).union(message.rids)
                self._num_untold[index] = len(orphans)
            for rid in message.rids:
                self._owner.pop(rid, None)  # no reply will do it
        elif isinstance(message, Shutdown):
            return None  # one of several intakes ends; the supervisor ends the engine
        return message

    def _rids_of(self, index: int) -> tuple[str, ...]:
        return tuple(rid for rid, owner in self._owner.items() if owner == index)

    def _end_requests_of(self, index: int) -> list[AbortRequest]:
        """The process of an intake has died: nobody waits for what it has asked."""
        rids = self._rids_of(index)
        if not rids:
            return []
        self._orphans.setdefault(index, set()).update(rids)
        log.warning("HTTP process %d has gone: its %d requests are aborted", index, len(rids))
        return [AbortRequest(rids=rids, message="its HTTP process has died")]

    def _answer_malformed(self, index: int, error: MalformedMessage) -> None:
        """Nobody may wait for ever for the answer to a message that could not be decoded."""
        text = f"the engine got an invalid request: {error}"
        if error.rid:
            self._refuse(error.rid, index, text, 500)
        if error.call_id:
            self._channels[index].send(ControlReply(error.call_id, False, text))

    def _check(self, message: TokenizedRequest) -> None:
        """Raise if ids or sizes are invalid, as kernels do not check them."""
        ids = message.text_ids()
        if self.vocab and len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()} of {self.vocab}")
        if message.embeds is not None and self.embed_dim:
            rows = len(message.ids()) - message.num_emitted
            if len(message.embeds) != 4 * rows * self.embed_dim:
                raise ValueError(f"{len(message.embeds)} bytes of embeddings for {rows} places")
        if self.vocab:
            message.sampling.validate(self.vocab)
            need = message.logprobs
            if need is not None and not 0 <= need.top <= min(self.vocab, MAX_TOP):
                raise ValueError(f"log-probabilities of {need.top} tokens of {self.vocab}")
            if need is not None and not all(0 <= t < self.vocab for t in need.token_ids):
                raise ValueError("log-probabilities of tokens that do not exist")

    def _refuse(self, rid: str, index: int, text: str, status: int) -> None:
        finish = Finish("error", message=text, status=status)
        self._channels[index].send(StepReply([TokenDelta(rid=rid, finish=finish)]))

    def send(self, message: Any) -> None:
        parts = [message]
        if isinstance(message, Heartbeat):
            message.load.num_dropped = self.num_dropped
            if self.log_tail is not None:
                message.lines, self._num_lines = self.log_tail.since(self._num_lines)
        elif isinstance(message, StepReply):
            if any(delta.hidden_states is not None for delta in message.deltas):
                parts = list(self._make_replies(self._split_deltas(message.deltas)))
                parts[0].rids, parts[0].tokens = message.rids, message.tokens
                parts[0].moments = message.moments
        if len(self._channels) == 1:
            for part in parts:
                self._channels[0].send(part)
        elif isinstance(message, StepReply):
            for part in parts:
                self._send_to_owners(part)
        elif isinstance(message, ControlReply):
            self._channels[self._calls.pop(message.call_id, 0)].send(message)
        else:
            for index, channel in enumerate(self._channels):
                if isinstance(message, Heartbeat):
                    message.num_orphans = self._num_untold.pop(index, 0)
                channel.send(message)

    def _split_deltas(self, deltas: list[TokenDelta]) -> Iterator[TokenDelta]:
        """The deltas; one with more hidden states than fit into a message becomes several."""
        for delta in deltas:
            if delta.hidden_states is None:
                yield delta
                continue
            piece: list[bytes] = []
            for rows in _split_rows(delta.hidden_states, self._max_hidden_bytes // 4 * 4):
                if piece and sum(map(len, piece)) + len(rows) > self._max_hidden_bytes:
                    yield _hidden_states_delta(delta, piece)
                    piece = []
                piece.append(rows)
            yield msgspec.structs.replace(delta, hidden_states=piece or None)

    def _make_replies(self, deltas: Iterator[TokenDelta]) -> Iterator[StepReply]:
        part: list[TokenDelta] = []
        size = 0
        for delta in deltas:
            more = sum(map(len, delta.hidden_states or ()))
            if part and size + more > self._max_hidden_bytes:
                yield StepReply(part)
                part, size = [], 0
            part.append(delta)
            size += more
        yield StepReply(part)

    def _send_to_owners(self, reply: StepReply) -> None:
        """Send each intake its own deltas and tokens."""
        deltas: list[list[TokenDelta]] = [[] for _ in self._channels]
        ones: list[list[tuple[str, int]]] = [[] for _ in self._channels]
        for one in zip(reply.rids, reply.tokens, strict=True):
            owner = self._owner.get(one[0])
            if owner is not None:
                ones[owner].append(one)
        moments: list[list[Moment]] = [[] for _ in self._channels]
        for moment in reply.moments:
            owner = self._owner.get(moment[0])
            if owner is not None:
                moments[owner].append(moment)
        for delta in reply.deltas:
            owner = self._owner.get(delta.rid)
            if owner is not None:
                deltas[owner].append(delta)
                if delta.finish is not None:
                    del self._owner[delta.rid]
        for channel, some, pairs, own in zip(self._channels, deltas, ones, moments, strict=True):
            if some or pairs or own:
                rids, tokens = zip(*pairs, strict=True) if pairs else ((), ())
                channel.send(StepReply(some, rids=rids, tokens=tokens, moments=own))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def _split_rows(states: list[bytes], max_bytes: int) -> Iterator[bytes]:
    for rows in states:
        for first in range(0, len(rows), max_bytes):
            yield rows[first : first + max_bytes]


def _hidden_states_delta(delta: TokenDelta, piece: list[bytes]) -> TokenDelta:
    """A delta with some of the hidden states, sent before ``delta`` itself."""
    return TokenDelta(
        delta.rid,
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
        retractions=delta.retractions,
        hidden_states=piece,
    )
