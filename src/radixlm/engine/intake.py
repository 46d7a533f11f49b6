"""ServerIntake: intake with the features that outlive its engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixlm.base.record import Record
from radixlm.continuation.stream_journal import StreamJournal, current_journal
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.observer import Observer
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.lora.registry import AdapterOptions, AdapterRegistry
from radixlm.text.tokenizer import Tokenizer
from radixlm.weight_updates.occupation import MemoryOccupation
from radixlm.weight_updates.registry import WeightsOptions, WeightsRegistry
from radixlm.wire.link import Link


class RegistryOptions(Record):
    """What the registries know when the server starts."""

    adapters: AdapterOptions = AdapterOptions()
    weights: WeightsOptions = WeightsOptions()


DEFAULTS = RegistryOptions()


class ServerIntake(TokenizerManager):
    """``adapters``, ``weights`` and ``occupation`` tell new engines what the old ones knew."""

    adapters: AdapterRegistry
    weights: WeightsRegistry
    occupation: MemoryOccupation

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        facts: IntakeFacts,
        link: Link | Sequence[Link],
        observers: Iterable[Observer] = (),
        method: str = "round_robin",
        options: RegistryOptions = DEFAULTS,
    ) -> None:
        super().__init__(tokenizer, facts, link, observers, method)
        self.occupation = MemoryOccupation(self)
        self.adapters = AdapterRegistry(self, options.adapters)
        self.weights = WeightsRegistry(self, options.weights)

    @property
    def journal(self) -> StreamJournal | None:
        return current_journal()
