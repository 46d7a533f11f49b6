"""Registry: the workers, what they serve, and who is told when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Literal

import orjson

from radixlm.base.errors import InvalidRequest, TransferError
from radixlm.router.options import Options, url_problem
from radixlm.router.worker import State, Worker, WorkerType

logger = logging.getLogger(__name__)

Event = Literal["joined", "left", "changed"]
Listener = Callable[[Event, Worker], None]
Fetch = Callable[..., Awaitable[Any]]
"""``Upstream.fetch(url, method, target, *, body, headers, timeout_s, api_key) -> Response``."""

_OTHER_HALF: dict[WorkerType, WorkerType] = {"prefill": "decode", "decode": "prefill"}
_FIRST_WAIT_S = 0.1
_MAX_RANKS = 1024
_MAX_NAME = 1024  # characters of a model whose pool is kept
_MAX_FAILED = 256  # workers that never joined and are still told of
_TOLD_CHANGES = (
    "models served_model_name model_path resume_digest weight_version dp_size "
    "max_running_requests kv_events kv_events_config"
).split()
"""Facts whose change is told; the others may be counters."""


class Registry:
    """All workers, of all models and types. ``joined`` is told when a worker's facts are known and
    it may get requests, ``changed`` when its state or its facts change, ``left`` at its end."""

    def __init__(self, options: Options, fetch: Fetch) -> None:
        self.options, self.fetch = options, fetch
        self.failed: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> (url, why)
        self._workers: dict[str, Worker] = {}  # by id
        self._pools: dict[tuple[str | None, WorkerType], list[Worker]] = {}
        self._known: dict[str, list[Worker]] | None = None  # model -> workers, available or not
        self._is_mixed: bool | None = None
        self._listeners: list[Listener] = []
        self.on_move: Callable[[Worker, State], None] = lambda worker, state: None
        self._joined: set[str] = set()
        self._problems: dict[str, str] = {}  # id -> why it has not joined yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()  # set, and replaced, at each change

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def find(self, url: str) -> list[Worker]:
        """The worker of this url or name; all ranks of a url."""
        url = url.rstrip("/")
        return [one for one in self._workers.values() if url in (one.url, one.name)]

    def listen(self, listener: Listener) -> None:
        """Call ``listener(event, worker)`` at each change."""
        self._listeners.append(listener)

    def knows(self, model: str | None) -> bool:
        """Whether any worker, available or not, serves ``model``; without --enable-igw, workers
        take every name."""
        return model is None or not self.options.enable_igw or bool(self._serving(model))

    @property
    def is_mixed(self) -> bool:
        """Whether workers serve different models or adapters, so that a request's model counts."""
        if self._is_mixed is None:
            told = [w for w in self._workers.values() if w.model_id not in (None, "unknown")]
            names = [one.names for one in told]
            self._is_mixed = any(one != names[0] for one in names)
        return self._is_mixed

    def pool(self, model: str | None, worker_type: WorkerType = "regular") -> list[Worker]:
        """The available workers for ``model``. The list is kept until a worker changes: callers
        leave it as it is. Without --enable-igw a name that nobody serves goes to all."""
        key = model, worker_type
        found = self._pools.get(key)
        if found is None:
            serving = self._serving(model) if model else []
            if not (model and self.options.enable_igw):
                unnamed = [w for w in self._workers.values() if w.model_id in (None, "unknown")]
                serving = [*serving, *unnamed] if serving else list(self._workers.values())
            found = [one for one in serving if one.is_available and one.worker_type == worker_type]
            if len(self._pools) >= 1024:  # names come from clients
                self._pools.clear()
            if len(model or "") <= _MAX_NAME:
                self._pools[key] = found
        return found

    def stand_ins(self, worker: Worker) -> list[Worker]:
        """Other available workers that can do what ``worker`` does: those of its type. Where a pair
        has none, workers of its other half that compute whole requests."""
        pool = self.pool(worker.model_id, worker.worker_type)
        found = [one for one in pool if one.url != worker.url]
        if found or worker.worker_type not in _OTHER_HALF:
            return found
        others = self.pool(worker.model_id, _OTHER_HALF[worker.worker_type])
        return [one for one in others if one.computes_alone]

    async def available(
        self, model: str | None, worker_type: WorkerType = "regular", *, timeout_s: float
    ) -> list[Worker]:
        """``pool``; waits while it is empty and a worker is joining, at most ``timeout_s``."""
        ends_s = time.monotonic() + timeout_s
        while not (found := self.pool(model, worker_type)):
            left_s = ends_s - time.monotonic()
            is_joining = any(one.state is State.JOINING for one in self._workers.values())
            if left_s <= 0 or not is_joining:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), left_s)
        return found

    def models(self) -> list[str]:
        """Names of the models of workers that are available, without aliases."""
        ids = [one.model_id for one in self._workers.values() if one.is_available]
        return list(dict.fromkeys(one for one in ids if one))

    def add(self, worker: Worker) -> Worker:
        """Begin to join a worker: it is asked for its facts until it answers. Returns the worker
        that is there already where the url is known; InvalidRequest for a url that is none."""
        worker.url, worker.dp_rank = _split_rank(worker.url, worker.dp_rank)
        if problem := url_problem(worker.url):
            raise InvalidRequest(problem, "url")
        for known in self._workers.values():
            if known.url == worker.url and worker.dp_rank in (None, known.dp_rank):
                return known
        worker.api_key = worker.api_key or self.options.api_key
        worker.disable_health_check |= self.options.disable_health_check
        self._workers[worker.id] = worker
        self._forget_pools()
        logger.info("worker %s: joining", worker.name)
        self.spawn(self._join(worker))
        return worker

    def remove(self, worker: Worker, why: str = "removed") -> None:
        """No new requests; running ones end by themselves."""
        if self._workers.pop(worker.id, None) is None:
            return
        self._problems.pop(worker.id, None)
        self.move(worker, State.GONE, why)

    def move(self, worker: Worker, state: State, why: str = "") -> None:
        """Change a worker's state: one log line, and the listeners are told."""
        old = worker.state
        if old is state or old is State.GONE:
            return
        worker.state, worker.state_since_s = state, time.monotonic()
        level = logging.WARNING if state in (State.SUSPECT, State.UNHEALTHY) else logging.INFO
        logger.log(level, "worker %s: %s -> %s%s", worker.name, old, state, f" ({why})" * bool(why))
        self.on_move(worker, state)
        if state is State.GONE:
            if worker.id in self._joined:
                self._joined.discard(worker.id)
                self._tell("left", worker)
        elif worker.id not in self._joined and state is not State.JOINING:
            self._joined.add(worker.id)
            self._tell("joined", worker)
        else:
            self._tell("changed", worker)
        self._forget_pools()

    def changed(self, worker: Worker) -> None:
        """Tell that facts, priority, cost or labels of a worker are others."""
        self._forget_pools()
        if worker.id in self._joined:
            self._tell("changed", worker)

    def revise(self, worker: Worker, told: Worker) -> None:
        """Give a worker what is ``told`` of it now, in place of what was told before."""
        for name in ("worker_type", "bootstrap_port", "priority", "cost", "labels"):
            setattr(worker, name, getattr(told, name))
        worker.api_key = told.api_key or self.options.api_key
        worker.is_named = told.is_named
        worker.model_id = told.model_id or worker.model_id
        self.changed(worker)

    def problem(self, worker: Worker) -> str:
        """Why a worker has not joined yet, or ""."""
        return self._problems.get(worker.id, "")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until the gateway ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work for a worker failed", exc_info=error)

    def close(self) -> None:
        """End all background work."""
        for task in list(self._tasks):
            task.cancel()

    async def check(self, worker: Worker) -> None:
        """Ask a worker for its health; TransferError where it is not well."""
        options = self.options
        if options.backend == "openai":
            return
        target = options.health_check_endpoint
        url = _with_port(worker.url, options.health_check_port)
        response = await self._get(worker, target, url=url)
        if not 200 <= response.status < 300:
            raise TransferError(f"{worker.url}{target} answered {response.status}")

    async def learn(self, worker: Worker) -> None:
        """Read a server's facts again. Those that it told stand where it cannot tell them now."""
        with contextlib.suppress(TransferError):
            await self._learn(worker)

    async def _learn(self, worker: Worker) -> None:
        """Read the facts of /server_info, /model_info and /v1/models; TransferError."""
        facts: dict[str, Any] = {}
        if self.options.backend != "openai":
            for name in ("server_info", "model_info"):
                facts |= await self._first(worker, f"/{name}", f"/get_{name}")
        listed = (await self._first(worker, "/v1/models")).get("data")
        cards = listed if isinstance(listed, list) else []
        cards = [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str)]
        if worker.facts and not facts and not cards:
            return  # it tells nothing at the moment
        facts["cards"], facts["models"] = cards, [card["id"] for card in cards]
        names = (facts.get("served_model_name"), facts.get("model_path"), *facts["models"][:1])
        told = next((str(name) for name in names if name), None)
        for rank in self.find(worker.url) or [worker]:
            is_other = any(rank.facts.get(name) != facts.get(name) for name in _TOLD_CHANGES)
            rank.facts, rank.learned_s = facts, time.monotonic()
            if not rank.is_named or rank.model_id == "unknown":
                rank.model_id = told or rank.model_id or "unknown"
            if is_other:
                self.changed(rank)

    async def _join(self, worker: Worker) -> None:
        """Ask until the worker answers or its time is over."""
        began_s = time.monotonic()
        wait_s = _FIRST_WAIT_S
        await asyncio.sleep(self.options.worker_startup_delay)
        while worker.state is State.JOINING:
            try:
                if not worker.disable_health_check:
                    await self.check(worker)
                await self._learn(worker)
                break
            except (TransferError, OSError, TimeoutError) as error:
                if worker.state is State.JOINING:  # else it was removed meanwhile
                    self._problems[worker.id] = str(error) or type(error).__name__
            if worker.disable_health_check:
                worker.model_id = worker.model_id or "unknown"
                break
            waited_s = time.monotonic() - began_s
            if waited_s + wait_s > self.options.worker_startup_timeout_secs:
                self._give_up(worker)
                return
            await asyncio.sleep(wait_s)
            longest_s = self.options.worker_startup_check_interval
            wait_s = min(max(_FIRST_WAIT_S, waited_s / 10), longest_s)
        if worker.state is not State.JOINING:
            return
        self._problems.pop(worker.id, None)
        for rank in self._ranks(worker):
            self._workers[rank.id] = rank
            self.move(rank, State.READY, f"{rank.worker_type}, model {rank.model_id}")

    def _ranks(self, worker: Worker) -> list[Worker]:
        """The worker itself, or with --dp-aware one of each data-parallel rank, it the first."""
        size = worker.facts.get("dp_size")
        is_one = not self.options.dp_aware or worker.dp_rank is not None
        if is_one or not isinstance(size, int) or not 1 <= size <= _MAX_RANKS:
            return [worker]
        worker.dp_rank = 0
        return [worker, *(worker.of_rank(rank) for rank in range(1, size))]

    def _give_up(self, worker: Worker) -> None:
        why = self.problem(worker) or "no answer"
        self.failed[worker.id] = worker.url, why
        while len(self.failed) > _MAX_FAILED:
            self.failed.popitem(last=False)
        timeout_s = self.options.worker_startup_timeout_secs
        self.remove(worker, f"did not join within {timeout_s} s: {why}")

    async def _get(self, worker: Worker, target: str, *, url: str = "") -> Any:
        """The answer of a GET; TransferError if none comes."""
        timeout_s = float(self.options.health_check_timeout_secs)
        return await self.fetch(
            url or worker.url, "GET", target, timeout_s=timeout_s, api_key=worker.api_key
        )

    async def _first(self, worker: Worker, *targets: str) -> dict[str, Any]:
        """The JSON object of the first route that has one; {} where none has. TransferError: no
        answer comes, or a server that has told its facts fails."""
        has_failed = False
        for target in targets:
            response = await self._get(worker, target)
            has_failed |= response.status >= 500
            if 200 <= response.status < 300:
                with contextlib.suppress(orjson.JSONDecodeError):
                    if isinstance(value := orjson.loads(response.body), dict):
                        return value
        if has_failed and worker.facts:
            raise TransferError(f"{worker.url}{targets[0]} cannot be read")
        return {}

    def _serving(self, model: str) -> list[Worker]:
        """Workers with this model or adapter ("base:adapter" where only the base is known)."""
        if self._known is None:
            self._known = {}
            for worker in self._workers.values():
                for name in worker.names:
                    self._known.setdefault(name, []).append(worker)
        return self._known.get(model) or self._known.get(model.partition(":")[0], [])

    def _forget_pools(self) -> None:
        """What every change ends with."""
        self._change.set()
        self._change = asyncio.Event()
        self._pools.clear()
        self._known = self._is_mixed = None

    def _tell(self, event: Event, worker: Worker) -> None:
        self._forget_pools()
        for listener in self._listeners:
            try:
                listener(event, worker)
            except Exception:  # odd facts of one worker must not keep the others from being told
                logger.exception("worker %s: a listener failed", worker.name)


