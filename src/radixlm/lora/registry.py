"""AdapterRegistry: the LoRA adapters of a server by name. It outlives engines: a new one gets them
before the requests.

Every load has a number of its own, which requests carry: an adapter that is replaced under its name
stays until its last request is over. A request counts as a user while intake has it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import time
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from radixlm.base.errors import InvalidRequest, Overloaded, RadixError, RequestError
from radixlm.base.private_files import make_locked_folder
from radixlm.base.record import Record
from radixlm.hub.locate import Wanted, locate_model, scheme_of
from radixlm.intake.replicas import Replica
from radixlm.wire.replies import ControlReply, Failed
from radixlm.wire.requests import NEVER, AdapterRef, pack_ids

if TYPE_CHECKING:
    from radixlm.intake.tokenizer_manager import TokenizerManager

log = logging.getLogger(__name__)

MAX_NAME = 256
MAX_REMEMBERED = 10_000  # names that were loaded once
USER_POLL_S = 0.05
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
LOAD, UNLOAD, KEEP = "load_lora_adapter", "unload_lora_adapter", "keep_lora_adapters"


class AdapterOptions(Record):
    """``initial``: (name, path, is_pinned) of --lora-paths. ``is_shared``: other processes serve
    with adapters of their own, so that none can be loaded while they run."""

    is_enabled: bool = False
    initial: tuple[tuple[str, str, bool], ...] = ()
    max_loaded: int | None = None
    max_pinned: int | None = None
    served_name: str = ""
    is_shared: bool = False
    download_dir: str | None = None


class Spool:
    """A folder of its own for an adapter that came as bytes: an engine that takes the place of
    another reads it again. It goes with the object, or with the process; the next server deletes
    what one that was killed has left."""

    def __init__(self, config: dict[str, Any], tensors: bytes) -> None:
        """``tensors``: a safetensors file."""
        self.path, lock = make_locked_folder("radixlm-adapter-")
        weakref.finalize(self, os.close, lock)
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        (self.path / ADAPTER_CONFIG).write_text(json.dumps(config))
        (self.path / ADAPTER_TENSORS).write_bytes(tensors)


@dataclass(slots=True, eq=False)
class Loaded:
    """One load of an adapter. ``task``: while it is read."""

    name: str
    path: str
    is_pinned: bool
    number: int = -1
    digest: str = ""
    num_bytes: int = 0
    rank: int = 0
    invocation: tuple[int, ...] = ()  # of an aLoRA
    folder: str = ""  # on this machine, of a path that is a hub's name
    used_s: float = 0.0
    task: asyncio.Task[None] | None = None
    spool: Spool | None = None

    @property
    def source(self) -> str:
        """Its path; of one that came in a request, "tensors"."""
        return self.path if self.spool is None else "tensors"

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of its load."""
        return {
            "number": self.number,
            "path": self.folder or self.path,
            "is_sent": self.spool is not None,
            "digest": self.digest or None,
        }


