"""The whole configuration: twelve frozen groups, read as ``config.memory.page_size``.

Constructors take their group, never the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixlm.config.adapters import AdapterConfig
from radixlm.config.disagg import DisaggConfig
from radixlm.config.execute import ExecuteConfig
from radixlm.config.grammar import GrammarConfig
from radixlm.config.media import MediaConfig
from radixlm.config.memory import MemoryConfig
from radixlm.config.model import ModelConfig
from radixlm.config.observe import ObserveConfig
from radixlm.config.parallel import ParallelConfig
from radixlm.config.schedule import ScheduleConfig
from radixlm.config.serve import ServeConfig
from radixlm.config.speculate import SpeculateConfig

GROUPS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "serve": ServeConfig,
    "schedule": ScheduleConfig,
    "memory": MemoryConfig,
    "execute": ExecuteConfig,
    "observe": ObserveConfig,
    "grammar": GrammarConfig,
    "adapters": AdapterConfig,
    "media": MediaConfig,
    "speculate": SpeculateConfig,
    "parallel": ParallelConfig,
    "disagg": DisaggConfig,
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All options of a server."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    execute: ExecuteConfig = field(default_factory=ExecuteConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    speculate: SpeculateConfig = field(default_factory=SpeculateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
