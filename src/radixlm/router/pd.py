"""Prefill and decode on separate workers: each call goes to a pair."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson

from radixlm.router.call import Call
from radixlm.router.data_routes import DATA_ROUTES, DISAGGREGATED
from radixlm.router.dispatch import MAX_ANSWER_BYTES, Dispatch
from radixlm.router.exchange import Exchange, WorkerFailure
from radixlm.router.journal import HEADER
from radixlm.router.retry import Failure, of_answer
from radixlm.router.worker import Worker, WorkerType

PREFILL_LINGER_S = 5.0  # a prefill worker may end its answer after the decode worker's
PROMPT_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

Fields = Mapping[str, Any]
Lists = dict[str, list[Any]]


def attach(gateway: Any) -> None:
    """Dispatch in pairs where there may be pairs. To be attached after dispatch.py."""
    options, kinds = gateway.options, gateway.dispatcher.kinds
    if options.pd_disaggregation or options.enable_igw:
        pair = KvTransferPair if options.backend == "vllm" else BootstrapPair
        for path in DATA_ROUTES:
            kinds[path] = pair if path in DISAGGREGATED else AnyRole


class AnyRole(Dispatch):
    """Calls that generate nothing: any worker answers, prefill workers before decode workers."""

    async def attempt(self) -> Failure | None:
        types: tuple[WorkerType, ...] = ("regular", "prefill", "decode")
        pool = self.gateway.registry.pool
        self.worker_type = next((kind for kind in types if pool(self.model, kind)), "prefill")
        return await super().attempt()


class Pair(Dispatch):
    """A call to a prefill and a decode worker. The answer is the decode worker's; the first leg
    that fails ends the other at once, and only its worker is blamed. While workers of one type are
    gone, one of the other type answers alone if it can."""

    async def attempt(self) -> Failure | None:
        pool = self.gateway.registry.pool
        kinds: tuple[WorkerType, ...] = ("prefill", "decode")
        if not any(pool(self.model, kind) for kind in kinds) and pool(self.model, "regular"):
            self.worker_type = "regular"
            return await super().attempt()
        # a resumed stream brings its own prompt; that of a session is with its decode worker
        is_held = self.shared.holder(self.call) is not None
        if self.client.has_begun or is_held:
            has_decode = is_held or bool(pool(self.model, "decode"))
            self.worker_type = "decode" if has_decode else "prefill"
            return await super().attempt()
        prefill, decode = self.pick("prefill"), self.pick("decode")
        if prefill is None or decode is None:
            left = prefill or decode
            if isinstance(left, Worker) and left.computes_alone:
                self.worker_type, self.edit = left.worker_type, None
                return await self.send(left, {})
        prefill = prefill or await self.choose("prefill")
        decode = decode or await self.choose("decode")
        if isinstance(prefill, Failure):
            return prefill
        return decode if isinstance(decode, Failure) else await self.ask(prefill, decode)

    async def ask(self, prefill: Worker, decode: Worker) -> Failure | None:
        """Send the call to both; None: the client has its answer."""
        raise NotImplementedError

    async def prefill(self, worker: Worker, fields: Fields) -> bytes | Failure:
        """The prefill leg: the body of its answer."""
        cost = self.charge(worker)
        exchange: Exchange | None = None
        headers = [one for one in self.headers if one != HEADER]
        try:
            exchange = await self.open(worker, fields, headers)
            content = await exchange.read(MAX_ANSWER_BYTES)
        except WorkerFailure as error:
            return self._blame(worker, error)
        finally:
            self.discharge(worker, cost, exchange)
        self.metrics.upstream_response(exchange.status)
        if exchange.status >= 400:
            return self._refused(worker, of_answer(exchange.status, exchange.headers, content))
        self.gateway.health.reported(worker, "ok")
        return content

    def spare(self, worker: Worker, blamed: WorkerType) -> None:
        """``worker`` has not failed: it may be tried again, one of type ``blamed`` is."""
        self.worker_type = blamed
        self.tried = [one for one in self.tried if one is not worker]


class BootstrapPair(Pair):
    """SGLang's protocol: both legs at once, joined by a room of the prefill worker's bootstrap
    server."""

    prefilling: asyncio.Task[bytes | Failure] | None = None

    async def ask(self, prefill: Worker, decode: Worker) -> Failure | None:
        fields = bootstrap_fields(self.call, prefill)
        rank = {} if prefill.dp_rank is None else {"disagg_prefill_dp_rank": prefill.dp_rank}
        loop = asyncio.get_running_loop()
        first = self.prefilling = loop.create_task(self.prefill(prefill, fields))
        second = loop.create_task(self.send(decode, fields | rank))
        legs: list[asyncio.Task[Any]] = [first, second]
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if not second.done():
                failure = first.result()
                if isinstance(failure, Failure) and not self.client.has_begun:
                    self.spare(decode, "prefill")
                    return failure
                await asyncio.wait({second})
            answer = second.result()
            if answer is not None:
                self.spare(prefill, "decode")
            elif not first.done():
                self.gateway.spawn(_linger(first))
                legs.remove(first)
            return answer
        finally:
            self.prefilling = None
            await _cancelled(*legs)

    async def _answer(self, exchange: Exchange, worker: Worker) -> Failure | None:
        if exchange.status == 200 and worker.worker_type == "decode" and self._has_logprobs():
            assert self.prefilling
            first = await asyncio.shield(self.prefilling)
            if isinstance(first, bytes):
                self.edit = joined_logprobs(first)
        return await super()._answer(exchange, worker)

    def _has_logprobs(self) -> bool:
        fields = self.call.fields  # choices are scored by one worker
        is_native = self.call.path == "/generate" and not fields.get("score_choices")
        return is_native and self.prefilling is not None and bool(fields.get("return_logprob"))


class KvTransferPair(Pair):
    """vLLM's protocol: the prefill worker first, for one token; what it tells of its blocks goes to
    the decode worker."""

    async def ask(self, prefill: Worker, decode: Worker) -> Failure | None:
        told = self.call.fields
        limit = "max_output_tokens" if self.call.path == "/v1/responses" else "max_tokens"
        fields: dict[str, Any] = {"stream": False, limit: 1}
        fields |= {name: 1 for name in ("max_completion_tokens",) if name in told}
        fields |= {name: None for name in ("stream_options", "min_tokens") if name in told}
        fields["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        answer = await self.prefill(prefill, fields)
        if isinstance(answer, Failure):
            self.spare(decode, "prefill")
            return answer
        params = _objects(answer)
        blocks = params[0].get("kv_transfer_params") if params else None
        failure = await self.send(decode, {"kv_transfer_params": blocks} if blocks else {})
        if failure is not None:
            self.spare(prefill, "decode")
        return failure


async def _linger(task: asyncio.Task[Any]) -> None:
    """Let a leg end whose answer nobody waits for."""
    await asyncio.wait({task}, timeout=PREFILL_LINGER_S)
    await _cancelled(task)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bootstrap_fields(call: Call, prefill: Worker) -> dict[str, Any]:
    """Where the decode worker finds the pages: one value, or one for each prompt of a batch."""
    host, size = urlsplit(prefill.url).hostname, _batch_size(call)
    if size is None:
        room: Any = random.getrandbits(63)
        return _fields(host, prefill.bootstrap_port, room)
    rooms = [random.getrandbits(63) for _ in range(size)]
    return _fields([host] * size, [prefill.bootstrap_port] * size, rooms)


def _fields(host: Any, port: Any, room: Any) -> dict[str, Any]:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def _batch_size(call: Call) -> int | None:
    """How many prompts the body has; None for a single one that is not in a list."""
    if call.path not in ("/generate", "/v1/completions", "/completion"):
        return None
    for name in ("prompt", "text", "input_ids"):
        value = call.fields.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return len(value)
    return None


def joined_logprobs(first: bytes) -> Callable[[bytes], bytes]:
    """An edit of the decode worker's answer, whole or blocks of a stream, that puts the prompt's
    log-probabilities of the prefill worker's answer ``first`` before its own."""
    found: dict[int, Lists] = {}
    is_event = first.startswith(b"data:")
    for number, one in enumerate(_objects(first)):
        if told := _prompt_lists(one):
            found[_index(one) if is_event else number] = told
    return partial(_joined, found)