class AdapterRegistry:
    """Names, loads and users of adapters."""

    def __init__(self, intake: TokenizerManager, options: AdapterOptions) -> None:
        self._intake, self.options = intake, options
        self._by_name: dict[str, Loaded] = {}
        self._leaving: dict[int, Loaded] = {}
        self._reading: dict[int, Loaded] = {}
        self._dropped: dict[str, Loaded] = {}  # for want of room: come back when asked for
        self._known: dict[str, None] = {}  # names that were loaded once, the latest last
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name
        self._numbers = itertools.count()
        self._start: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_loads, self.num_failed, self.num_evicted = 0, 0, 0

    @property
    def loaded(self) -> dict[str, str]:
        """Name -> path of every adapter that requests may ask for."""
        return {name: one.source for name, one in self._by_name.items()}

    @property
    def entries(self) -> list[Loaded]:
        return list(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        name = self._version_of(name)
        return name in self._by_name or name in self._dropped

    def _version_of(self, name: str) -> str:
        """The adapter that a name means: of those called NAME@VERSION, NAME is the one that was
        loaded last."""
        if name in self._by_name or name in self._dropped:
            return name
        versions = [one for one in self._by_name if one.startswith(f"{name}@")]
        ready = [one for one in versions if self._by_name[one].digest]
        return (ready or versions or [name])[-1]

    def was_unloaded(self, name: str) -> bool:
        """Whether requests could ask for an adapter of this name, and cannot now."""
        return name in self._known and name not in self

    def num_users(self, adapter: Loaded) -> int:
        """Unfinished requests that use this load."""
        wires = (state.wire.adapter for state in self._intake.requests.values())
        return sum(wire is not None and wire.number == adapter.number for wire in wires)

    def counts(self, rids: Iterable[str]) -> dict[str, float]:
        """Adapters, and those of these requests that have one; "waiting" have no token yet."""
        states = [s for rid in rids if (s := self._intake.requests.get(rid)) and s.wire.adapter]
        return {
            "lora_num_loaded": len(self._by_name),
            "lora_num_pinned": sum(one.is_pinned for one in self._by_name.values()),
            "lora_num_loading": len(self._reading),
            "lora_num_reqs": len(states),
            "lora_num_waiting_reqs": sum(not state.first_token_s for state in states),
        }

    # ---- requests --------------------------------------------------------------------------

    async def prepare(self, name: str | None) -> None:
        """Wait until the adapter is loaded. InvalidRequest if it is not known or cannot be."""
        while name is not None:  # what was waited for may have made room for another
            version = self._version_of(name)
            if version in self._dropped and version not in self._by_name:
                await self._whole(self._come_back(version))
            elif (task := self._find(version).task) is not None:  # or of what has replaced it
                await asyncio.shield(task)
            else:
                return

    def ref(self, name: str | None, prompt: bytes = b"") -> AdapterRef | None:
        """What a request for this adapter carries, with a packed prompt; InvalidRequest if it is
        not loaded."""
        if name is None:
            return None
        adapter = self._find(self._version_of(name))
        if not adapter.digest:
            raise InvalidRequest(f"lora_path: {name!r:.80} is being loaded", "lora_path")
        adapter.used_s = time.monotonic()
        start = _last_place(adapter.invocation, prompt) if adapter.invocation else 0
        return AdapterRef(adapter.name, adapter.number, adapter.digest, start)

    def _find(self, name: str) -> Loaded:
        self._require_enabled(f"lora_path: {name!r:.80}")
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(self._by_name) or "none"
            raise InvalidRequest(
                f"lora_path: the adapter {name!r:.80} is not loaded (it has never been loaded, or "
                f"was unloaded); loaded: {known:.400}",
                "lora_path",
            )
        return found

    def _require_enabled(self, what: str) -> None:
        if not self.options.is_enabled:
            raise InvalidRequest(f"{what}: start the server with --enable-lora", "lora_path")

    def renew_digests(self, digests: Iterable[tuple[int, str]]) -> None:
        """Engines have made these adapters (number, digest) again for new base weights."""
        known = {one.number: one for one in (*self._by_name.values(), *self._leaving.values())}
        for number, digest in digests:
            if number in known:
                known[number].digest = digest

    # ---- loading ---------------------------------------------------------------------------

    async def load(
        self, name: str, path: str, is_pinned: bool = False, replaces: bool = False
    ) -> None:
        """Load an adapter; InvalidRequest if it cannot be. ``replaces``: a loaded one of this name
        serves its requests to their end, and new ones get this."""
        self._require_loads("load_lora_adapter")
        await self._whole(self._load(Loaded(name, path, is_pinned), replaces))

    async def load_bytes(
        self,
        name: str,
        config: dict[str, Any],
        tensors: bytes,
        is_pinned: bool = False,
        replaces: bool = False,
    ) -> None:
        """The same of adapter_config.json and the bytes of a safetensors file."""
        self._require_loads("load_lora_adapter_from_tensors")
        self._check(name, "tensors", is_pinned, replaces)
        spool = await asyncio.to_thread(Spool, config, tensors)
        adapter = Loaded(name, str(spool.path), is_pinned, spool=spool)
        await self._whole(self._load(adapter, replaces))

    def _require_loads(self, what: str) -> None:
        self._require_enabled(what)
        if self.options.is_shared:
            raise InvalidRequest(f"{what}: leave --tokenizer-worker-num at 1")

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it to its end, even if the caller leaves."""
        task = self._spawn(work)
        task.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.shield(task)

    async def _come_back(self, name: str) -> None:
        async with self._lock(name):
            dropped = self._dropped.get(name)
            if dropped is not None and name not in self._by_name:
                renewed = replace(dropped, number=next(self._numbers), digest="")
                await self._add(renewed, is_asked=True)

    async def _load(self, adapter: Loaded, replaces: bool) -> None:
        name = adapter.name
        self._check(name, adapter.path, adapter.is_pinned, replaces)
        async with self._lock(name):  # a load of this name may have ended
            self._check(name, adapter.path, adapter.is_pinned, replaces)
            adapter.number = next(self._numbers)
            if name not in self._by_name:
                await self._add(adapter)
                return
            await self._finish(adapter)
            old = self._by_name.get(name)  # that may have been dropped
            self._by_name[name] = adapter
            if old is not None:
                self._spawn(self._retire(old))

    def _lock(self, name: str) -> asyncio.Lock:
        """Held by the load that a name has at a time."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _add(self, adapter: Loaded, is_asked: bool = False) -> None:
        oldest = await self._find_room(is_asked)
        self._check(adapter.name, adapter.path, adapter.is_pinned, replaces=False)
        if oldest is not None:
            log.info("adapter %s is dropped for want of room", oldest.name)
            self.num_evicted += 1
            self._dropped[oldest.name] = self._by_name.pop(oldest.name)
        self._by_name[adapter.name] = adapter
        await self._finish(adapter, oldest)
        if adapter.name in self._by_name:  # else another has taken its room since
            self._dropped.pop(adapter.name, None)

    def _check(self, name: str, path: str, is_pinned: bool, replaces: bool) -> None:
        is_named = 0 < len(name) <= MAX_NAME and name.isprintable() and not name.startswith(":")
        if not is_named or name == self.options.served_name:
            raise InvalidRequest(
                f"lora_name: {name!r:.80} is no name of an adapter; what works: 1 to {MAX_NAME} "
                "visible characters that do not begin with a colon and are not the model's name",
                "lora_name",
            )
        if not path:
            raise InvalidRequest("lora_path: give the folder of the adapter", "lora_path")
        old = self._by_name.get(name)
        if old is not None and not replaces:
            raise InvalidRequest(
                f"lora_name: the adapter {name!r:.80} already exists: it is already loaded from "
                f"{old.source}; unload it first, or send load_inplace",
                "lora_name",
            )
        others = sum(one.is_pinned for one in self._by_name.values() if one is not old)
        most = self.options.max_pinned
        if is_pinned and most is not None and others + 1 > most:
            raise InvalidRequest(
                f"pinned: not allowed to pin all slots, to prevent starvation: {others} are "
                f"pinned, at most {most} may be (--max-loras-per-batch {most + 2} allows one more)",
                "pinned",
            )

    async def _find_room(self, is_asked: bool) -> Loaded | None:
        """The adapter that was used longest ago and has to go, None if there is room: an idle one;
        for one that a request asks for (``is_asked``), any. InvalidRequest if none can go."""
        most = self.options.max_loaded
        while most is not None and len(self._by_name) >= most:
            known = self._by_name.values()
            found = [one for one in known if not (one.is_pinned or one.task)]
            idle = [one for one in found if not self.num_users(one)]
            if idle or (found and is_asked):
                return min(idle or found, key=lambda one: one.used_s)
            pinned = [one.name for one in known if one.is_pinned]
            if not is_asked or len(pinned) == len(known):
                busy = [one.name for one in known if not one.is_pinned]
                raise InvalidRequest(
                    f"load_lora_adapter: {most} adapters are loaded (--max-loaded-loras), pinned: "
                    f"{', '.join(pinned) or 'none'}; busy: {', '.join(busy) or 'none'}"
                )
            await asyncio.sleep(USER_POLL_S)  # the others are being read
        return None

    async def _finish(self, adapter: Loaded, oldest: Loaded | None = None) -> None:
        """Wait until the adapter is read, even if the caller leaves. ``oldest`` goes before."""
        adapter.used_s = time.monotonic()
        self._reading[adapter.number] = adapter
        adapter.task = self._spawn(self._read(adapter, oldest))
        await asyncio.shield(adapter.task)

    async def _read(self, adapter: Loaded, oldest: Loaded | None) -> None:
        """By all engines, or by none."""
        wanted = Wanted("adapter", "lora_path", folder=self.options.download_dir)
        try:
            if oldest is not None:
                await self._retire(oldest)
            if adapter.spool is None and scheme_of(adapter.path) is not None:
                adapter.folder = str(await asyncio.to_thread(locate_model, adapter.path, wanted))
            facts = await self._read_once(adapter)
        except RadixError as error:
            self.num_failed += 1
            if self._by_name.get(adapter.name) is adapter:
                del self._by_name[adapter.name]
            await self._tell(UNLOAD, number=adapter.number)
            if isinstance(error, RequestError):
                raise
            raise InvalidRequest(str(error), "lora_path") from error
        finally:
            adapter.task = None
            self._reading.pop(adapter.number, None)
        self.num_loads += 1
        for observer in self._intake.observers:
            observer.adapter_loaded(facts["seconds"])
        adapter.digest, adapter.rank = facts["digest"], facts["rank"]
        adapter.num_bytes, adapter.invocation = facts["num_bytes"], tuple(facts["invocation"])
        self._known.pop(adapter.name, None)
        self._known[adapter.name] = None
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _read_once(self, adapter: Loaded) -> dict[str, Any]:
        try:
            replies = await self._intake.control_each(LOAD, **adapter.args)
        except Overloaded:  # the engine died: the next one reads it
            await self._intake.ready.wait()
            replies = await self._intake.control_each(LOAD, **adapter.args)
        if len({reply.result("lora_path")["digest"] for reply in replies}) > 1:
            raise InvalidRequest(f"{adapter.path}: the engines read different files", "lora_path")
        facts: dict[str, Any] = replies[0].data
        return facts

    async def unload(self, name: str) -> None:
        """Refuse new requests for the adapter at once, and wait until its last one is over.
        InvalidRequest if it is not loaded."""
        self._require_loads("unload_lora_adapter")
        async with self._lock(name):
            dropped = self._dropped.pop(name, None)
            adapter = self._by_name.get(name)
            if adapter is None and dropped is None:
                known = ", ".join(self._by_name) or "none"
                raise InvalidRequest(
                    f"lora_name: the adapter {name!r:.80} does not exist; loaded: {known:.400}",
                    "lora_name",
                )
            if adapter is not None and adapter.task is not None:
                await asyncio.shield(adapter.task)
            self._by_name.pop(name, None)
        if adapter is not None:
            await asyncio.shield(self._spawn(self._retire(adapter)))

    async def _retire(self, adapter: Loaded) -> None:
        """Wait for the users, then free the memory."""
        self._leaving[adapter.number] = adapter
        while self.num_users(adapter):
            await asyncio.sleep(USER_POLL_S)
        del self._leaving[adapter.number]
        await self._tell(UNLOAD, number=adapter.number)

    async def _tell(self, verb: str, **args: Any) -> None:
        try:
            await self._intake.control_each(verb, **args)
        except Overloaded:
            log.debug("no engine to tell: %s", verb)  # the next one will not know the adapter

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- engines ---------------------------------------------------------------------------

    def restore(self, replica: Replica) -> None:
        """An engine is ready: it gets the adapters, before it gets requests. The first one reads
        those of --lora-paths, and intake is ready after that."""
        loads = (*self._by_name.values(), *self._leaving.values(), *self._reading.values())
        known = {adapter.number: adapter for adapter in loads}
        # where adapters are shared none is unloaded, and requests of others use some already
        if self.options.is_enabled and not self.options.is_shared:
            kept = self._intake.ask(replica, KEEP, {"numbers": list(known)})
            kept.add_done_callback(lambda one: one.cancelled() or one.exception())
        for adapter in known.values():
            asked = self._intake.ask(replica, LOAD, adapter.args)
            task = self._spawn(self._confirm(adapter, asked, adapter.task))
            if adapter.task is None:
                adapter.task = task
        if self._start is None and self.options.initial:
            self._start = self._spawn(self._load_initial())
        elif self._start is None or self._start.done():
            self._intake.ready.set()

    async def _confirm(
        self,
        adapter: Loaded,
        asked: asyncio.Future[ControlReply],
        reading: asyncio.Task[None] | None,
    ) -> None:
        """An engine has read an adapter again, or later than others (``reading``). If its files
        have changed, new requests get what they hold now; requests that run with the old content
        fail."""
        try:
            reply = await asked
        except RadixError:  # that engine has died too
            return
        finally:
            if adapter.task is asyncio.current_task():
                adapter.task = None
        if reading is not None:
            await asyncio.wait([reading])
        is_same = reply.ok and reply.data["digest"] == adapter.digest
        if is_same or self._by_name.get(adapter.name) is not adapter:
            return
        log.warning("adapter %s after a restart: %s", adapter.name, reply.message)
        renewed = replace(adapter, number=next(self._numbers), digest="")
        self._by_name[adapter.name] = renewed
        try:
            await self._finish(renewed)
        except RadixError as error:
            log.warning("adapter %s is gone: %s", adapter.name, error)

    async def _load_initial(self) -> None:
        for name, path, is_pinned in self.options.initial:
            adapter = Loaded(name, path, is_pinned, next(self._numbers))
            self._by_name[name] = adapter
            try:
                await self._finish(adapter)
            except RadixError as error:
                self._intake.give_up(Failed("CheckpointError", f"--lora-paths {name}: {error}"))
                return
        self._intake.ready.set()


def _last_place(part: Sequence[int], prompt: bytes) -> int:
    """Which token of a packed prompt ``part`` begins at last; NEVER if it is not there."""
    wanted = pack_ids(part)
    at = prompt.rfind(wanted)
    while at > 0 and at % 4:
        at = prompt.rfind(wanted, 0, at + len(wanted) - 1)
    return at // 4 if at >= 0 and at % 4 == 0 else NEVER
