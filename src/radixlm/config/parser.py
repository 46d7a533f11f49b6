"""Grouped dataclasses <-> one flat command line and YAML. No argument is written twice."""

import argparse
import importlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Never

from radixlm.base.errors import ConfigError, reason
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.flat_options import dashed, read_values, unknown
from radixlm.config.groups import GROUPS
from radixlm.config.newer import newer_flags, newer_words
from radixlm.config.option import Option, options
from radixlm.config.server_config import ServerConfig
from radixlm.config.values import example, show
from radixlm.config.verb_parser import VerbParser, unmarked

logger = logging.getLogger(__name__)

# what most people set; ``--help-all`` shows the rest
_COMMON = frozenset(
    "config model_path quantization context_length dtype mem_fraction_static kv_cache_dtype "
    "tp_size lora_paths speculative_algorithm host port api_key served_model_name "
    "tool_call_parser reasoning_parser log_level".split()
)


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError. Of flags, it takes the beginnings of a server's
    options that begin no other (a warning says which). Its help shows the common ones of these, and
    all after ``--help-all``."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        settings["description"] = unmarked(settings.get("description"))
        super().__init__(**settings, allow_abbrev=False, exit_on_error=False)
        self.has_options = False  # whether ``add_options`` gave it a server's options
        self.shows_all = False

    def error(self, message: str) -> Never:
        """Raise instead of printing the usage."""
        raise ConfigError(message)

    def read(
        self, argv: Sequence[str], own: Iterable[str] = (), positional: str = ""
    ) -> dict[str, Any]:
        """Raw values of the flags and positionals in ``argv``, by dest; ConfigError if unknown.
        ``own``: flags that the caller has read, for suggestions. ``positional``: the dest of a word
        without a flag, if that is not given."""
        try:
            known, rest = self.parse_known_args([self._in_full(word, own) for word in argv])
        except argparse.ArgumentError as error:
            raise argument_error(error, options()) from error
        values = vars(known)
        newer, rest = newer_words(rest) if self.has_options else ({}, rest)
        if positional and rest and not rest[0].startswith("-") and positional not in values:
            values[positional] = rest.pop(0)
        for word in rest:
            if word.startswith("-"):
                flags = [*own, *self._option_string_actions, *map(dashed, newer_flags())]
                raise unknown(word.partition("=")[0], "the flag ", flags)
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r}")
        return values | newer

    def _in_full(self, word: str, own: Iterable[str]) -> str:
        """``--a_b`` as ``--a-b``, and the beginning of one option as that option."""
        name, equals, value = word.partition("=")
        if name[:2] != "--":
            return word
        flag = name.replace("_", "-")
        if self.has_options and flag not in self._option_string_actions:
            flag = self._completed(flag, own)
        return flag + equals + value if flag in self._option_string_actions else word

    def _completed(self, flag: str, own: Iterable[str]) -> str:
        """The only option that begins with ``flag``, as SGLang's parser reads it; else ``flag``."""
        is_known = flag.removeprefix("--").replace("-", "_") in newer_flags()
        if is_known or any(name.startswith(flag) for name in own):
            return flag
        names = self._option_string_actions
        begun = {names[name].dest: name for name in names if name.startswith(flag)}
        if len(begun) != 1:
            return flag
        (full,) = begun.values()
        logger.warning("%s is read as %s", flag, full)
        return full

    def format_help(self) -> str:
        if not self.has_options or self.shows_all:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        table = options()
        for group in self._action_groups:
            actions = [
                _shortened(action, table.get(action.dest))
                for action in group._group_actions
                if action.dest in _COMMON or action.dest not in table
            ]
            formatter.start_section(group.title)
            formatter.add_arguments(actions)
            formatter.end_section()
        text = f"--help-all shows all {len(table)} options of a server, and so does "
        formatter.add_text(f"{text}docs/server-arguments.md.")
        return formatter.format_help()


def _shortened(action: argparse.Action, option: Option | None) -> argparse.Action:
    if option is not None:
        action = copy(action)
        action.help = help_text(option, is_short=True)
    return action


