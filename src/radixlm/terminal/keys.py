"""Reads what a person types: by prompt_toolkit if it is installed, else by readline."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixlm.terminal.conversation import COMMANDS

PROMPT = "> "
MORE = ". "
_QUOTES = '"""'
ReadLine = Callable[[str], str]


def history_file() -> Path:
    """Where lines are kept, for this user alone."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "radixlm" / "chat_history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    return path


def make_reader() -> ReadLine:
    """Shows a prompt and reads a line; EOFError at the end of input."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    try:
        library: Any = importlib.import_module("prompt_toolkit")
    except ImportError:
        return _readline()
    return _prompt_toolkit(library)


def read_message(read: ReadLine) -> str:
    """One message: a line, or all between two lines with triple quotes."""
    line = read(PROMPT)
    if not line.lstrip().startswith(_QUOTES):
        return line.strip()
    lines = [line.lstrip().removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(read(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip()


def _readline() -> ReadLine:
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:
        return input
    path = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(2000)
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, n: dict(enumerate(matches(text))).get(n))
    readline.parse_and_bind("tab: complete")

    def read(prompt: str) -> str:
        line = input(prompt)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
        return line

    return read


def matches(text: str) -> list[str]:
    """The commands that begin so."""
    return [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]


def _prompt_toolkit(library: Any) -> ReadLine:
    completion = importlib.import_module("prompt_toolkit.completion")
    bindings = importlib.import_module("prompt_toolkit.key_binding").KeyBindings()
    history = importlib.import_module("prompt_toolkit.history").FileHistory(str(history_file()))

    @bindings.add("escape", "enter")  # type: ignore[untyped-decorator]
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session = library.PromptSession(
        history=history,
        completer=completion.WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=True,
        key_bindings=bindings,
        enable_open_in_editor=True,
    )
    return lambda prompt: str(session.prompt(prompt))
