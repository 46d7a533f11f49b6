"""The twelve groups, in the order of ``--help`` and of the docs."""

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
"""Field of ``ServerConfig`` -> class of the group."""
