"""WeightsRegistry: which weights all engines serve. Intake owns it, since it outlives engines.

An update is prepared by every engine beside the weights that it serves. Once all have answered,
the registry changes; then each engine publishes between two steps. An engine that starts gets what
the registry holds, so that none serves anything else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from radixlm.base.errors import InvalidRequest, Overloaded, RadixError
from radixlm.base.record import Record
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.wire.replies import ControlReply
from radixlm.wire.tensors import read_header
from radixlm.wire.weights import WeightsSource

if TYPE_CHECKING:  # it owns this registry
    from radixlm.intake.replicas import Replica
    from radixlm.intake.tokenizer_manager import TokenizerManager

log = logging.getLogger(__name__)

PREPARE, PUBLISH, DROP = "prepare_weights", "publish_weights", "drop_weights"
# what happens to requests that run: they end first; are ended; are computed again under the new
# weights; go on with the keys and values that they have
MODES = ("wait", "abort", "retract", "in_place")
_FILE_FORMATS = ("safetensors", "pt", "npcache", "gguf", "sharded_state")
MAX_READ_S = 3600.0  # for engines that read a large checkpoint
POLL_S = 0.01
MAX_ATTEMPTS = 3  # of an update between whose phases engines begin or die


class WeightsOptions(Record):
    """What intake knows when it starts: the label of the weights, and where they come from.
    ``is_shared``: several HTTP processes share the engines."""

    version: str = "default"
    folder: str = ""
    load_format: str = "auto"
    is_shared: bool = False


class WeightsUpdate(Record):
    """A change of the weights. ``folder``: a checkpoint, or with ``is_partial`` safetensors files
    of some of its tensors, which the registry deletes. ``version``: the new label, None
    for the same. ``flush``: forget cached pages, which no request can use any more.
    ``model_path``: the checkpoint as the client has written it; ``token_step``: the trainer's step,
    which /get_server_info tells."""

    folder: str
    load_format: str | None = None
    is_partial: bool = False
    version: str | None = None
    mode: str = "wait"
    flush: bool = True
    keeps_pause: bool = False
    model_path: str | None = None
    token_step: int | None = None


class WeightsOutcome(Record):
    """``num_paused``: requests that the change interrupted. ``retry_after_s``: of a failure that is
    not the update's, such as an engine that does not come back."""

    is_ok: bool
    message: str
    num_paused: int = 0
    retry_after_s: float | None = None


