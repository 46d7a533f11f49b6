"""Work over large bodies and answers in threads, so that the event loop goes on.

A thread of Python gives way to the loop every few milliseconds, but one call into C (a JSON parser)
does not. So bodies are bounded by what a parser makes of them, and very large ones are read one
after the other, with pauses in which the loop catches up."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson

from radixlm.base.errors import PayloadTooLarge
from radixlm.intake.call import current_call

T = TypeVar("T")

SMALL_BYTES = 8 << 10  # what the loop works on itself: well below a millisecond
HUGE_BYTES = 1 << 20
BYTES_A_LOGPROB = 8  # what one costs, as bytes of a body
# a parser, which nothing interrupts, takes some 0.3 s for so many
MAX_CONTAINERS = 250_000
MAX_VALUES = 5_000_000
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"{[,'))
PIECE_ITEMS = 1024  # items of a list that are encoded at once
LARGE_LIST = 4 * PIECE_ITEMS
MAX_PAUSE_S = 0.5
JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY

_large = ThreadPoolExecutor(2, "large-body")
_huge = ThreadPoolExecutor(1, "huge-body")


async def off_loop(num_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``, in a thread if it is about more than a few KiB of text."""
    if num_bytes <= SMALL_BYTES:
        return work(*args)
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    if num_bytes <= HUGE_BYTES:
        return await loop.run_in_executor(_large, context.run, work, *args)
    return await loop.run_in_executor(_huge, context.run, _with_pause, work, *args)


async def off_loop_of(num_logprobs: int, work: Callable[..., T], *args: Any) -> T:
    """``off_loop`` for what shows ``num_logprobs`` log-probabilities."""
    return await off_loop(BYTES_A_LOGPROB * num_logprobs, work, *args)


async def off_loop_by_body(work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``, in a thread if the body of the running call is large."""
    return await off_loop(body_size(), work, *args)


def body_size() -> int:
    """Bytes of the running call's body; 0 outside of a call."""
    call = current_call()
    return 0 if call is None else call.num_bytes


def _with_pause(work: Callable[..., T], *args: Any) -> T:
    """``work(*args)`` without garbage collections, which would look at each new object many times;
    then a pause as long as it took."""
    began_s, was_enabled = time.monotonic(), gc.isenabled()
    gc.disable()
    try:
        return work(*args)
    finally:
        if was_enabled:
            gc.enable()
        time.sleep(min(time.monotonic() - began_s, MAX_PAUSE_S))


def check_body(data: bytes) -> None:
    """PayloadTooLarge for JSON of more values than a parser should make at once."""
    if len(data) <= MAX_CONTAINERS or _excess(_parts(data)) is None:
        return
    excess = _excess(_structure(data))  # slower: characters of strings do not count
    if excess is not None:
        count, what, most = excess
        raise PayloadTooLarge(
            f"the body holds about {count} {what}, at most {most} are read: send it in parts"
        )


def _excess(parts: Iterable[bytes]) -> tuple[int, str, int] | None:
    """How many of what there are in JSON, and the limit that this exceeds."""
    num_containers = num_values = 0
    for part in parts:
        num_containers += part.count(b"{") + part.count(b"[")
        num_values += part.count(b",")
    if num_containers > MAX_CONTAINERS:
        return num_containers, "lists and objects", MAX_CONTAINERS
    return (num_values, "values", MAX_VALUES) if num_values > MAX_VALUES else None


def _parts(data: bytes) -> Iterator[bytes]:
    return (data[start : start + HUGE_BYTES] for start in range(0, len(data), HUGE_BYTES))


def _structure(data: bytes) -> Iterator[bytes]:
    """The brackets and commas of JSON outside of its strings."""
    is_in_string, rest = 0, b""
    for part in _parts(data):
        part = rest + part
        cut = len(part) - (len(part) - len(part.rstrip(b"\\"))) % 2
        part, rest = part[:cut], part[cut:]  # an escape is not cut in two
        part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.translate(None, _NO_STRUCTURE).split(b'"')
        yield b"".join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of ``value`` in pieces, a few thousand items of a long list at a time."""
    if isinstance(value, dict):
        yield from _object_pieces(value)
    elif isinstance(value, list) and is_large(value):
        mark = b"["
        for start in range(0, len(value), PIECE_ITEMS):
            part = value[start : start + PIECE_ITEMS]
            if any(isinstance(item, dict | list) and is_large(item) for item in part):
                for item in part:
                    yield mark
                    yield from json_pieces(item)
                    mark = b","
            else:
                yield mark + orjson.dumps(part, option=JSON_OPTIONS)[1:-1]
                mark = b","
        yield b"]"
    else:
        yield orjson.dumps(value, option=JSON_OPTIONS)


def _object_pieces(value: dict[Any, Any]) -> Iterator[bytes]:
    if not is_large(value):
        yield orjson.dumps(value, option=JSON_OPTIONS)
        return
    mark = b"{"
    for key, item in value.items():
        yield mark + orjson.dumps({key: None}, option=JSON_OPTIONS)[1:-5]
        yield from json_pieces(item)
        mark = b","
    yield b"}"


def is_large(value: Any) -> bool:
    """Whether ``value`` holds thousands of items, two levels deep."""
    if isinstance(value, dict):
        return any(is_large(item) for item in value.values())
    if not isinstance(value, list):
        return False
    if len(value) > LARGE_LIST:
        return True
    inner = (len(i) for i in value if isinstance(i, list | tuple | dict))
    return sum(inner) > LARGE_LIST or any(is_large(i) for i in value if isinstance(i, dict))


async def encoded(value: Any) -> AsyncIterator[bytes]:
    """``json_pieces`` of ``value``, each made in a thread."""
    pieces = json_pieces(value)
    while (piece := await off_loop(SMALL_BYTES + 1, _next_piece, pieces)) is not None:
        yield piece


def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    """The next pieces together, some 64 KiB."""
    joined, size = [], 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size > SMALL_BYTES * 8:
            break
    return b"".join(joined) or None
