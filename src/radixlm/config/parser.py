"""Grouped dataclasses <-> one flat command line and YAML. No argument is written twice."""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from radixlm.base.errors import ConfigError
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.flat_options import dashed, read_values, unknown
from radixlm.config.groups import GROUPS
from radixlm.config.newer import newer_words
from radixlm.config.option import Option, options
from radixlm.config.server_config import ServerConfig
from radixlm.config.values import example, show


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError and accepts no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(**settings, allow_abbrev=False, exit_on_error=False)
        self.has_options = False  # whether ``add_options`` gave it a server's options

    def error(self, message: str) -> Never:
        """Raise instead of printing the usage."""
        raise ConfigError(message)

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Raw values of the flags and positionals in ``argv``, by dest; ConfigError if unknown."""
        try:
            known, rest = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise argument_error(error, options()) from error
        newer, rest = newer_words(rest) if self.has_options else ({}, rest)
        for word in rest:
            if word.startswith("-"):
                raise unknown(word.partition("=")[0], "the flag ")
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r}")
        return vars(known) | newer


class HelpFormatter(argparse.HelpFormatter):
    """Help in two columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def argument_error(error: argparse.ArgumentError, table: Mapping[str, Option]) -> ConfigError:
    """The error with the flag, and a value that works."""
    flag = (error.argument_name or "").partition("/")[0]
    option = table.get(flag.removeprefix("--").replace("-", "_"))
    if option is None:
        return ConfigError(f"{flag}: {error.message}")
    works = option.dashed if option.kind is bool else f"{option.dashed} {example(option)}"
    return ConfigError(f"{option.dashed}: {error.message}, such as {works}")


def help_text(option: Option) -> str:
    """The option's help: choices, default and state after it."""
    flag = option.flag
    text = option.help
    if flag.allowed:
        text += f" One of: {', '.join(map(str, flag.allowed))}."
    if option.default not in (None, (), "") and option.default is not False:
        text += f" [{show(option, option.default)}]"
    if flag.state != "works":
        text += f" ({'no effect: ' + flag.why if flag.state == 'no-op' else 'not built yet'})"
    return text.replace("%", "%%")


def argument_settings(option: Option) -> dict[str, Any]:
    """The keywords of ``add_argument``; values stay raw text, ``read_values`` reads them."""
    bare = option.flag.const
    if option.kind is bool and bare is None:
        return {"action": argparse.BooleanOptionalAction}
    settings: dict[str, Any] = {
        "metavar": {str: "TEXT", int: "N", float: "X"}.get(option.kind, "B")
    }
    if option.flag.is_repeatable:
        return settings | {"action": "append"}
    if bare is not None:
        return (
            settings | {"nargs": "*"}
            if option.is_many
            else settings | {"nargs": "?", "const": bare}
        )
    return settings | {"nargs": "+"} if option.is_many else settings


def add_options(parser: OptionParser) -> None:
    """Add --config, every option in groups, and (hidden) every old flag to ``parser``, which then
    also reads SGLang's newer flags."""
    parser.has_options = True
    quiet = argparse.SUPPRESS
    parser.add_argument(
        "--config", metavar="FILE", default=quiet, help="YAML file with options; flags override it."
    )
    sections = {name: parser.add_argument_group(_title(name)) for name in GROUPS}
    for name, option in options().items():
        sections[option.group].add_argument(
            option.dashed,
            *option.flag.aliases,
            dest=name,
            default=quiet,
            help=help_text(option),
            **argument_settings(option),
        )
    for key, renamed in DEPRECATED.items():
        action = "store" if renamed.takes_value else "store_true"
        parser.add_argument(dashed(key), dest=key, default=quiet, help=quiet, action=action)


def _title(group: str) -> str:
    return (GROUPS[group].__doc__ or group).rstrip(".")


def read_yaml(path: str) -> dict[str, Any]:
    """The options of a YAML file, checked; ConfigError naming the file and the key."""
    yaml = importlib.import_module("yaml")  # 20 ms that --help need not pay
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"--config: {path} must hold lines such as 'port: 30000'")
    return read_values(loaded, f"{path}: ")


def collect(raw: Mapping[str, Any]) -> tuple[ServerConfig, frozenset[str]]:
    """Raw values by dest (``OptionParser.read``) -> (config, names that the user gave)."""
    flags = dict(raw)
    path = flags.pop("config", None)
    for name, option in options().items():
        if option.is_many and option.flag.const is not None and flags.get(name) == []:
            flags[name] = option.flag.const
    values = read_yaml(path) if path is not None else {}
    values |= read_values(flags)
    return ServerConfig().with_values(values), frozenset(values)


def build_parser(prog: str = "radixlm serve", description: str | None = None) -> OptionParser:
    """A parser with all options of a server."""
    parser = OptionParser(prog=prog, description=description, usage=f"{prog} [options]")
    add_options(parser)
    return parser


def parse(argv: Sequence[str], prog: str = "radixlm serve") -> tuple[ServerConfig, frozenset[str]]:
    """(config, names that the user gave on the command line or in --config).

    ConfigError names the flag and a value that works. ``-h`` prints the help and exits with 0.
    """
    return collect(build_parser(prog).read(argv))