def _split_rank(url: str, rank: int | None) -> tuple[str, int | None]:
    """ "http://host:port@1/" -> (url, 1)."""
    url, at, number = url.rstrip("/").rpartition("@") if "@" in url else (url.rstrip("/"), "", "")
    if at and number.isdecimal() and len(number) < 5:
        return url, int(number)
    return url + at + number, rank


def _with_port(url: str, port: int | None) -> str:
    if port is None:
        return url
    scheme, _, rest = url.partition("://")
    host = rest if rest.endswith("]") else rest.rpartition(":")[0] or rest
    return f"{scheme}://{host}:{port}"


def worker_of(fields: Mapping[str, Any]) -> Worker:
    """A worker from the fields of POST /workers; InvalidRequest names the field."""
    url = fields.get("url", "")
    _want(fields, "url", str, url)
    worker_type = _want(fields, "worker_type", str) or "regular"
    if worker_type not in ("regular", "prefill", "decode"):
        raise InvalidRequest(f"worker_type {worker_type!r}: regular works", "worker_type")
    worker = Worker(
        url,
        model_id=_want(fields, "model_id", str),
        worker_type=worker_type,  # type: ignore[arg-type]
        api_key=_want(fields, "api_key", str),
        bootstrap_port=_want(fields, "bootstrap_port", int),
    )
    update(worker, fields)
    return worker