def _prompt_lists(one: Mapping[str, Any]) -> Lists:
    """The log-probabilities of the prompt in an answer, by field."""
    meta = one.get("meta_info")
    values = {name: meta.get(name) for name in PROMPT_LISTS} if isinstance(meta, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, list) and value}


def _joined(found: Mapping[int, Lists], data: bytes) -> bytes:
    try:
        if data[:1] in b"{[":
            value = orjson.loads(data)
            for number, one in enumerate(value if isinstance(value, list) else [value]):
                _join(one, found.get(number))
            return orjson.dumps(value)
        lines = data.split(b"\n")
        for at, line in enumerate(lines):
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                _join(event, found.get(_index(event)))
                lines[at] = b"data: " + orjson.dumps(event)
        return b"\n".join(lines)
    except orjson.JSONDecodeError:  # the client shall see what the worker said
        return data


def _index(event: Mapping[str, Any]) -> int:
    """Which prompt of a batch an event is of."""
    index = event.get("index")
    return index if isinstance(index, int) else 0


def _join(one: Any, first: Lists | None) -> None:
    meta = one.get("meta_info") if isinstance(one, dict) else None
    if first and isinstance(meta, dict):
        own = _prompt_lists(one)
        meta |= {name: told + own.get(name, []) for name, told in first.items()}


def _objects(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an answer: one, those of a list, or the events of a stream."""
    try:
        if content.startswith(b"data:"):
            lines = [one[6:] for one in content.split(b"\n") if one.startswith(b"data: {")]
            values = [orjson.loads(line) for line in lines]
        else:
            value = orjson.loads(content)
            values = value if isinstance(value, list) else [value]
    except orjson.JSONDecodeError:
        return []
    return [value for value in values if isinstance(value, dict)]
