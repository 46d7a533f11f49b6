"""How answers look: as they are where output is piped, else Markdown in colour (by rich, if it is
installed). Whole paragraphs are formatted; what is being written stays plain below them."""

from __future__ import annotations

import importlib
import sys
from typing import Any, TextIO

from radixlm.terminal.api import Event
from radixlm.terminal.conversation import Figures


class PlainScreen:
    """Text as it comes."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._has_text = False

    def begin(self) -> None:
        self._has_text = False

    def show(self, event: Event) -> None:
        if event.kind == "text":
            self._has_text = True
            self._out.write(event.text)
            self._out.flush()

    def end(self, figures: Figures) -> None:
        """The answer is over, whole or not."""
        self._out.write("\n" if self._has_text else "")
        self._out.flush()

    def say(self, text: str, is_error: bool = False) -> None:
        """Something that is not the model's."""
        print(text, file=sys.stderr if is_error else self._out, flush=True)


class RichScreen(PlainScreen):
    """On a terminal. ``console``: rich's."""

    def __init__(self, console: Any) -> None:
        super().__init__(console.file)
        self._console = console
        self._markdown = importlib.import_module("rich.markdown").Markdown
        self._live_type = importlib.import_module("rich.live").Live
        self._live: Any = None
        self._text, self._num_thoughts = "", 0

    def begin(self) -> None:
        self._text, self._num_thoughts = "", 0
        self._live = self._live_type(
            "", console=self._console, transient=True, refresh_per_second=12,
            vertical_overflow="visible",
        )  # fmt: skip
        self._live.start()

    def show(self, event: Event) -> None:
        if event.kind == "progress":
            line = self._console.render_str(event.text, markup=False, style="dim")
            self._live.update(line, refresh=True)
        elif event.kind == "thinking":
            self._num_thoughts += len(event.text.split())
            self._live.update(f"[dim]thinking, {self._num_thoughts} words[/dim]")
        elif event.kind == "text":
            self._text += event.text
            whole, self._text = split_blocks(self._text)
            if whole.strip():
                self._live.update("")
                self._console.print(self._markdown(whole))
            self._live.update(self._console.render_str(self._text, markup=False))

    def end(self, figures: Figures) -> None:
        self._live.update("")
        self._live.stop()
        if self._text.strip():
            self._console.print(self._markdown(self._text))
        thought = " (/thought shows the thinking)" if figures.thinking else ""
        if figures.num_output:
            self._console.print(figures.line() + thought, style="dim", markup=False)

    def say(self, text: str, is_error: bool = False) -> None:
        self._console.print(text, style="red" if is_error else "cyan", markup=False)


def split_blocks(text: str) -> tuple[str, str]:
    """(whole blocks of Markdown, the rest): a block ends at an empty line outside of code."""
    place, end, is_code = 0, 0, False
    for line in text.splitlines(keepends=True):
        place += len(line)
        if line.lstrip().startswith("```"):
            is_code = not is_code
            if not is_code and line.endswith("\n"):
                end = place
        elif not is_code and not line.strip() and line.endswith("\n"):
            end = place
    return text[:end], text[end:]


def make_screen(is_plain: bool = False) -> PlainScreen:
    """The best one for standard output."""
    if is_plain or not sys.stdout.isatty():
        return PlainScreen()
    try:
        console = importlib.import_module("rich.console").Console(highlight=False)
    except ImportError:
        return PlainScreen()
    return PlainScreen() if console.is_dumb_terminal else RichScreen(console)
