"""One engine, several intakes: each delta goes to the intake that asked for it."""

from __future__ import annotations

from typing import Any

import zmq

from radixlm.wire.channel import ZmqChannel
from radixlm.wire.replies import ControlReply, Finish, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, Shutdown, TokenizedRequest


class FanChannel:
    """A Channel over one zmq PAIR an intake process. Its messages are marked with their origin by
    remembering rid and call id; what belongs to nobody goes to all."""

    def __init__(self, channels: list[ZmqChannel]) -> None:
        self._channels = channels
        self._poller = zmq.Poller()
        for channel in channels:
            self._poller.register(channel.socket, zmq.POLLIN)
        self._owner: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def receive(self, timeout_s: float | None) -> list[Any]:
        wait_ms = None if timeout_s is None else round(timeout_s * 1000)
        if not self._poller.poll(wait_ms):
            return []
        messages: list[Any] = []
        for index, channel in enumerate(self._channels):
            for message in channel.receive(0):
                accepted = self._note(message, index)
                if accepted is not None:
                    messages.append(accepted)
        return messages

    def _note(self, message: Any, index: int) -> Any:
        if len(self._channels) == 1:
            return message  # all is its own: nothing to remember
        if isinstance(message, TokenizedRequest):
            if self._owner.setdefault(message.rid, index) != index:
                self._refuse(message.rid, index)
                return None
        elif isinstance(message, Control):
            self._calls[message.call_id] = index
        elif isinstance(message, AbortRequest) and message.all:
            mine = tuple(rid for rid, owner in self._owner.items() if owner == index)
            return AbortRequest(rids=mine, quiet=message.quiet, message=message.message)
        elif isinstance(message, AbortRequest) and message.quiet:
            for rid in message.rids:
                self._owner.pop(rid, None)
        elif isinstance(message, Shutdown) and len(self._channels) > 1:
            return None  # one of several intakes leaves; the supervisor ends the engine
        return message

    def _refuse(self, rid: str, index: int) -> None:
        """Another intake uses this id: its own answer would be lost."""
        finish = Finish("error", message=f"rid: {rid!r} is already in use", status=400)
        self._channels[index].send(StepReply([TokenDelta(rid=rid, finish=finish)]))

    def send(self, message: Any) -> None:
        if len(self._channels) == 1:
            self._channels[0].send(message)
        elif isinstance(message, StepReply):
            self._send_deltas(message.deltas)
        elif isinstance(message, ControlReply):
            self._channels[self._calls.pop(message.call_id, 0)].send(message)
        else:
            for channel in self._channels:
                channel.send(message)

    def _send_deltas(self, deltas: list[TokenDelta]) -> None:
        parts: dict[int, list[TokenDelta]] = {}
        for delta in deltas:
            owner = self._owner.get(delta.rid)
            if owner is not None:
                parts.setdefault(owner, []).append(delta)
                if delta.finish is not None:
                    del self._owner[delta.rid]
        for index, part in parts.items():
            self._channels[index].send(StepReply(part))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
