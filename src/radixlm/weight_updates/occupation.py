"""MemoryOccupation: which memory the engines have given back; intake tells new engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.base.errors import InvalidRequest, Overloaded, RadixError
from radixlm.intake.replicas import Replica
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import MEMORY_TAGS, WEIGHTS

if TYPE_CHECKING:
    from radixlm.intake.tokenizer_manager import TokenizerManager

# what /sleep does with requests: they are ended; run to their end; begin again after /wake_up
SLEEP_MODES = {"abort": "abort", "wait": "in_place", "keep": "retract"}
IDLE_POLL_S = 0.02
RESTART_S = 120.0  # how long a command waits for an engine that restarts
_OTHER_NAMES = {"graphs": "cuda_graph"}


def read_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """The tags that a call names, in the order of ``MEMORY_TAGS``; all without any. InvalidRequest
    for an unknown one."""
    named = {_OTHER_NAMES.get(tag, tag) for tag in (tags or MEMORY_TAGS)}
    if unknown := sorted(named - set(MEMORY_TAGS)):
        raise InvalidRequest(
            f"tags: {unknown[0]!r:.80} is none of {', '.join(MEMORY_TAGS)}", param="tags"
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in named)


class MemoryOccupation:
    """``released``: tags whose memory an engine of this server has given back."""

    def __init__(self, intake: TokenizerManager) -> None:
        self._intake = intake
        self.released: tuple[str, ...] = ()
        # weights that only an update brings back
        self.awaits_update = False
        self.is_open = asyncio.Event()  # whether new requests may come
        self.is_open.set()
        self._restoring: set[int] = set()  # engines that have not yet released again

    async def release(self, tags: Sequence[str] | None = None) -> None:
        """Release on all engines. InvalidRequest while requests run, or without the flag."""
        named = read_tags(tags)
        new = tuple(tag for tag in named if tag not in self.released)
        try:
            await self._on_all("release_memory", named)
        except InvalidRequest:
            if new and len(self._intake.replicas.ready) > 1:  # others may have released
                await self._on_all("resume_memory", new)
            raise
        self._note_now({*self.released, *named})

    async def resume(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again on all engines; what was not released stays as it is."""
        named = read_tags(tags)
        await self._on_all("resume_memory", named)
        self._note_now(set(self.released) - set(named))
        self.awaits_update = self.awaits_update and WEIGHTS not in named

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """vLLM's levels: 0 pauses; 1 releases all memory; from 2 only an update of the weights
        brings them back. ``mode``: of SLEEP_MODES."""
        if level not in (0, 1, 2):
            raise InvalidRequest(f"level: {level} is none of 0, 1, 2", param="level")
        if mode not in SLEEP_MODES:
            modes = ", ".join(SLEEP_MODES)
            raise InvalidRequest(f"mode: {mode!r:.80} is none of {modes}", param="mode")
        self.is_open.clear()
        try:
            # requests of a server that is paused, or has released memory, come to no end
            while mode == "wait" and self._intake.requests and not self.is_sleeping:
                await asyncio.sleep(IDLE_POLL_S)
            was_paused = self._intake.is_paused
            await self.pause(SLEEP_MODES[mode] if level else "in_place")
            if level == 0:
                return
            try:
                await self.release()
                self.awaits_update = level == 2
            finally:  # what is released holds requests, too
                if not was_paused:
                    await self.go_on()
        finally:
            self.is_open.set()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """The inverse; also of parts that ``tags`` name."""
        if self.released:
            left = [t for t in read_tags(tags) if t != WEIGHTS or not self.awaits_update]
            if left:
                await self.resume(left)
        elif self._intake.is_paused:
            await self.go_on()

    async def weights_came(self) -> None:
        """An update has brought weights, which may have been released."""
        if self.awaits_update:
            await self.resume((WEIGHTS,))

    @property
    def is_sleeping(self) -> bool:
        """Whether no request runs until ``wake_up``."""
        return bool(self.released) or self._intake.is_paused

    async def pause(self, mode: str) -> ControlReply:
        """Pause all engines; ``mode`` is one of PAUSE_MODES."""
        reply: ControlReply = await self._of_engines(
            lambda: self._intake.control("pause", mode=mode)
        )
        self._intake.is_paused = reply.ok or self._intake.is_paused
        return reply

    async def go_on(self) -> ControlReply:
        """The inverse."""
        reply: ControlReply = await self._of_engines(lambda: self._intake.control("continue"))
        self._intake.is_paused = self._intake.is_paused and not reply.ok
        return reply

    async def _on_all(self, verb: str, tags: tuple[str, ...]) -> None:
        """Without a limit of time: weights may take minutes to read."""

        async def ask() -> list[ControlReply]:
            ready = self._intake.replicas.ready
            return await asyncio.gather(
                *(self._intake.ask(replica, verb, {"tags": tags}) for replica in ready)
            )

        for reply in await self._of_engines(ask):
            reply.result()

    async def _of_engines(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What ``ask`` gives. Where an engine dies over it, or restarts, the next one is asked: a
        pause whose end is lost stops all requests. Overloaded after RESTART_S, or if there is none
        any more."""
        end_s = time.monotonic() + RESTART_S
        while True:
            await self.until_an_engine(end_s)
            try:
                return await ask()
            except Overloaded:
                if time.monotonic() > end_s or self._intake.failure is not None:
                    raise
            await asyncio.sleep(IDLE_POLL_S)

    async def until_an_engine(self, end_s: float | None = None) -> None:
        """Wait for an engine that restarts. Overloaded where none is ready by ``end_s`` (monotonic;
        RESTART_S from now), or none will be."""
        end_s = time.monotonic() + RESTART_S if end_s is None else end_s
        while not self._intake.replicas.ready:
            if time.monotonic() > end_s or self._intake.failure is not None:
                raise Overloaded("no engine serves yet", retry_after_s=2.0)
            await asyncio.sleep(IDLE_POLL_S)

    def _note_now(self, tags: set[str]) -> None:
        """All engines have answered; heartbeats of some may be older."""
        self.released = _ordered(tags)
        for replica in self._intake.replicas.ready:
            replica.load.released = self.released

    def restore(self, replica: Replica) -> None:
        """An engine is ready, with all of its memory: before it gets requests, it gives back what
        the one before it had."""
        if not self.released:
            return
        self._restoring.add(replica.index)
        asked = self._intake.ask(replica, "release_memory", {"tags": self.released})

        def done(asked: asyncio.Future[ControlReply]) -> None:
            self._restoring.discard(replica.index)
            if not asked.cancelled():
                with contextlib.suppress(RadixError):  # it has died too
                    asked.result()

        asked.add_done_callback(done)

    def note(self) -> None:
        """A heartbeat has come: another HTTP process may have released or resumed."""
        if not self._restoring:
            ready = self._intake.replicas.ready
            self.released = _ordered({tag for replica in ready for tag in replica.load.released})


def _ordered(tags: set[str]) -> tuple[str, ...]:
    return tuple(tag for tag in MEMORY_TAGS if tag in tags)
