"""The parser of a verb's own options: errors name the flag, or the nearest of one unknown."""

import argparse
import re
from typing import Any, Never

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion

_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.*)", re.S)
_KINDS = {"int": "an integer", "float": "a number"}


def unmarked(text: str | None) -> str | None:
    """A docstring without its marks of code, for a terminal."""
    return text and text.replace("`", "")


class VerbParser(argparse.ArgumentParser):
    """Raises ConfigError for wrong flags and accepts no abbreviations."""

    def __init__(self, prog: str, description: str | None = None, **settings: Any) -> None:
        settings.setdefault("formatter_class", Help)
        text = unmarked(description)
        super().__init__(prog=prog, description=text, allow_abbrev=False, **settings)

    def error(self, message: str) -> Never:
        """Raise instead of printing the usage."""
        if match := _NUMBER.fullmatch(message):
            flag, kind, value = match.groups()
            known = self._option_string_actions[flag.partition("/")[0]].default
            works = known if isinstance(known, (int, float)) else 1
            raise ConfigError(f"{flag}: {value} is not {_KINDS[kind]}; a value that works: {works}")
        word = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        is_unknown = message.startswith("unrecognized") and word.startswith("-")
        near = suggestion(word.partition("=")[0], self._option_string_actions) if is_unknown else ""
        raise ConfigError(f"{message}{near} (see {self.prog} --help)")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Two columns; defaults are shown unless empty or told already."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        if default in (None, "", (), [], argparse.SUPPRESS) or default is False:
            return text
        if isinstance(default, (list, tuple)) and "(default:" not in text:
            return f"{text} (default: {' '.join(map(str, default))})".strip()
        return text if "(default:" in text else super()._get_help_string(action)


class TableHelp(Help, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of description and epilog."""
