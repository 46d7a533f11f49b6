"""--kv-events-config of an engine: what a subscriber can ask for again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import zmq

import radixlm


def replayed(endpoint: str) -> list[dict[str, object]]:
    events: list[dict[str, object]] = []
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart((b"", bytes(8)))
        while True:
            assert socket.poll(20_000)
            _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return events
            events += msgspec.msgpack.decode(payload)[1]


def test_an_engine_publishes_what_it_caches(tmp_path: Path) -> None:
    endpoints = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    config = json.dumps({"publisher": "zmq", **endpoints})
    ids = list(range(100, 140))
    for _ in range(2):  # the first one's end frees the endpoints
        with radixlm.Engine(max_total_tokens=4096, kv_events_config=config) as engine:
            engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
            engine.generate(input_ids=[*ids, 7, 8, 9], sampling_params={"max_new_tokens": 1})
            engine._wait(engine._engine.intake.control_each("kv_snapshot"))
            engine.flush_cache()
            events = replayed(endpoints["replay_endpoint"])
    assert events[0] == {"type": "AllBlocksCleared"} == events[-1]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert [event["parent_block_hash"] for event in stored] == [None, None]
    assert stored[0] == stored[1] and events.count(events[0]) == 3  # told again, on request
    size = stored[0]["block_size"]
    assert stored[0]["token_ids"] == ids[: len(ids) // size * size]
    removed = [event for event in events if event["type"] == "BlockRemoved"]
    assert [event["block_hashes"] for event in removed] == [stored[0]["block_hashes"]]
