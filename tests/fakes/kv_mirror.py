"""A subscriber of KV events in a process of its own, which knows the published schemas only.

python -m tests.fakes.kv_mirror ENDPOINT REPLAY FORMAT LOSS: each line of standard input is a list
of token ids; when a page with them is cached, it prints what is cached as one line of JSON: [hash,
parent, tokens, lora_name, cache_salt] of each page. It ignores a share LOSS of the messages, and
asks for them again.
"""

import json
import random
import sys
from typing import Any

import msgspec
import zmq

WAIT_MS = 10_000


class LegacyEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Events of SGLang 0.5.2: arrays whose first element is the type."""


class LegacyStored(LegacyEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class LegacyRemoved(LegacyEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class LegacyCleared(LegacyEvent, tag="AllBlocksCleared"):
    pass


class VllmStored(LegacyEvent, tag="BlockStored"):
    """vLLM's arrays have more at the end."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class VllmRemoved(LegacyEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class MapEvent(msgspec.Struct, omit_defaults=True, tag=True, forbid_unknown_fields=True):
    """Events of later versions: maps with "type"."""


class MapStored(MapEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None
    extra_key: str | None = None  # ours: SGLang reads past it


class MapRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class MapCleared(MapEvent, tag="AllBlocksCleared"):
    pass


EVENTS: dict[str, Any] = {
    "legacy": LegacyStored | LegacyRemoved | LegacyCleared,
    "vllm": VllmStored | VllmRemoved | LegacyCleared,
    "default": MapStored | MapRemoved | MapCleared,
    "dynamo": MapStored | MapRemoved | MapCleared,
}


class Mirror:
    def __init__(self, replay: str, format: str, loss: float) -> None:
        self.decoder = msgspec.msgpack.Decoder(tuple[float, list[EVENTS[format]], int])
        self.replay, self.loss, self.draw = replay, loss, random.Random(0)
        self.pages: dict[int, tuple[Any, ...]] = {}
        self.last = -1

    def receive(self, number: int, payload: bytes) -> None:
        """A message, perhaps lost on the way; those missed before it are asked for."""
        if self.draw.random() < self.loss or number <= self.last:
            return
        if number > self.last + 1:
            self.catch_up()
        if number > self.last:
            self.apply(number, payload)

    def catch_up(self) -> None:
        # a DEALER, since a REQ socket takes one answer only
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.replay)
            socket.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
            while True:
                assert socket.poll(WAIT_MS), "no replay"
                _, data, payload = socket.recv_multipart()
                number = int.from_bytes(data, "big", signed=True)
                if number == -1:
                    return
                self.apply(number, payload)

    def apply(self, number: int, payload: bytes) -> None:
        _, events, rank = self.decoder.decode(payload)
        assert rank == 0
        first = events[0]
        is_cleared = type(first).__struct_config__.tag == "AllBlocksCleared"
        assert number == self.last + 1 or is_cleared, f"{number} follows {self.last}"
        self.last = number
        for event in events:
            self.change(event)

    def change(self, event: Any) -> None:
        kind = type(event).__struct_config__.tag
        if kind == "AllBlocksCleared":
            self.pages.clear()
        elif kind == "BlockRemoved":
            for name in event.block_hashes:
                del self.pages[name]
        else:
            size, above = event.block_size, event.parent_block_hash
            assert above is None or above in self.pages
            assert len(event.token_ids) == size * len(event.block_hashes)
            for i, name in enumerate(event.block_hashes):
                tokens = event.token_ids[i * size : (i + 1) * size]
                names = getattr(event, "lora_name", None), getattr(event, "cache_salt", None)
                self.pages[name] = (above, tokens, *names)
                above = name

    def has(self, tokens: list[int]) -> bool:
        return any(page[1] == tokens for page in self.pages.values())


def main(endpoint: str, replay: str, format: str, loss: str) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"kv")
    socket.connect(endpoint)
    mirror = Mirror(replay, format, float(loss))
    for line in sys.stdin:
        awaited = json.loads(line)
        while not mirror.has(awaited):
            if not socket.poll(50):
                mirror.catch_up()
                continue
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv"
            mirror.receive(int.from_bytes(number, "big"), payload)
        print(json.dumps([(name, *page) for name, page in mirror.pages.items()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
