"""``radixlm top``: watch running servers in the terminal: RadixLM, SGLang, vLLM, and gateways.

It asks /ready, /metrics, /v1/loads once a second and /server_info every five seconds. Keys: q
leaves, space holds, tab shows the next server. Where output is piped: one look.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from radixlm.base.errors import ConfigError
from radixlm.config.verb_parser import TableHelp, VerbParser
from radixlm.terminal.api import Api
from radixlm.terminal.figures import line, rows
from radixlm.terminal.local import DEFAULT_URL
from radixlm.terminal.snapshot import Snapshot
from radixlm.terminal.watch import Watch

Keys = Callable[[float], str]
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 60.0


def build_parser() -> VerbParser:
    """The options of this verb."""
    parser = VerbParser("radixlm top", __doc__, formatter_class=TableHelp)
    parser.add_argument(
        "--url", action="append", help=f"a server or gateway, may be repeated ({DEFAULT_URL})"
    )
    parser.add_argument("--api-key", help="of servers that ask for one")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="between two looks"
    )
    parser.add_argument("--once", action="store_true", help="one look, then leave")
    parser.add_argument("--json", action="store_true", help="one look as JSON, a server a line")
    parser.add_argument("--plain", action="store_true", help="a line a look, no screen")
    return parser


def main(argv: list[str]) -> int:
    """0; 1 if a server did not answer the one look."""
    args = build_parser().parse_args(argv)
    if not MIN_INTERVAL_S <= args.interval <= MAX_INTERVAL_S:
        raise ConfigError(f"--interval must be {MIN_INTERVAL_S} to {MAX_INTERVAL_S:g}, such as 1")
    watches = [Watch(Api(url, args.api_key)) for url in dict.fromkeys(args.url or [DEFAULT_URL])]
    with ThreadPoolExecutor(len(watches)) as pool:

        def look() -> list[Snapshot]:
            return list(pool.map(Watch.poll, watches))

        first = look()
        if args.once or args.json or not sys.stdout.isatty():
            print(as_json(first) if args.json else as_text(first))
            return int(any(one.state == "down" for one in first))
        if all(one.state == "down" for one in first):
            raise ConfigError("; ".join(f"--url {one.url}: {one.reason}" for one in first))
        with contextlib.suppress(KeyboardInterrupt), _keys() as key:
            _follow(look, watches, first, key, args)
    return 0


def as_json(found: Sequence[Snapshot]) -> str:
    """A JSON object a line."""
    return "\n".join(msgspec.json.encode(one).decode() for one in found)


def as_text(found: Sequence[Snapshot]) -> str:
    """Everything of all servers."""
    width = shutil.get_terminal_size().columns
    blocks = [rows(one, (), width) for one in found]
    return "\n\n".join("\n".join(f"{k:<9} {v}" for k, v in block) for block in blocks)


def _follow(
    look: Callable[[], list[Snapshot]],
    watches: Sequence[Watch],
    found: list[Snapshot],
    key: Keys,
    args: argparse.Namespace,
) -> None:
    """Show look after look until a key says to leave."""
    chosen, is_held = 0, False
    with _screen(args.plain) as show:
        while True:
            show(found, chosen, watches[chosen].rates, is_held)
            until_s = time.monotonic() + args.interval
            while (left_s := until_s - time.monotonic()) > 0:
                pressed = key(left_s)
                if pressed in ("q", "Q"):
                    return
                if pressed in ("\t", " "):
                    is_held ^= pressed == " "
                    chosen = (chosen + (pressed == "\t")) % len(found)
                    show(found, chosen, watches[chosen].rates, is_held)
            found = found if is_held else look()


Show = Callable[[list[Snapshot], int, Sequence[float], bool], None]


@contextlib.contextmanager
def _screen(is_plain: bool) -> Iterator[Show]:
    """rich's, if it is installed and the terminal can; else lines."""
    console: Any = None
    with contextlib.suppress(ImportError):
        console = importlib.import_module("rich.console").Console(highlight=False)
    if is_plain or console is None or console.is_dumb_terminal:
        yield _show_line
        return
    live = importlib.import_module("rich.live").Live(
        console=console, screen=True, auto_refresh=False, transient=True
    )
    text = importlib.import_module("rich.text").Text  # an import could swallow a Ctrl-C
    with live:
        yield lambda *what: live.update(
            _page(text, console.width, console.height, *what), refresh=True
        )


def _show_line(found: list[Snapshot], chosen: int, rates: Sequence[float], is_held: bool) -> None:
    for one in found if not is_held else ():
        print(time.strftime("%H:%M:%S"), line(one), flush=True)


def _page(
    text: Any,
    width: int,
    height: int,
    found: list[Snapshot],
    chosen: int,
    rates: Sequence[float],
    is_held: bool,
) -> Any:
    """rich's ``text`` of a screen: a line a server if there are several, then all of the chosen
    one."""
    page = text()
    colours = {"ready": "green", "up": "green", "not ready": "yellow", "down": "red"}
    for number, one in enumerate(found if len(found) > 1 else ()):
        mark = ">" if number == chosen else " "
        page.append(f"{mark} {line(one)}\n", style=colours.get(one.state))
    for label, value in rows(found[chosen], rates, width):
        page.append(f"{label:<9} ", style="bold cyan")
        page.append(
            f"{value}\n", style=colours.get(found[chosen].state) if label == "server" else None
        )
    lines = list(page.split("\n"))[: height - 1]
    tab = ", tab: next" if len(found) > 1 else ""
    held = "  HELD" if is_held else ""
    lines.append(text(f"q leaves, space holds{tab}{held}", "dim"))
    for one in lines:
        one.truncate(width, overflow="ellipsis")
    return importlib.import_module("rich.console").Group(*lines)


@contextlib.contextmanager
def _keys() -> Iterator[Keys]:
    """Waits so many seconds for a key; "" without one. The terminal is as before at the end."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""  # type: ignore[func-returns-value]
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def key(seconds: float) -> str:
        if not select.select([number], [], [], seconds)[0]:
            return ""
        return os.read(number, 1).decode("latin-1") or "q"  # the terminal is gone

    try:
        tty.setcbreak(number)
        yield key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
