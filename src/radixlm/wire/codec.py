"""Typed msgpack: data that does not fit its record is an error, and nothing is unpickled."""

from typing import Any

import msgspec

from radixlm.base.errors import InvariantError
from radixlm.wire.replies import ToIntake
from radixlm.wire.requests import ToScheduler

MAX_MESSAGE_BYTES = 256 << 20


class Codec:
    """Encodes any record; decodes one union of tagged records."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> Any:
        """A record of the union; InvariantError for data that is too large or malformed."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvariantError(f"message of {len(data)} bytes, limit {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise InvariantError(f"malformed message: {error}") from error


def scheduler_codec() -> Codec:
    """Decodes what the scheduler receives."""
    return Codec(ToScheduler)


def intake_codec() -> Codec:
    """Decodes what intake receives."""
    return Codec(ToIntake)
