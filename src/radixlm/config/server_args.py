"""ServerArgs: the options of a server as one object, for programs that hold them as SGLang's."""

from __future__ import annotations

import argparse
import dataclasses
from copy import copy
from functools import cache
from typing import Any

from radixlm.base.lazy import load
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.option import options
from radixlm.config.server_config import ServerConfig, flat


@cache
def _field(name: str) -> Any:
    (template,) = dataclasses.fields(dataclasses.make_dataclass("Option", ["option"]))
    field: Any = copy(template)
    field.name = name
    return field


class _Fields:
    """``__dataclass_fields__``: of an object those that were set, of the class all."""

    def __get__(self, args: ServerArgs | None, owner: type) -> dict[str, Any]:
        return {name: _field(name) for name in (options() if args is None else args.given())}


class ServerArgs:
    """``ServerArgs(model_path="...", tp_size=2)``: an attribute for each option, by its name;
    ``Engine(server_args=...)`` takes it. ConfigError for a name or a value that cannot be.

    ``dataclasses.asdict`` of one has what was set, so that ``Engine(**asdict(args))`` sets that."""

    __dataclass_fields__ = _Fields()

    def __init__(self, **given: Any) -> None:
        self._given = dict(given)
        self._config = ServerConfig.from_kwargs(**given)

    @classmethod
    def of(cls, config: ServerConfig) -> ServerArgs:
        """The options of a configuration."""
        made = cls.__new__(cls)
        made._given, made._config = flat(config, show_secrets=True), config
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (options().keys() | self._given.keys()):
            raise AttributeError(f"no option is called {name!r}")
        return self._config.value(name) if name in options() else self._given[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._config = ServerConfig.from_kwargs(**{**self._given, name: value})
            name, value = "_given", {**self._given, name: value}
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *options()})

    def __repr__(self) -> str:
        known = options()
        shown = {
            name: "***" if name in known and known[name].flag.is_secret else value
            for name, value in self._given.items()
        }
        return f"ServerArgs({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def given(self) -> dict[str, Any]:
        """What was set, by name."""
        return dict(self._given)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the flags of ``radixlm serve``."""
        load("radixlm.config.parser:add_options")(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Of what a parser with these flags has read."""
        known = options().keys() | DEPRECATED
        return cls(**{name: value for name, value in vars(args).items() if name in known})
