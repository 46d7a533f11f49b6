"""Streams that are cut after a block and go on at another server, beside the undisturbed one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import httpx
import orjson

from radixlm.router.call import Call
from radixlm.router.journal import HEADER, Journal
from radixlm.router.worker import Worker

NAME = "req-1"
TIMES = re.compile(rb'"(e2e_latency|queue_time|completed_at|created_at|\w+_duration)":("?)[^,}]*')


def call_of(path: str, body: bytes) -> Call:
    return Call("POST", path, "", [], body)


async def raw(client: httpx.AsyncClient, path: str, body: bytes) -> bytes:
    """The answer of a stream with its records, from an empty prefix cache."""
    await client.post("/flush_cache", json={"timeout": 10})  # answers tell what was cached
    sent = {HEADER[0].decode(): "1", "x-request-id": NAME, "content-type": "application/json"}
    got = await client.post(path, content=body, headers=sent)
    assert got.status_code == 200, got.text
    return got.content


async def gateway_journal(client: httpx.AsyncClient, path: str, body: bytes) -> Journal:
    """The journal of a stream that ``client``'s server begins."""
    worker = Worker("http://first")
    worker.facts = (await client.get("/server_info")).json()
    return Journal(call_of(path, body), worker)


def blocks_of(data: bytes, separator: bytes = b"\n\n") -> list[bytes]:
    """Blocks, each with the line of records before it."""
    parts = [part + separator for part in data.split(separator)[:-1]]
    if separator == b"\n\n":
        return parts
    lines = [b"", *parts]
    return [
        (before if before.startswith(b": j") else b"") + line
        for before, line in zip(lines, parts, strict=False)
        if not line.startswith(b": j")
    ]


def without_records(path: str, data: bytes) -> bytes:
    return Journal(call_of(path, b"{}"), Worker("http://any")).feed(data)


def timeless(data: bytes) -> bytes:
    return TIMES.sub(rb'"\1":0', data)


def by_choice(data: bytes) -> bytes:
    """The blocks in their order within a choice: that among choices is the scheduler's."""

    def choice(block: bytes) -> int:
        if not block.startswith(b"data: {"):
            return 0
        value = orjson.loads(block[6:])
        choices = value.get("choices", [value])
        return int(choices[0].get("index", 0)) if choices else 99

    blocks = blocks_of(data)
    return b"".join(sorted(blocks[:-1], key=choice) + blocks[-1:])


async def check_all_cuts(
    first: httpx.AsyncClient,
    second: httpx.AsyncClient,
    path: str,
    body: bytes,
    *,
    cuts: Callable[[int], Sequence[int]] = lambda count: range(1, count + 1),
    has_choices: bool = False,
    plain: Callable[[bytes], bytes] = timeless,
) -> list[bytes]:
    """Cut the stream of ``first`` after block k for every k of ``cuts``; ``second`` must go on with
    what ``first`` would have sent. The blocks; ``plain``: what must be equal of them."""
    separator = b"\n" if path.startswith("/api/") else b"\n\n"
    whole = await raw(first, path, body)
    shown, sent = without_records(path, whole), blocks_of(whole, separator)
    assert len(blocks_of(shown, separator)) == len(sent)
    for cut in cuts(len(sent)):
        journal = await gateway_journal(first, path, body)
        got = journal.feed(b"".join(sent[:cut]) + sent[0][:7])
        journal.lost()
        again = call_of(path, body).overridden(journal.resume_fields())
        got += journal.feed(await raw(second, path, again))
        ordered = by_choice if has_choices else bytes
        assert plain(ordered(got)) == plain(ordered(shown)), f"cut after block {cut}"
        assert journal.num_blocks == len(sent)
    return blocks_of(shown, separator)
