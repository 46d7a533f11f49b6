"""MemoryOccupation: which memory the engines have given back; intake tells new engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from radixlm.base.errors import InvalidRequest, Overloaded, RadixError
from radixlm.intake.replicas import Replica, Replicas
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import MEMORY_TAGS

_OTHER_NAMES = {"graphs": "cuda_graph"}


class Intake(Protocol):
    """What is needed of the TokenizerManager."""

    replicas: Replicas

    def ask(
        self, replica: Replica, verb: str, args: dict[str, Any]
    ) -> asyncio.Future[ControlReply]: ...


def read_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """The tags that a call names, in the order of ``MEMORY_TAGS``; all without any. InvalidRequest
    for an unknown one."""
    named = {_OTHER_NAMES.get(tag, tag) for tag in tags or MEMORY_TAGS}
    if unknown := sorted(named - set(MEMORY_TAGS)):
        raise InvalidRequest(
            f"tags: {unknown[0]!r:.80} is none of {', '.join(MEMORY_TAGS)}", param="tags"
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in named)


class MemoryOccupation:
    """``released``: tags whose memory an engine of this server has given back."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.released: tuple[str, ...] = ()
        self._restoring: set[int] = set()  # engines that have not yet released again

    async def release(self, tags: Sequence[str] | None = None) -> None:
        """Release on all engines. InvalidRequest while requests run, or without the flag."""
        named = read_tags(tags)
        await self._on_all("release_memory", named)
        self.released = _ordered({*self.released, *named})

    async def resume(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again on all engines; what was not released stays as it is."""
        named = read_tags(tags)
        await self._on_all("resume_memory", named)
        self.released = _ordered(set(self.released) - set(named))

    async def _on_all(self, verb: str, tags: tuple[str, ...]) -> None:
        """Without a limit of time: weights may take minutes to read."""
        ready = self._intake.replicas.ready
        if not ready:
            raise Overloaded("no engine serves yet", retry_after_s=2.0)
        asked = [self._intake.ask(replica, verb, {"tags": tags}) for replica in ready]
        replies = await asyncio.gather(*asked)
        if failed := [reply.message for reply in replies if not reply.ok]:
            raise InvalidRequest(failed[0])

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
