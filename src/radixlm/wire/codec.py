"""Typed msgpack: data that does not fit its record is an error, and nothing is unpickled."""

from typing import Any

import msgspec

from radixlm.base.errors import InvariantError
from radixlm.wire.replies import ToIntake
from radixlm.wire.requests import ToScheduler

MAX_MESSAGE_BYTES = 256 << 20
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


class MalformedMessage(InvariantError):
    """A message that is too large or does not fit its record. ``rid`` and ``call_id`` name the
    request or the command that waits for an answer, as far as they could be read ("" = not)."""

    def __init__(self, message: str, rid: str = "", call_id: str = "") -> None:
        super().__init__(message)
        self.rid, self.call_id = rid, call_id


class _Sender(msgspec.Struct):
    """The fields of a message that say who waits for its answer; the decoder skips all others."""

    rid: str = ""
    call_id: str = ""


class Codec:
    """Encodes any record; decodes one union of tagged records."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)
        self._sender_decoder = msgspec.msgpack.Decoder(_Sender)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> Any:
        """A record of the union; MalformedMessage for data that is too large or malformed."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise self._malformed(f"{len(data)} bytes, limit {MAX_MESSAGE_BYTES}", data)
        try:
            return self._decoder.decode(data)
        except UNREADABLE as error:
            raise self._malformed(str(error), data) from error

    def _malformed(self, reason: str, data: bytes | memoryview) -> MalformedMessage:
        try:
            sender = self._sender_decoder.decode(data)
        except UNREADABLE:
            sender = _Sender()
        return MalformedMessage(f"malformed message: {reason}", sender.rid, sender.call_id)


def scheduler_codec() -> Codec:
    """Decodes what the scheduler receives."""
    return Codec(ToScheduler)


def intake_codec() -> Codec:
    """Decodes what intake receives."""
    return Codec(ToIntake)
