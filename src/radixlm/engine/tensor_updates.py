"""TensorUpdates: updates of the weights whose tensors come from a program that trains them.

Tensors are written to files of a folder first; from there on an update is the same as from disk.
Between ``begin`` and ``end`` the tensors of all calls are kept and become one update.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from radixlm.base.env import WEIGHT_GROUP_TIMEOUT_S
from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.engine.intake import ServerIntake
from radixlm.engine.weight_groups import WeightGroups
from radixlm.intake.replicas import Replica
from radixlm.weight_updates.registry import WeightsOutcome, WeightsUpdate
from radixlm.weight_updates.tensor_spool import TensorSpool, check_format
from radixlm.wire.tensors import TensorInfo, tensor_info

Fill = Callable[[TensorSpool], Awaitable[None]]
SELECTORS = ("all", "target")
LOADER_S = 600.0
CHECK_S = 3600.0  # for engines that read a large checkpoint


class TensorUpdates:
    """Of one server. Its methods raise InvalidRequest for what cannot be asked, and OSError where
    the disk is full; the old weights stay."""

    def __init__(self, config: ServerConfig, intake: ServerIntake) -> None:
        p = config.parallel
        self.groups = WeightGroups(
            p.tp_size * p.pp_size, WEIGHT_GROUP_TIMEOUT_S.get(), config.execute.device == "cuda"
        )
        self._intake, self._registry = intake, intake.weights
        self._loaders = config.model.custom_weight_loader or ()
        self._session: TensorSpool | None = None
        self._asked = WeightsUpdate("", is_partial=True)  # of the session, but the folder

    async def update(
        self, fill: Fill, options: WeightsUpdate, load_format: str | None = None
    ) -> WeightsOutcome:
        """Replace the tensors that ``fill`` writes, or what the custom loader ``load_format`` makes
        of them; ``options`` but for the folder."""
        check_format(load_format, self._loaders)
        self._registry.check(options)
        if load_format is not None and load_format in self._loaders:
            fill = _converted(fill, load_format)
        session, spool = self._session, TensorSpool()
        await fill(spool)  # a session gets the tensors of a call whole, or none of them
        if session is None:
            return await self._apply(spool, options)
        if session is not self._session:
            raise InvalidRequest(
                "end_weight_update came before these tensors were there: send them again"
            )
        session.adopt(spool)
        version = self._asked.version if options.version is None else options.version
        self._asked = replace(options, version=version)
        return WeightsOutcome(True, "kept: end_weight_update makes the update")

    async def receive(
        self,
        group: str,
        tensors: Sequence[TensorInfo],
        options: WeightsUpdate,
        load_format: str | None = None,
    ) -> WeightsOutcome:
        """Replace tensors by what the trainer of a group broadcasts, one by one or, with the
        format "flattened_bucket", all in one."""
        if load_format not in (None, "flattened_bucket"):
            raise InvalidRequest('load_format: null or "flattened_bucket"', "load_format")
        if not tensors:
            raise InvalidRequest("names: name at least one tensor", "names")

        async def fill(spool: TensorSpool) -> None:
            path = spool.new_file()
            await self.groups.receive(group, tensors, path, load_format is not None)
            await asyncio.to_thread(spool.take, path)

        return await self.update(fill, options)

    async def _apply(self, spool: TensorSpool, options: WeightsUpdate) -> WeightsOutcome:
        folder = await asyncio.to_thread(spool.hand_over)
        return await self._registry.update(replace(options, folder=str(folder), is_partial=True))

    async def begin(self, selector: str = "all") -> None:
        """Keep the tensors of the calls that follow."""
        if selector not in SELECTORS:
            raise InvalidRequest(f"selector: one of {', '.join(SELECTORS)}", "selector")
        if self._session is not None:
            raise InvalidRequest(
                "a weight update is already open: end_weight_update makes it, or with "
                '"discard": true drops it'
            )
        self._session, self._asked = TensorSpool(), WeightsUpdate("")

    async def end(self, options: WeightsUpdate, discard: bool = False) -> WeightsOutcome:
        """Make one update of all that was kept, or forget it. What ``options`` leaves open is as
        the last call has asked."""
        self._registry.check(options)
        spool, self._session = self._session, None
        if spool is None:
            raise InvalidRequest("no weight update is open: call begin_weight_update first")
        if discard or spool.is_empty:
            await asyncio.to_thread(spool.delete)
            return WeightsOutcome(True, "no tensors were kept" if not discard else "dropped")
        version = self._asked.version if options.version is None else options.version
        mode = self._asked.mode if options.mode == "wait" else options.mode
        return await self._apply(spool, replace(options, version=version, mode=mode))

    async def check(self, action: str, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What each replica's ``check_weights`` answers; InvalidRequest."""
        args = {"action": action, "skip": list(skip)}
        return await self._ask(self._intake.replicas.ready, "check_weights", args)

    async def save(self, path: str, pattern: str | None, max_size: int | None) -> None:
        """Let the first replica write what it serves (``sharded_save.py``); InvalidRequest."""
        args = {"path": path, "pattern": pattern, "max_size": max_size}
        await self._ask(self._intake.replicas.ready[:1], "save_sharded_model", args)

    async def _ask(self, replicas: Sequence[Replica], verb: str, args: dict[str, Any]) -> list[Any]:
        calls = [self._intake.ask(replica, verb, args) for replica in replicas]
        try:
            replies = await asyncio.wait_for(asyncio.gather(*calls), CHECK_S)
        except TimeoutError:
            raise Overloaded("the weights were not read in time", retry_after_s=60.0) from None
        if not replies:
            raise Overloaded("no engine serves yet", retry_after_s=2.0)
        return [reply.result() for reply in replies]


def _converted(fill: Fill, loader: str) -> Fill:
    """``fill`` with its tensors turned into others by ``loader``."""

    async def converted(spool: TensorSpool) -> None:
        given, path = TensorSpool(), spool.new_file()
        try:
            await fill(given)
            await _run_loader(loader, await asyncio.to_thread(given.settle), path)
            await asyncio.to_thread(spool.take, path)
        finally:
            given.delete()

    return converted


async def _run_loader(loader: str, folder: Path, path: Path) -> None:
    """Have ``loader`` write ``path`` from the tensors of ``folder``; InvalidRequest if it fails."""
    words = (sys.executable, "-m", "radixlm.weights.custom_loader", loader, folder, path)
    child = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await asyncio.wait_for(child.communicate(), LOADER_S)
    except TimeoutError:
        raise InvalidRequest(f"load_format: {loader} took over {LOADER_S:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidRequest(f"load_format: {loader}: {last:.1000}", "load_format")


def read_infos(names: Any, dtypes: Any, shapes: Any) -> list[TensorInfo]:
    """The tensors that three lists of a request describe; InvalidRequest."""
    if not len(names) == len(dtypes) == len(shapes) == len(set(names)):
        raise InvalidRequest(
            "names, dtypes and shapes need one entry for each tensor, and each name once", "names"
        )
    try:
        triples = zip(names, dtypes, shapes, strict=True)
        return [tensor_info(name, dtype, list(shape)) for name, dtype, shape in triples]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"names: {error}", "names") from error
