"""WeightGroups: process groups in which trainers broadcast weights to this server.

The trainer is rank 0. The server's ranks are processes of their own (``weight_receiver.py``), one
for each rank of an engine, as trainers count them; the first one writes what it receives. Every
wait has a limit, after which the group is gone and can be made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record
from radixlm.engine.rank_processes import OPENMP_ENVIRONMENT
from radixlm.wire.tensors import TensorInfo

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "radixlm.engine.weight_receiver")
BACKENDS = ("gloo", "nccl")
SPARE_S = 20.0  # for a receiver to start, and to say why it gave up
END_S = 5.0
INIT = "init_weights_update_group"


class GroupPlace(Record):
    """Where a group meets: the trainer's address, the rank of this server's first receiver, and the
    number of all ranks. ``backend``: gloo or nccl, None for what the device has."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str | None = None


def read_place(
    master_address: str, master_port: Any, rank_offset: int, world_size: int, backend: str | None
) -> GroupPlace:
    """The place that a request names; its port may be a text. InvalidRequest."""
    try:
        port = int(master_port)
    except (TypeError, ValueError):
        raise InvalidRequest("master_port: a port from 1 to 65535", "master_port") from None
    return GroupPlace(master_address, port, rank_offset, world_size, backend)


class _Group:
    """The receivers of one group, rank by rank. ``is_met``: they have met the trainer."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        self.is_met = False
        self.lock = asyncio.Lock()

    async def ask(self, commands: Sequence[dict[str, Any]], timeout_s: float) -> str:
        """Why one of them has failed, "" if none has."""
        calls = [
            asyncio.ensure_future(_ask(process, command))
            for process, command in zip(self.processes, commands, strict=True)
        ]
        done, late = await asyncio.wait(
            calls, timeout=timeout_s + SPARE_S, return_when=asyncio.FIRST_EXCEPTION
        )
        problems = [str(call.exception()) for call in done if call.exception()]
        for call in late:
            call.cancel()
        return problems[0] if problems else f"no end after {timeout_s:g} s" if late else ""

    async def end(self) -> None:
        """Kill the receivers, and wait for their end."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        waits = [asyncio.ensure_future(process.wait()) for process in self.processes]
        if waits:
            await asyncio.wait(waits, timeout=END_S)


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**OPENMP_ENVIRONMENT, **os.environ},
        start_new_session=True,
    )


async def _ask(process: asyncio.subprocess.Process, command: dict[str, Any]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(json.dumps(command).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    answer = json.loads(line) if line else {"message": "the receiver has died"}
    if answer["message"]:
        raise InvalidRequest(answer["message"])


class WeightGroups:
    """The groups of one server, by name."""

    def __init__(self, num_ranks: int, timeout_s: float, has_gpu: bool = False) -> None:
        """``num_ranks``: of one engine; ``timeout_s``: the limit of each wait for the trainer."""
        self._num_ranks, self._timeout_s, self._has_gpu = num_ranks, timeout_s, has_gpu
        self._groups: dict[str, _Group] = {}

    async def join(self, name: str, place: GroupPlace) -> None:
        """Meet the trainer in a new group. InvalidRequest if that fails."""
        self._check(name, place)
        backend = place.backend or ("nccl" if self._has_gpu else "gloo")
        group = self._groups[name] = _Group()  # at once: a second call of this name is refused
        try:
            for _ in range(self._num_ranks):
                group.processes.append(await _start())
        except BaseException:
            await self._forget(name, group)
            raise
        common = {"verb": "join", "group_name": name, "timeout_s": self._timeout_s}
        common |= {"master_address": place.master_address, "master_port": place.master_port}
        common |= {"world_size": place.world_size, "backend": backend}
        commands = [
            {**common, "rank": place.rank_offset + rank, "device": rank}
            for rank in range(self._num_ranks)
        ]
        await self._ask(name, group, commands, "cannot be joined")
        group.is_met = True
        last = place.rank_offset + self._num_ranks - 1
        log.info("ranks %d to %d of the group %r are met", place.rank_offset, last, name)

    def _check(self, name: str, place: GroupPlace) -> None:
        last = place.rank_offset + self._num_ranks - 1
        if not name or name in self._groups:
            state = "exists: destroy_weights_update_group it first" if name else "needs a name"
            raise InvalidRequest(f"group_name: the group {name!r:.80} {state}", "group_name")
        if place.backend not in (None, *BACKENDS):
            raise InvalidRequest(f"backend: one of {', '.join(BACKENDS)}", "backend")
        if place.backend == "nccl" and not self._has_gpu:
            raise InvalidRequest("backend: 'nccl' needs GPUs; here 'gloo' works", "backend")
        if not 0 < place.master_port < 65536:
            raise InvalidRequest("master_port: a port from 1 to 65535", "master_port")
        if place.rank_offset < 1 or place.world_size <= last:
            raise InvalidRequest(
                f"world_size: the trainer is rank 0, the {self._num_ranks} ranks of this server "
                f"are {place.rank_offset} to {last}; what works: rank_offset 1 and world_size "
                f"{1 + self._num_ranks}, for one trainer and one server",
                "world_size",
            )

    async def receive(
        self, name: str, tensors: Sequence[TensorInfo], path: Path, is_bucket: bool = False
    ) -> None:
        """Receive tensors into the safetensors file ``path``; InvalidRequest if the trainer stops,
        after which the group is gone."""
        group = self._groups.get(name)
        if group is None or not group.is_met:
            known = ", ".join(n for n, one in self._groups.items() if one.is_met) or "none"
            raise InvalidRequest(
                f"group_name: no group {name!r:.80} (groups: {known:.200}); call {INIT} first",
                "group_name",
            )
        common = {"verb": "receive", "is_bucket": is_bucket, "path": None}
        common["tensors"] = [(one.name, one.dtype, one.shape) for one in tensors]
        commands = [{**common, "path": str(path)}, *[common] * (self._num_ranks - 1)]
        try:
            await self._ask(name, group, commands, "broke down")
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    async def _ask(
        self, name: str, group: _Group, commands: Sequence[dict[str, Any]], what: str
    ) -> None:
        problem = "the call was given up"
        try:
            async with group.lock:
                problem = await group.ask(commands, self._timeout_s)
        finally:
            if problem:
                await self._forget(name, group)
        if problem:
            raise InvalidRequest(
                f"the group {name!r:.80} {what}: {problem}; the weights have not changed, make the "
                f"group anew with {INIT}"
            )

    async def _forget(self, name: str, group: _Group) -> None:
        if self._groups.get(name) is group:
            del self._groups[name]
        await asyncio.shield(group.end())

    async def leave(self, name: str) -> None:
        """End a group; InvalidRequest if there is none of this name."""
        group = self._groups.pop(name, None)
        if group is None:
            raise InvalidRequest(f"group_name: there is no group {name!r:.80}", "group_name")
        await group.end()

    async def close(self) -> None:
        while self._groups:
            await self._groups.popitem()[1].end()