def update(worker: Worker, fields: Mapping[str, Any]) -> None:
    """Set what PUT /workers/{id} may change; InvalidRequest names the field."""
    labels = _want(fields, "labels", dict) or {}
    if not all(isinstance(text, str) for text in labels.values()):
        raise InvalidRequest('labels maps texts to texts: {"zone": "a"} works', "labels")
    priority, cost = _want(fields, "priority", int), _want(fields, "cost", (int, float))
    api_key, is_unchecked = (
        _want(fields, "api_key", str),
        _want(fields, "disable_health_check", bool),
    )
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("api_key has characters that no header takes: sk-1 works", "api_key")
    worker.labels |= labels
    worker.priority = worker.priority if priority is None else priority
    worker.cost = worker.cost if cost is None else float(cost)
    worker.api_key = api_key or worker.api_key
    if is_unchecked is not None:
        worker.disable_health_check = is_unchecked


def _want(
    fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], value: Any = None
) -> Any:
    """A field's value if it has the right type, None if it is missing."""
    value = fields.get(name) if value is None else value
    is_bool = isinstance(value, bool) and kind is not bool
    if value is not None and (is_bool or not isinstance(value, kind)):
        example = {"url": "http://127.0.0.1:30001", "priority": 50, "cost": 1.0}.get(name, "null")
        raise InvalidRequest(f"{name} cannot be {value!r}: {example!r} works", name)
    if name == "url" and not value:
        raise InvalidRequest("url is missing: http://127.0.0.1:30001 works", "url")
    return value
