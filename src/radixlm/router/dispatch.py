"""Dispatch: choose a worker for a call, pass the answer on, and try again where that may help."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from radixlm.router.answer import Answer, error_answer, in_form_of
from radixlm.router.call import Call, Headers
from radixlm.router.client_stream import ClientStream
from radixlm.router.data_routes import DATA_ROUTES, GET_ROUTES
from radixlm.router.exchange import Cut, Exchange, NoDescriptor, WorkerFailure
from radixlm.router.foreign import ForeignText, can_go_on, is_foreign
from radixlm.router.forwarding import (
    authorized,
    is_stream,
    named_model,
    seen_model,
    to_client,
    to_worker,
)
from radixlm.router.health import Outcome
from radixlm.router.journal import HEADER, MAX_KILLS, Journal, JournalMemory, client_resume
from radixlm.router.metrics import endpoint_of
from radixlm.router.policies.base import NoChoice, Policy
from radixlm.router.policies.pools import Pools
from radixlm.router.retry import BUSY, RETRIED, Failure, backoff, of_answer, of_error, told
from radixlm.router.stream import Stream
from radixlm.router.worker import State, Worker, WorkerType

MAX_ANSWER_BYTES = 1 << 30
JOIN_WAIT_S = 3.0  # a request waits for a worker that is joining; clients give up after 5
STREAMED = (b"text/event-stream", b"application/x-ndjson")
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')

Splice = Callable[[Call, Worker], Mapping[str, Any]]


class Dispatcher:
    """What the calls of one gateway share. ``splices``: each may add fields to a body for a worker.
    ``prepare``: learns what the policy asks of a call's prompt. ``holder``: the only worker that
    can answer a call, if it is known. ``kinds``: path -> how its calls are dispatched, where that
    is not `Dispatch`."""

    def __init__(self, gateway: Any) -> None:
        self.gateway, self.options = gateway, gateway.options
        self.pools = Pools(self.options)
        self.memory = JournalMemory(self.options.journal_memory_mb << 20)
        self.splices: list[Splice] = []
        self.aliases = self.options.aliases
        self.prepare: Callable[[Call], Awaitable[None] | None] = lambda call: None
        self.holder: Callable[[Call], Worker | None] = lambda call: None
        self.kinds: dict[str, type[Dispatch]] = {}

    async def serve(self, gateway: Any, call: Call, client: ClientStream) -> None:
        """Answer one call of a data route."""
        if self.aliases and (model := self._aliased(call)) is not None:
            call.replace_body(call.overridden({"model": model}))
        preparing = self.prepare(call)
        if preparing is not None:
            await preparing
        ticket = await gateway.admission.enter(call)
        try:
            await self.kinds.get(call.path, Dispatch)(self, call, client, ticket).run()
        finally:
            ticket.leave()

    def _aliased(self, call: Call) -> str | None:
        """The model that a call means by a name that no worker has; None: it means what it says."""
        model = self.aliases.get(call.model or "")
        has_name = any(call.model in worker.names for worker in self.gateway.registry)
        return None if has_name else model

    async def ask_any(self, call: Call) -> Answer:
        """Answer a GET by any worker that is available."""
        for worker in self.gateway.registry:
            if not worker.is_available:
                continue
            try:
                found = await self.gateway.upstream.fetch(
                    worker.url, "GET", call.path, timeout_s=5.0, api_key=worker.api_key
                )
            except WorkerFailure:
                continue
            kind = dict(found.headers).get(b"content-type", b"application/json").decode("latin-1")
            return Answer(found.status, found.body, kind)
        message, code = "no worker is available", "no_available_workers"
        return error_answer(503, message, code, retry_after_s=1, call=call)


def attach(gateway: Any) -> None:
    """Serve the data routes."""
    dispatcher = gateway.dispatcher = Dispatcher(gateway)
    gateway.dispatch, gateway.policies = dispatcher.serve, dispatcher.pools
    gateway.registry.listen(dispatcher.pools.on_worker)
    gateway.every(1.0, dispatcher.pools.tick)
    dispatcher.pools.count(gateway.metrics)
    for path in DATA_ROUTES:
        gateway.add_data_route(path, endpoint_of(path))
    for path in GET_ROUTES:
        gateway.routes.add("GET", path, dispatcher.ask_any, "key")


class Dispatch:
    """One call, from its first try to its end."""

    worker_type: WorkerType = "regular"
    edit: Callable[[bytes], bytes] | None = None  # of answers, whole or in blocks
    policy: Policy  # that chose the last worker
    stream: Stream | None = None
    num_tries = 0  # since the last progress
    num_killed = 0  # workers in a row that died of it

    def __init__(self, shared: Dispatcher, call: Call, client: ClientStream, ticket: Any) -> None:
        self.shared, self.call, self.client, self.ticket = shared, call, client, ticket
        self.gateway, self.options = shared.gateway, shared.options
        self.metrics = shared.gateway.metrics
        keeps_apart = shared.options.enable_igw or shared.gateway.registry.is_mixed
        self.model = named_model(call) if keeps_apart else None
        self.target = f"{call.path}?{call.query}" if call.query else call.path
        self.is_stream = is_stream(call)
        self.tried: list[Worker] = []
        self._begun_s = time.monotonic()  # a wait before is no worker's
        added = [HEADER] if self.is_stream and shared.memory.limit else []
        if call.tenant:
            name = shared.options.fair_share_header.lower().encode()
            added.append((name, call.tenant.encode("latin-1", "replace")))
        self.headers = to_worker(call, added)

    # ---- tries ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Try until there is an answer, or no more try is worth it."""
        call, metrics, model = self.call, self.metrics, seen_model(self.call.body)
        endpoint = self.gateway.data_routes[call.path]
        metrics.request_started(call, model, endpoint, self.is_stream)
        error_type = "client_left"
        try:
            while True:
                self.num_tries += 1
                call.num_tries += 1
                failure = await self.attempt()
                if failure is None:
                    error_type = ""
                    break
                wait_s = self._wait_s(failure)
                if wait_s is None:
                    error_type = failure.error_type
                    self._give_up(failure)
                    break
                if wait_s:
                    await asyncio.sleep(wait_s)
        finally:
            stream, first_s = self.stream, 0.0
            if stream is not None:
                stream.journal.close()
                first_s = stream.first_s
            metrics.request_ended(
                call, model, endpoint, self.is_stream,
                status=self.client.status or 499, error_type=error_type,
                seconds=time.monotonic() - call.arrival_s,
                ttft_s=first_s - call.arrival_s if first_s else None,
            )  # fmt: skip

    def _wait_s(self, failure: Failure) -> float | None:
        """Seconds until the next try; None: there is none."""
        if failure.is_final:
            return None
        if self.num_tries >= self.options.num_tries:
            self.metrics.retries_exhausted(self.worker_type, self.call)
            return None
        wait_s = 0.0
        if not failure.is_at_once or not self._untried(self.worker_type):
            wait_s = max(backoff(self.options, self.num_tries + 1), failure.retry_after_s)
            if failure.retry_after_s * 1000 > self.options.retry_max_backoff_ms * 1.5:
                return None  # the client knows better how long it can wait
        self.metrics.retry(self.worker_type, self.call, self.num_tries, wait_s)
        return wait_s

    async def attempt(self) -> Failure | None:
        """One try; None: the client has its answer."""
        worker = self.pick(self.worker_type) or await self.choose(self.worker_type)
        return worker if isinstance(worker, Failure) else await self.send(worker, {})

    def _give_up(self, failure: Failure) -> None:
        """Tell the client, by the worker's own answer if there is one."""
        client = self.client
        if client.has_begun:
            assert self.stream
            self.metrics.stream_moved(failure.code or "failed")
            self.stream.fail(self.call, failure.message, failure.code)
            return
        headers = to_client(failure.headers, client.added_headers)
        status, body = failure.status, failure.body
        if failure.is_own:
            body = in_form_of(self.call, status, body)
        client.begin(status, headers, length=len(body))
        client.write(body)
        client.end()

    # ---- choice --------------------------------------------------------------------------------

    def _untried(self, worker_type: WorkerType) -> list[Worker]:
        pool = self.gateway.registry.pool(self.model, worker_type)
        tried = self.tried
        return [worker for worker in pool if worker not in tried] if tried else pool

    async def choose(self, worker_type: WorkerType) -> Worker | Failure:
        """The worker of the next try; waits for one that is joining."""
        worker = self.pick(worker_type)
        if worker is None:
            failure = self._nobody()
            left_s = JOIN_WAIT_S - (time.monotonic() - self.call.arrival_s)
            if not failure.is_final:
                await self.gateway.registry.available(self.model, worker_type, timeout_s=left_s)
            return self.pick(worker_type) or failure
        return worker

    def pick(self, worker_type: WorkerType) -> Worker | Failure | None:
        """The worker of the next try; None if none is available."""
        if self.tried or self.stream is not None:
            workers = self._able(worker_type)
        else:
            workers = self.gateway.registry.pool(self.model, worker_type)
        if (holder := self.shared.holder(self.call)) is not None:
            workers = [holder] if holder in workers else []
        if not workers:
            return None
        policy = self.policy = self.shared.pools.of(workers[0])
        try:
            chooser = self.shared.pools.chooser(policy, self.call)
            worker = chooser.choose(self.call, self.ticket.candidates(workers))
        except NoChoice as error:
            return told(503, str(error), "no_available_workers", "no_workers", is_final=True)
        self.tried.append(worker)
        self.ticket.sent(worker)
        self.metrics.worker_selected(worker, worker.model_id or "unknown", policy.name)
        return worker

    def _able(self, worker_type: WorkerType) -> list[Worker]:
        """Workers for the next try: those that were not tried, else all."""
        workers = self._untried(worker_type)
        if self.tried and not workers:
            workers = self.gateway.registry.pool(self.model, worker_type)
        if self.stream is not None and (worker_type != "prefill" or self.client.has_begun):
            workers = [worker for worker in workers if self.stream.journal.can_resume(worker)]
        return workers

    def _nobody(self) -> Failure:
        """Why there is no worker."""
        registry = self.gateway.registry
        if self.client.has_begun:
            assert self.stream
            can_wait = any(self.stream.journal.can_resume(worker) for worker in registry)
            message = "the worker of this stream was lost, and no other one can go on with it"
            return told(502, message, "stream_lost", "backend_error", is_final=not can_wait)
        if self.model is not None and not registry.knows(self.model):
            message = f"no worker serves the model {self.model[:100]!r}"
            return told(404, message, "model_not_found", "validation_error", is_final=True)
        message = "no worker is available"
        return told(503, message, "no_available_workers", "no_workers", retry_after_s=1.0)

    # ---- one worker ----------------------------------------------------------------------------

    async def send(self, worker: Worker, extra: Mapping[str, Any]) -> Failure | None:
        """Ask ``worker`` with the fields ``extra`` in the body; None: the client has its answer."""
        cost = self.charge(worker)
        exchange: Exchange | None = None
        try:
            exchange = await self.open(worker, extra)
            return await self._answer(exchange, worker)
        except WorkerFailure as error:
            return self._lost(worker, error)
        finally:
            self.discharge(worker, cost, exchange)

    async def open(
        self, worker: Worker, extra: Mapping[str, Any], headers: Headers | None = None
    ) -> Exchange:
        """Send the call to ``worker``, with ``headers`` in place of the call's; WorkerFailure."""
        headers = self._headers_for(worker, self.headers if headers is None else headers)
        found: Exchange = await self.gateway.upstream.open(
            worker.url, "POST", self.target, headers, self.body(worker, extra),
            timeout_s=self.left_s(),
        )  # fmt: skip
        return found

    def _headers_for(self, worker: Worker, headers: Headers) -> Headers:
        """``headers`` with ``worker``'s key and the context of its span."""
        if worker.api_key is not None:
            headers = authorized(headers, worker)
        return headers if self.call.trace is None else self.call.trace.told(worker, headers)

    def left_s(self) -> float:
        """Seconds that the answer may still take."""
        limit_s = float(self.options.request_timeout_secs)
        return max(self._begun_s + limit_s - time.monotonic(), 0.001)

    def charge(self, worker: Worker) -> int:
        """Count the call as load of ``worker``; its estimated tokens."""
        cost = len(self.call.body) // 4 + 128
        worker.num_inflight += 1
        worker.num_tokens += cost
        worker.num_routed += 1
        self.call.worker = worker
        return cost

    def discharge(self, worker: Worker, cost: int, exchange: Exchange | None) -> None:
        """The try is over; an answer that is not complete is dropped, and the worker aborts it."""
        if exchange is not None:
            exchange.close()
        worker.num_inflight -= 1
        worker.num_tokens -= cost
        if self.call.trace is not None:
            self.call.trace.left(worker, exchange.status if exchange is not None else 0)

    def body(self, worker: Worker, extra: Mapping[str, Any]) -> bytes:
        """The client's bytes, and the fields that ``worker`` needs besides."""
        fields = dict(extra) if extra else {}
        if worker.dp_rank is not None:
            fields["data_parallel_rank"] = worker.dp_rank
        for splice in self.shared.splices:
            if added := splice(self.call, worker):
                fields.update(added)
        if (resume := client_resume(self.call, worker)) is not None:
            fields["resume"] = resume
        if self.stream is not None:
            journal = self.stream.journal
            if journal.text is not None and journal.num_blocks:
                return journal.text.body(fields)
            if "resume_digest" in worker.facts:
                fields.update(journal.resume_fields())
        if not fields or self.call.body.lstrip()[:1] != b"{":
            return self.call.body
        return self.call.overridden(fields)

    async def _answer(self, exchange: Exchange, worker: Worker) -> Failure | None:
        """Pass the answer on, unless it is one to try again."""
        status, headers = exchange.status, dict(exchange.headers)
        self.metrics.upstream_response(status)
        kind = headers.get(b"content-type", b"")
        is_good = status == 200
        if is_good and kind.startswith(STREAMED) and b"content-encoding" not in headers:
            await self._relay(exchange, worker)
            return None
        if (is_good and kind.startswith(b"text/html")) or (self.client.has_begun and status < 400):
            self.gateway.health.reported(worker, "error")
            message = f"{worker.url} answered {status} with {kind.decode('latin-1')!r}"
            return told(502, message, "invalid_worker_answer", "backend_error")
        is_json = kind.startswith(b"application/json")
        if is_good and b"content-length" not in headers and not is_json:
            await self._relay_raw(exchange, worker)
            return None
        content = await exchange.read(MAX_ANSWER_BYTES)
        if status >= 400:
            return self._refused(worker, of_answer(status, exchange.headers, content))
        if self.edit is not None:
            content = self.edit(content)
        self.gateway.health.reported(worker, "ok")
        client = self.client
        client.begin(status, self._head(exchange, worker), length=len(content))
        client.write(content)
        client.end()
        self._ended(worker, content)
        return None

    def _head(self, exchange: Exchange, worker: Worker) -> list[tuple[bytes, bytes]]:
        headers = to_client(exchange.headers, self.client.added_headers)
        headers.append((b"x-smg-routed-worker-id", worker.id.encode()))
        return headers

    async def _relay(self, exchange: Exchange, worker: Worker) -> None:
        """Pass a stream on. Cut: the worker is lost in the midst."""
        stream = self.stream
        if stream is None:
            journal = Journal(self.call, worker, self.shared.memory)
            head = self._head(exchange, worker)
            stream = self.stream = Stream(self.client, journal, exchange.status, head)
            stream.edit = self.edit
        elif self.client.has_begun:
            self.metrics.stream_moved("resumed")
        else:
            stream.restart(worker, self._head(exchange, worker))
            stream.edit = self.edit
        if self.options.resume_foreign and not self.client.has_begun:
            self._keep_text(stream.journal, worker)
        await stream.relay(exchange, worker)
        self.gateway.health.reported(worker, "ok")
        stream.end()
        self.ticket.used(output_tokens=stream.journal.num_blocks)
        self._ended(worker, stream.last)

    def _keep_text(self, journal: Journal, worker: Worker) -> None:
        """The stream of a worker without journal goes on by its text, where that is enough."""
        if not journal.is_dropped and is_foreign(worker) and can_go_on(self.call):
            journal.text = ForeignText(self.call, worker)

    async def _relay_raw(self, exchange: Exchange, worker: Worker) -> None:
        """Pass on what is neither JSON nor events, such as speech."""
        client = self.client
        client.begin(exchange.status, self._head(exchange, worker))
        exchange.start(client.write)
        client.on_pressure(exchange.pause, exchange.resume)
        try:
            await exchange.wait()
        except Cut:
            self.gateway.health.reported(worker, "cut")
            self.metrics.worker_error(worker, "cut")
            client.abort()
            return
        self.gateway.health.reported(worker, "ok")
        client.end()

    def _ended(self, worker: Worker, content: bytes) -> None:
        """Tell the policy. ``content``: of the answer, or its last blocks."""
        policy = self.policy
        if self.stream is not None:
            self.call.first_s = self.stream.first_s
            self.call.num_events = self.stream.journal.num_blocks
        if type(policy).ended is not Policy.ended:
            found = _CACHED.search(content)
            policy.ended(self.call, worker, cached_tokens=int(found[1]) if found else None)

    def _refused(self, worker: Worker, failure: Failure) -> Failure:
        """The worker has answered with an error."""
        status = failure.status
        if status in BUSY:
            self.gateway.health.reported(worker, "busy")
        elif status < 500:
            self.gateway.health.reported(worker, "client")
        else:
            self.gateway.health.reported(worker, "error" if status in RETRIED else "client")
            self.metrics.worker_error(worker, "status")
        return failure

    def _lost(self, worker: Worker, error: WorkerFailure) -> Failure:
        """The worker has given no whole answer."""
        stream = self.stream
        if self.call.trace is not None:
            self.call.trace.failed(worker, str(error))
        if stream is None:
            return self._blame(worker, error)
        was_moving, stream.is_moving = stream.is_moving, False  # what follows was not asked for
        is_fault = not was_moving and worker.state is not State.DRAINING
        has_moved = stream.journal.lost(is_fault=is_fault)
        if has_moved or not is_fault:  # each worker that brings a stream on has its own tries
            self.num_tries, self.tried, self.num_killed = 0, [worker], 0
        return of_error(error) if was_moving else self._blame(worker, error, not has_moved)

    def _blame(self, worker: Worker, error: WorkerFailure, is_kill: bool = True) -> Failure:
        """Tell of a worker that has given no whole answer. ``is_kill``: the call may be why."""
        if isinstance(error, NoDescriptor):
            return of_error(error)
        is_leaving = worker.state in (State.DRAINING, State.GONE)
        self.num_killed += is_kill and error.is_sent and not (error.is_timeout or is_leaving)
        kind: Outcome = "cut" if isinstance(error, Cut) else "unreachable"
        if error.is_timeout:  # a stream that went on for all of its time is nobody's fault
            kind = "error" if is_kill else "client"
        self.gateway.health.reported(worker, kind)
        self.metrics.worker_error(worker, "timeout" if error.is_timeout else kind)
        if self.num_killed >= MAX_KILLS:
            message = f"{self.num_killed} workers were lost while they served this request"
            return told(500, message, "request_lost_workers", "backend_error", is_final=True)
        return of_error(error)
