"""What intake asks of features that outlive the engines: ``engine/intake.py`` attaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.replicas import Replica
from radixlm.intake.request_state import RequestState, Rows
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import AdapterRef, StreamingWindow, TokenizedRequest


class Adapters(Protocol):
    """The adapters of a server by name."""

    async def prepare(self, name: str | None) -> None:
        """Wait until the adapter is loaded. InvalidRequest if it is not known or cannot be."""

    def ref(self, name: str | None, prompt: bytes = b"") -> AdapterRef | None:
        """What a request for this adapter carries, with a packed prompt; InvalidRequest if it is
        not loaded."""

    def restore(self, replica: Replica) -> None:
        """An engine is ready: it gets the adapters, before it gets requests. Intake is ready when
        those of the start are loaded."""

    def renew_digests(self, digests: Iterable[tuple[int, str]]) -> None:
        """Engines have made these adapters (number, digest) again for new base weights."""


class Weights(Protocol):
    """Which weights all engines serve."""

    version: str

    async def admit(self) -> None:
        """Wait while an update lets no new request in."""

    def note(self, replica: Replica, reply: ControlReply) -> None:
        """An engine has answered a command: what it sends from then on may be of other weights."""

    def is_current(self, facts: dict[str, Any]) -> bool:
        """Whether an engine that is ready serves what all are to serve."""

    def served_by(self, replica: Replica) -> None:
        """An engine that is ready serves them."""

    def bring(self, replica: Replica, facts: dict[str, Any]) -> None:
        """Have an engine serve what the others do, before it gets requests."""


class Occupation(Protocol):
    """Which memory the engines have given back."""

    released: tuple[str, ...]
    is_open: asyncio.Event  # whether new requests may come

    def restore(self, replica: Replica) -> None:
        """An engine is ready: before it gets requests, it gives back what the last one had."""

    def note(self) -> None:
        """A heartbeat has come: another HTTP process may have released or resumed."""

    async def weights_came(self) -> None:
        """An update has brought weights, which may have been released."""

    async def until_an_engine(self) -> None:
        """Wait for an engine that restarts; Overloaded if none comes."""


class Outputs(Protocol):
    """What requests get besides text."""

    def check(
        self, facts: IntakeFacts, request: GenerateRequest, num_prompt: int, count: int
    ) -> int:
        """How many new tokens, ``count`` at most, may have what a request wants; InvalidRequest."""

    def rows(self, wire: TokenizedRequest, routed_from: int, facts: IntakeFacts) -> Rows | None:
        """What a sample of a request needs for what each of its tokens has; None if it wants
        nothing. ``routed_from``: the first token whose experts are wanted."""


Preload = Callable[[Sequence[RequestState], Sequence[int], int], None]
"""Give samples output that their client has, of a vocabulary; InvalidRequest if none may follow."""


WindowOf = Callable[[IntakeFacts, GenerateRequest], StreamingWindow | None]
"""The streaming window of a request, if it has one; InvalidRequest if it can have none."""


class Share(Protocol):
    """One request of a call whose answer may go on elsewhere, or has begun there."""

    @property
    def is_resumed(self) -> bool:
        """Whether the call began elsewhere, be it with other requests."""

    def begin(self, states: Sequence[RequestState], vocab: int) -> None:
        """Give the samples what they had elsewhere, and record what comes next."""

    def replayed(self, states: Sequence[RequestState]) -> AsyncIterator[Output]:
        """The Outputs of the records; then all that come may follow."""

    def note(self, state: RequestState) -> None:
        """Record what the Output was made of that ``state`` has just given."""


class Journal(Protocol):
    """Of the running call."""

    @property
    def is_resumed(self) -> bool: ...

    def share(self, request: GenerateRequest) -> Share:
        """The share of the next request of the call."""