class HelpAll(argparse.Action):
    """Shows every option."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        assert isinstance(parser, OptionParser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()


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
    if option.kind is bool:
        said = error.message.replace("ignored explicit argument", "takes no value, got")
        return ConfigError(f"{option.dashed}: {said}; {option.dashed} alone works")
    works = f"{option.dashed} {example(option)}"
    return ConfigError(f"{option.dashed}: {error.message}, such as {works}")


def help_text(option: Option, is_short: bool = False) -> str:
    """The option's help: choices, default and state after it. ``is_short``: what it says first,
    and the choices if they are few."""
    flag = option.flag
    text = option.help
    if is_short:
        text = re.split(r"[.;:(] |,? or of ", text)[0].rstrip(".") + "."
    if flag.allowed and (not is_short or len(flag.allowed) < 10):
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
        "--help-all", action=HelpAll, nargs=0, dest=quiet, default=quiet, help="Show every option."
    )
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
        text = Path(path).read_text(encoding="utf-8")
        twice = _repeated_key(yaml.compose(text, yaml.SafeLoader))
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {reason(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from error
    if twice is not None:
        line = twice.start_mark.line + 1
        raise ConfigError(f"--config: {path}:{line}: {twice.value} is given twice; keep one line")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"--config: {path} must hold lines such as 'port: 30000'")
    return read_values(loaded, f"{path}: ")


def _repeated_key(root: Any) -> Any:
    """The node of a key that stands twice in one mapping, None if there is none. ``root``: a node
    of PyYAML, which would take the last of them, or None."""
    nodes = [root] if root is not None else []
    for node in nodes:  # the list grows
        keys: set[str] = set()
        for child in node.value if node.id != "scalar" else ():
            key, value = child if node.id == "mapping" else (None, child)
            if key is not None and key.id == "scalar":
                if key.value in keys:
                    return key
                keys.add(key.value)
            if not any(value is known for known in nodes):  # an alias may lead back
                nodes.append(value)
    return None


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


def build_parser(
    prog: str = "radixlm serve", description: str | None = None, positional: str = ""
) -> OptionParser:
    """A parser with all options of a server. ``positional``: shown in the usage."""
    usage = f"{prog} {positional}[options]"
    parser = OptionParser(prog=prog, description=description, usage=usage)
    add_options(parser)
    return parser


def parse(
    argv: Sequence[str],
    prog: str = "radixlm serve",
    own: Iterable[str] = (),
    takes_model: bool = False,
) -> tuple[ServerConfig, frozenset[str]]:
    """(config, names that the user gave on the command line or in --config). ``own``: flags of the
    verb itself, for suggestions. ``takes_model``: a word without a flag is the model.

    ConfigError names the flag and a value that works. ``-h`` prints the help and exits with 0.
    """
    parser = build_parser(prog, positional="[MODEL] " if takes_model else "")
    return collect(parser.read(argv, own, "model_path" if takes_model else ""))


class VerbLine(NamedTuple):
    """A command line of words, options of the verb (``own``) and ``server`` options, as they were
    written; ``config`` and ``given`` are made of the last."""

    own: argparse.Namespace
    words: list[str]
    server: list[str]
    config: ServerConfig
    given: frozenset[str]


def parse_verb(parser: VerbParser, argv: Sequence[str], takes_both: bool = False) -> VerbLine:
    """Read the command line of a verb that takes words before its options, or one after them, or
    ``takes_both``. ``parser``: of its own options. ConfigError as ``parse``."""
    own, rest = parser.parse_known_args(argv)
    end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, server = rest[:end], rest[end:]
    reader = build_parser(parser.prog)
    after = "word" if takes_both or not words else ""
    values = reader.read(server, parser._option_string_actions, after)
    if "word" in values:
        words.append(values.pop("word"))
        del server[len(server) - 1 - server[::-1].index(words[-1])]
    return VerbLine(own, words, server, *collect(values))