class WeightsRegistry:
    """``version`` is the label that answers carry; ``source`` what came after the start."""

    def __init__(self, intake: TokenizerManager, options: WeightsOptions) -> None:
        self._intake, self.options = intake, options
        self.version = options.version
        self.source: WeightsSource | None = None
        self.model_path: str | None = None  # of the last update from disk
        self.num_updates = self.num_failed = 0
        self.token_step: int | None = None
        self._lock = asyncio.Lock()
        self._open = asyncio.Event()  # whether new requests may come
        self._open.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spool: TensorSpool | None = None  # of the partial updates so far

    def facts(self) -> dict[str, Any]:
        """What /get_server_info tells of the weights."""
        return {
            "version": self.version,
            "token_step": self.token_step,
            "num_updates": self.num_updates,
            "num_failed_updates": self.num_failed,
        }

    def startup(self) -> dict[str, Any] | None:
        """What an engine that starts serves in place of its checkpoint."""
        return None if self.source is None else msgspec.to_builtins(self.source)

    async def admit(self) -> None:
        """Wait while an update lets no new request in."""
        await self._open.wait()

    # ---- updates ---------------------------------------------------------------------------

    def check(self, update: WeightsUpdate) -> None:
        """InvalidRequest for what cannot be asked, whatever the files are."""
        if self.options.is_shared:
            raise InvalidRequest("update_weights: leave --tokenizer-worker-num at 1")
        if update.mode not in MODES:
            raise InvalidRequest(f"mode: {update.mode!r:.40} is none of {', '.join(MODES)}", "mode")

    async def update(self, update: WeightsUpdate) -> WeightsOutcome:
        """Change the weights of all engines, or of none, even if the caller leaves. InvalidRequest
        for what cannot be asked; an outcome that is not ok leaves the old weights."""
        self.check(update)
        task = asyncio.ensure_future(self._update(update))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _update(self, update: WeightsUpdate) -> WeightsOutcome:
        async with self._lock:
            spool = None
            try:
                if update.is_partial:
                    folders = self.source.deltas if self.source else ()
                    spool = await asyncio.to_thread(_merged, (*folders, update.folder))
                outcome = await self._run_settled(update, spool)
            except (RadixError, OSError) as error:
                again_s = error.retry_after_s if isinstance(error, Overloaded) else None
                outcome = WeightsOutcome(False, str(error), retry_after_s=again_s)
            finally:
                self._open.set()
                if update.is_partial:
                    await asyncio.to_thread(shutil.rmtree, update.folder, ignore_errors=True)
            self.num_updates += outcome.is_ok
            if outcome.is_ok and update.token_step is not None:
                self.token_step = update.token_step
            self.num_failed += not outcome.is_ok
            if not outcome.is_ok:
                log.warning("weights not updated: %s", outcome.message)
            served = self.source.deltas if self.source else ()
            spools = {one for one in (self._spool, spool) if one is not None}
            self._spool = next((one for one in spools if str(one.path) in served), None)
            for done in spools - {self._spool}:
                await asyncio.to_thread(done.delete)
            if outcome.is_ok:
                await self._intake.occupation.weights_came()
            return outcome

    async def _run_settled(
        self, update: WeightsUpdate, spool: TensorSpool | None
    ) -> WeightsOutcome:
        """As ``_run``, once an engine serves; again where one died, or, such as a replica that
        starts late, came between."""
        for _ in range(MAX_ATTEMPTS - 1):
            await self._intake.occupation.until_an_engine()
            try:
                return await self._run(update, spool)
            except Overloaded as error:
                log.info("weights are read again: %s", error)
                self._open.set()
        await self._intake.occupation.until_an_engine()
        return await self._run(update, spool)

    async def _run(self, update: WeightsUpdate, spool: TensorSpool | None) -> WeightsOutcome:
        intake, source = self._intake, self._wanted(update, spool)
        engines = [(replica, replica.facts) for replica in intake.replicas.ready]
        ready = [replica for replica, _ in engines]
        args = {
            "source": msgspec.to_builtins(source),
            "partial": _contents(update.folder) if update.is_partial else None,
        }
        try:
            replies = await self._ask(ready, PREPARE, args)
            digests = [reply.result()["digest"] for reply in replies]
            source = msgspec.structs.replace(source, digest=digests[0])
            if any(digest != source.digest for digest in digests):
                raise InvalidRequest("the engines have read different files; update again")
            log.info("the weights of %s are ready beside those that are served", update.folder)
            await self._quiesce(update.mode)
            now = [(replica, replica.facts) for replica in intake.replicas.ready]
            before_ids, now_ids = ([(id(a), id(b)) for a, b in pairs] for pairs in (engines, now))
            if before_ids != now_ids:
                why = "an engine died or began before the weights were exchanged"
                raise Overloaded(f"{why}; update again", retry_after_s=2.0)
        except RadixError:
            await self._drop([one for one in ready if one.is_ready])
            raise
        before, self.source = self.version, source  # from here on engines start with the new ones
        self.version = before if update.version is None else update.version
        self.model_path = update.model_path or self.model_path
        # what /pause_generation left running keeps its KV cache, as there
        keeps = update.mode == "in_place" or (update.mode == "wait" and intake.is_paused)
        publish = {"digest": source.digest, "keeps_kv": keeps, "flush": update.flush}
        replies = await self._ask(ready, PUBLISH, publish, is_tolerant=True)
        if failed := next((reply.message for reply in replies if not reply.ok), None):
            log.error("an engine has not taken the new weights: %s", failed)
            why = f"not all engines have taken version {self.version}: {failed}; update again"
            return WeightsOutcome(False, why)
        dead = len(ready) - len(replies)
        num_paused = sum(reply.data["num_paused"] for reply in replies if reply.ok)
        message = f"Succeeded to update model weights (version {self.version})."
        if update.keeps_pause:
            try:
                paused = await intake.control("pause", mode="in_place")
                intake.is_paused = paused.ok or intake.is_paused
            except RadixError as error:  # the weights have changed all the same
                message += f" The server could not be paused: {error}."
        if dead:
            message += f" {dead} engines died meanwhile and start with the new weights."
        log.info("weights updated: version %s, digest %s", self.version, source.digest[:8])
        return WeightsOutcome(True, message, num_paused)

    def _wanted(self, update: WeightsUpdate, spool: TensorSpool | None) -> WeightsSource:
        own = self.options.load_format  # of random or remote weights it says nothing of others
        load_format = update.load_format or (own if own in _FILE_FORMATS else "auto")
        if spool is None:
            return WeightsSource(update.folder, load_format)
        base = self.source or WeightsSource(self.options.folder, self.options.load_format)
        return msgspec.structs.replace(base, deltas=(str(spool.path),), digest="")

    async def _quiesce(self, mode: str) -> None:
        """Bring requests to where the weights may change."""
        intake = self._intake
        if mode in ("retract", "in_place"):
            return
        self._open.clear()
        if mode == "abort":
            intake.abort_all("the weights change")
        while intake.requests and not (intake.is_paused or intake.occupation.released):
            await asyncio.sleep(POLL_S)

    async def _ask(
        self,
        replicas: Sequence[Replica],
        verb: str,
        args: dict[str, Any],
        is_tolerant: bool = False,
    ) -> list[ControlReply]:
        """The answers of all; with ``is_tolerant`` of those that live."""
        calls = [self._intake.ask(replica, verb, args) for replica in replicas]
        try:
            found = await asyncio.wait_for(
                asyncio.gather(*calls, return_exceptions=True), MAX_READ_S
            )
        except TimeoutError as error:
            raise Overloaded(f"an engine did not answer {verb!r}", retry_after_s=5.0) from error
        finally:
            for call in calls:
                call.cancel()
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors and not is_tolerant:
            raise errors[0]
        return [one for one in found if not isinstance(one, BaseException)]

    async def _drop(self, replicas: Sequence[Replica]) -> None:
        await self._ask(replicas, DROP, {}, is_tolerant=True)

    def relabel(self, version: str) -> None:
        """Call the weights that are served by another name."""
        self.version = version
        for replica in self._intake.replicas:
            replica.version = version

    # ---- engines ---------------------------------------------------------------------------

    def note(self, replica: Replica, reply: ControlReply) -> None:
        """An engine has answered a command: what it sends from then on may be of other weights."""
        if reply.ok and isinstance(reply.data, dict) and "namespace" in reply.data:
            replica.version = self.version
            self._intake.adapters.renew_digests(reply.data.get("adapters", ()))

    def is_current(self, facts: dict[str, Any]) -> bool:
        """Whether an engine that is ready serves what all are to serve."""
        served, wanted = facts.get("weights", ""), self.source.digest if self.source else ""
        return bool(served == wanted)

    def served_by(self, replica: Replica) -> None:
        """An engine that is ready serves them."""
        replica.version = self.version
        if self.source is not None:
            log.info("engine %d serves the weights of version %s", replica.index, self.version)

    def bring(self, replica: Replica, facts: dict[str, Any]) -> None:
        """Have an engine that began before the last update serve what the others do, before it
        gets requests."""
        task = asyncio.ensure_future(self._bring(replica, facts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, replica: Replica, facts: dict[str, Any]) -> None:
        source = self.source
        assert source is not None
        args = {"source": msgspec.to_builtins(msgspec.structs.replace(source, digest=""))}
        log.info(
            "engine %d starts with other weights: it gets version %s", replica.index, self.version
        )
        try:
            (prepared,) = await self._ask([replica], PREPARE, args)
            digest = prepared.result()["digest"]
            publish = {"digest": digest, "keeps_kv": False, "flush": True}
            (published,) = await self._ask([replica], PUBLISH, publish)
            published.result()
        except RadixError as error:
            log.error("engine %d cannot serve version %s: %s", replica.index, self.version, error)
            return
        if digest != source.digest and self.source is source:
            log.warning("the files of version %s have changed since it was loaded", self.version)
            self.source = msgspec.structs.replace(source, digest=digest)
        self._intake.become_ready({**facts, "weights": digest}, replica.index)


def _contents(folder: str) -> dict[str, Any]:
    """What is in the files of a partial update."""
    files = sorted(Path(folder).glob("*.safetensors"))
    names = [name for file in files for name in read_header(file)[0]]
    return {"names": names, "num_bytes": sum(file.stat().st_size for file in files)}


def _merged(folders: Sequence[str]) -> TensorSpool:
    """All files of partial updates as one, of which later tensors replace earlier ones."""
    spool = TensorSpool()
    for folder in folders:
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise InvalidRequest(f"{folder} holds no weights (*.safetensors)")
        for file in files:
            fresh = spool.new_file()
            try:
                os.link(file, fresh)
            except OSError:  # another file system
                shutil.copyfile(file, fresh)
            spool.take(fresh)
    spool.settle()
    return spool
