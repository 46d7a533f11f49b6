"""The whole configuration: twelve frozen groups, read as ``config.memory.page_size``.

A class takes the groups that it needs, not the ServerConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from radixlm.config.adapters import AdapterConfig
from radixlm.config.disagg import DisaggConfig
from radixlm.config.execute import ExecuteConfig
from radixlm.config.flat_options import read_values
from radixlm.config.grammar import GrammarConfig
from radixlm.config.media import MediaConfig
from radixlm.config.memory import MemoryConfig
from radixlm.config.model import ModelConfig
from radixlm.config.observe import ObserveConfig
from radixlm.config.option import options
from radixlm.config.parallel import ParallelConfig
from radixlm.config.schedule import ScheduleConfig
from radixlm.config.serve import ServeConfig
from radixlm.config.speculate import SpeculateConfig


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
    located: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where models and adapters that were given by name lie on this machine: name of the option, or
    path of an adapter -> folder. The options keep what the user wrote."""
    given: frozenset[str] = field(default=frozenset(), hash=False, compare=False)
    """Options that the user set, as ``resolve`` was told."""
    reasons: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False, compare=False)
    """What ``resolve`` changed: option -> (its value before, as text; why)."""

    @classmethod
    def from_kwargs(cls, **flat: Any) -> Self:
        """Options by name, as the offline engine takes them; ConfigError as on the CLI. A process
        that another starts is told what is ``located`` too."""
        located = flat.pop("located", {})
        return replace(cls().with_values(read_values(flat, "argument ")), located=located)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with checked ``values`` (option name -> value) set."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(options()[name].group, {})[name] = value
        return replace(
            self, **{name: replace(getattr(self, name), **new) for name, new in groups.items()}
        )

    def local(self, name: str) -> str | None:
        """The path of the option ``name`` on this machine."""
        path: str | None = self.value(name)
        return self.located.get(name, path)

    def value(self, name: str) -> Any:
        """The value of the option called ``name``, whatever its group."""
        return getattr(getattr(self, options()[name].group), name)


def engine_values(config: ServerConfig) -> dict[str, Any]:
    """As ``flat``, what an engine is started with: without unset options and the secrets of the
    HTTP server, but with those of stores."""
    values = flat(config, show_secrets=True)
    hidden = {n for n, o in options().items() if o.flag.is_secret and o.group == "serve"}
    return {n: value for n, value in values.items() if value is not None and n not in hidden}


def flat(config: ServerConfig, *, show_secrets: bool = False) -> dict[str, Any]:
    """Option name -> value, tuples as lists; secrets as "***" unless asked for.

    The names are those of SGLang's server arguments, as /get_server_info shows them.
    """
    shown: dict[str, Any] = {}
    for name, option in options().items():
        value = config.value(name)
        if option.flag.is_secret and value is not None and not show_secrets:
            value = "***"
        shown[name] = list(value) if isinstance(value, tuple) else value
    return shown
