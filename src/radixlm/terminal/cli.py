"""``radixlm chat``: talk to a model in the terminal. ``radixlm chat 'question'`` answers once.

It talks to --url, else to a server that runs on this machine, else to one of its own, with the
options of ``radixlm serve``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from radixlm.base.errors import ConfigError
from radixlm.config.parser import parse_verb
from radixlm.config.verb_parser import TableHelp, VerbParser
from radixlm.terminal.api import Api, Refused
from radixlm.terminal.conversation import Conversation
from radixlm.terminal.keys import ReadLine, make_reader, read_message
from radixlm.terminal.local import DEFAULT_URL, own_server, running
from radixlm.terminal.screen import PlainScreen, make_screen


def build_parser() -> VerbParser:
    """The options of this verb; others are the server's."""
    parser = VerbParser(
        "radixlm chat", __doc__,
        usage="radixlm chat [QUESTION ...] [options] [server options]",
        formatter_class=TableHelp,
        epilog="Server options such as --model-path start a server: radixlm serve --help.",
    )  # fmt: skip
    parser.add_argument(
        "--url",
        help="talk to this server, ours or any with OpenAI's API; "
        "--model-path names its model or adapter",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="PATH|URL",
        help="an image for the first message; may be repeated",
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the likeliest token"
    )
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, help="think first, or not"
    )
    parser.add_argument("--plain", action="store_true", help="no colour, no Markdown")
    return parser


def main(argv: list[str]) -> int:
    """0; 1 if the one question was not answered."""
    args, words, rest, config, given = parse_verb(build_parser(), argv)
    screen = make_screen(args.plain)
    with _server(args.url, rest, given, config.serve.api_key, config.model.model_path) as api:
        talk = Conversation(api)
        if args.system:
            talk.command(f"/system {args.system}")
        for path in args.image:
            talk.attach(path.strip(), "image", f"--image {path}")
        talk.params |= {} if args.max_new_tokens is None else {"max_tokens": args.max_new_tokens}
        talk.params |= {} if args.temperature is None else {"temperature": args.temperature}
        talk.is_thinking = args.think
        if words:
            return _once(talk, screen, " ".join(words))
        if sys.stdin.isatty():
            screen.say(f"{api.model} at {api.url}: say something (/help for commands)")
        return chat(talk, screen, make_reader())


@contextlib.contextmanager
def _server(
    url: str | None, options: list[str], given: frozenset[str], key: str | None, model: str
) -> Iterator[Api]:
    """``given``: options of a server that the user named; a key alone starts none."""
    if url is not None:
        _refuse_options(given)
        api = Api(url, key)
        try:
            api.model = model if "model_path" in given else (api.models() or [""])[0]
        except Refused as error:
            raise ConfigError(f"--url: {error}") from error
        yield api
    elif not given - {"api_key"} and (found := running(key)) is not None:
        print(f"(talking to the server at {DEFAULT_URL})", file=sys.stderr)
        yield found
    else:
        with own_server(options, key) as api:
            yield api


def _refuse_options(given: frozenset[str]) -> None:
    """ConfigError for options that a server which runs cannot take from here."""
    if unused := sorted(given - {"api_key", "model_path"}):
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(f"--url: the server there runs with its own {flags}; leave it out here")


def _once(talk: Conversation, screen: PlainScreen, question: str) -> int:
    if not sys.stdin.isatty():
        question = f"{question}\n\n{sys.stdin.read()}".strip()
    return 0 if _answer(talk, screen, question) else 1


def chat(talk: Conversation, screen: PlainScreen, read: ReadLine) -> int:
    """Until the end of input, /exit, or Ctrl-C at an empty line."""
    while True:
        try:
            text = read_message(read)
        except (EOFError, KeyboardInterrupt):
            return 0
        if text == "/exit":
            return 0
        if text.startswith("/"):
            try:
                said = talk.command(text)
                if said is not None:
                    screen.say(said)
                    continue
                text = talk.again()
            except (ConfigError, Refused) as error:
                screen.say(str(error), is_error=True)
                continue
        try:
            if text:
                _answer(talk, screen, text)
        except KeyboardInterrupt:  # the second one
            return 0


def _answer(talk: Conversation, screen: PlainScreen, text: str) -> bool:
    """Show an answer; whether it is whole."""
    text = text.encode(errors="replace").decode()  # bytes that are no UTF-8 are surrogates
    events, before = talk.ask(text), len(talk.messages)
    screen.begin()
    is_whole = False
    try:
        for event in events:
            screen.show(event)
        is_whole = True
    except KeyboardInterrupt:
        events.close()  # type: ignore[attr-defined]
    except Refused as error:
        screen.end(talk.figures)
        is_kept = len(talk.messages) > before
        what = "the answer ends here" if is_kept else "the message is not kept"
        screen.say(f"{error} ({what})", is_error=True)
        return False
    screen.end(talk.figures)
    return is_whole
