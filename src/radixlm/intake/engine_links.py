"""EngineLinks: the engines behind one intake, and operators' commands to them."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from radixlm.base.errors import Overloaded
from radixlm.intake.replicas import Replica, Replicas
from radixlm.wire.link import Link
from radixlm.wire.replies import ControlReply, LoadReport
from radixlm.wire.requests import Control

CONTROL_TIMEOUT_S = 120.0


class EngineLinks:
    """Knows what the engines report, and asks them. Use inside one event loop."""

    def __init__(self, links: Sequence[Link], method: str) -> None:
        self.replicas = Replicas(links, method)
        self._is_paused = False
        self._calls: dict[str, tuple[Replica, asyncio.Future[ControlReply]]] = {}

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused the engines."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        """All engines have answered; their last heartbeats may be older."""
        self._is_paused = is_paused
        for replica in self.replicas.ready:
            replica.load.is_paused = is_paused

    def note_paused(self) -> None:
        """A heartbeat has come: another HTTP process may have paused the engines."""
        self._is_paused = any(replica.load.is_paused for replica in self.replicas.ready)

    @property
    def load(self) -> LoadReport:
        """The load of all replicas together."""
        return self.replicas.load()

    @property
    def engine_facts(self) -> dict[str, Any]:
        """The facts of the first engine that has sent some."""
        return next((r.facts for r in self.replicas if r.facts), {})

    @property
    def beat_s(self) -> float:
        """When the last heartbeat of an engine came."""
        return max(replica.beat_s for replica in self.replicas)

    async def control(self, verb: str, **args: Any) -> ControlReply:
        """Ask the scheduler or the executor; Overloaded while no engine answers. Of several
        replicas all are asked: the first that refuses answers for them, else the first."""
        replies = await self.control_each(verb, **args)
        return next((reply for reply in replies if not reply.ok), replies[0])

    async def control_each(self, verb: str, **args: Any) -> list[ControlReply]:
        """The answers of all replicas that serve, in order; Overloaded if one does not answer."""
        ready = self.replicas.ready
        if not ready:
            raise Overloaded("no engine serves yet", retry_after_s=2.0)
        calls = [self.ask(replica, verb, args) for replica in ready]
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), CONTROL_TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded(f"the engine did not answer {verb!r}", retry_after_s=5.0) from error
        finally:
            for call in calls:
                call.cancel()

    def ask(
        self, replica: Replica, verb: str, args: dict[str, Any]
    ) -> asyncio.Future[ControlReply]:
        """Send a command to one engine; its answer to come. Overloaded if the engine dies."""
        call_id = secrets.token_hex(8)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (replica, future)
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        replica.link.send(Control(call_id, verb, args))
        return future

    def answered(self, reply: ControlReply) -> None:
        """An engine has answered a command."""
        _, future = self._calls.get(reply.call_id, (None, None))
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_calls(self, error: Overloaded, replica: Replica | None = None) -> None:
        """Nobody answers any more, or this replica does not."""
        for asked, future in list(self._calls.values()):
            if not future.done() and replica in (None, asked):
                future.set_exception(error)
