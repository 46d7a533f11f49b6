"""ServerIntake: intake with the features that outlive its engines."""

from __future__ import annotations

from radixlm.base.record import Record
from radixlm.continuation.resume import preload
from radixlm.continuation.stream_journal import StreamJournal, current_journal
from radixlm.continuation.streaming import streaming_window
from radixlm.hidden_outputs.checks import OutputRules
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.lora.registry import AdapterOptions, AdapterRegistry
from radixlm.weight_updates.occupation import MemoryOccupation
from radixlm.weight_updates.registry import WeightsOptions, WeightsRegistry


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

    def attach(self, options: RegistryOptions | None) -> None:
        """Set what intake asks of features."""
        options = options or DEFAULTS
        self.occupation = MemoryOccupation(self)
        self.adapters = AdapterRegistry(self, options.adapters)
        self.weights = WeightsRegistry(self, options.weights)
        self.outputs, self.preload = OutputRules(), preload
        self.streaming_window = streaming_window

    @property
    def journal(self) -> StreamJournal | None:
        return current_journal()
