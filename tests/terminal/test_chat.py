"""`radixlm chat`: conversation, commands, screens and keys, with a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.http_server import listening, scripted_server

from radixlm.base.errors import ConfigError
from radixlm.terminal import cli, keys
from radixlm.terminal.api import Api, Event, Refused
from radixlm.terminal.conversation import COMMANDS, Conversation, Figures
from radixlm.terminal.screen import PlainScreen, RichScreen, split_blocks

SCRIPT = {
    "forever": "Hello ",
    "first": "The one.",
    "second": "The other.",
    "code": "Look:\n\n```\nx\n\ny\n```\nDone.",
}


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest_asyncio.fixture
async def url(toy_folder: Path) -> AsyncIterator[str]:
    async with scripted_server(toy_folder, SCRIPT) as server, listening(server) as port:
        yield f"http://127.0.0.1:{port}"


@pytest_asyncio.fixture
async def slow_url(toy_folder: Path) -> AsyncIterator[str]:
    """A server whose endless answer takes 20 s."""
    async with scripted_server(toy_folder, SCRIPT) as server, listening(server) as port:
        server.engine.executor.is_slow = True
        yield f"http://127.0.0.1:{port}"


async def talk_to(url: str) -> Conversation:
    api = Api(url)
    api.model = (await asyncio.to_thread(api.models))[0]
    return Conversation(api)


async def say(talk: Conversation, text: str) -> str:
    events = await asyncio.to_thread(lambda: list(talk.ask(text)))
    return "".join(event.text for event in events if event.kind == "text")


def roles(talk: Conversation) -> str:
    return "".join(message["role"][0] for message in talk.messages)


async def test_a_conversation_grows(url: str) -> None:
    talk = await talk_to(url)
    assert await say(talk, "the first") == "The one."
    assert await say(talk, "the second one") == "The one."  # the script sees the whole prompt
    assert roles(talk) == "uaua"
    assert talk.figures.num_output > 1 and talk.figures.finish == "stop"
    assert "tokens" in (talk.command("/stats") or "")


async def test_a_refused_message_is_not_kept(url: str) -> None:
    talk = await talk_to(url)
    await say(talk, "the first")
    talk.params["max_tokens"] = -1
    with pytest.raises(Refused, match="max_tokens"):
        await say(talk, "the second")
    assert roles(talk) == "ua"
    for wrong in ("ftp://x", "http://x:99999", "http://[::1", "http://x:0"):
        with pytest.raises(ConfigError, match="--url"):
            Api(wrong)
    gone = Api("http://127.0.0.1:1")
    with pytest.raises(Refused, match="does not answer"):
        list(gone.answer({"messages": []}))


async def test_an_answer_that_is_stopped_stays_as_far_as_it_came(url: str) -> None:
    talk = await talk_to(url)

    def begin() -> None:
        events = talk.ask("forever")
        for event in events:
            if event.kind == "text":
                break
        events.close()  # type: ignore[attr-defined]

    await asyncio.to_thread(begin)
    assert roles(talk) == "ua" and talk.messages[1]["content"]


async def test_retry_and_undo(url: str) -> None:
    talk = await talk_to(url)
    await say(talk, "the first")
    assert talk.command("/retry") is None
    assert talk.again() == "the first" and not talk.messages
    await say(talk, "the first")
    assert "the first" in (talk.command("/undo") or "") and not talk.messages
    for name in ("/undo", "/retry"):
        with pytest.raises(ConfigError, match="no message yet"):
            talk.command(name)


async def test_commands(url: str, tmp_path: Path) -> None:
    talk = await talk_to(url)
    model = talk.api.model
    assert model in (await asyncio.to_thread(talk.command, "/model") or "")
    with pytest.raises(ConfigError, match="has"):
        await asyncio.to_thread(talk.command, "/model other")
    talk.command("/system Be brief.")
    talk.command("/set temperature 0.5")
    talk.command("/set seed=7")
    assert talk.params == {"temperature": 0.5, "seed": 7}
    await say(talk, "the first")
    assert roles(talk) == "sua"
    saved, messages = tmp_path / "talk.json", talk.messages
    talk.command(f"/save {saved}")
    talk.command("/clear")
    assert roles(talk) == "s"
    talk.command(f"/load {saved}")
    assert talk.messages == messages
    talk.command("/set seed")
    assert talk.params == {"temperature": 0.5}
    talk.command("/think")
    assert talk.is_thinking
    assert "/retry" in (talk.command("/help") or "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/sav x", "did you mean '/save'"),
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set top_k many", "not a number"),
        ("/save", "name a file"),
        ("/load /nowhere", "/nowhere"),
        ("/load {folder}/list.json", "list.json"),
        ("/load {folder}/parts.json", "parts with a type"),
        ("/image /nowhere.png", "/image"),
    ],
)
def test_wrong_commands_are_told(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "parts.json").write_text('{"messages": [{"role": "user", "content": [{}]}]}')
    with pytest.raises(ConfigError, match=says):
        Conversation(Api("http://127.0.0.1:1")).command(line.format(folder=tmp_path))


@pytest.mark.parametrize("said", ["", "Some"])
def test_a_lost_answer_says_whether_it_is_kept(said: str, capsys: Any) -> None:
    class Fake(Api):
        def answer(self, fields: Any) -> Iterator[Event]:
            if said:
                yield Event("text", said)
            raise Refused("the connection was lost")

    talk = Conversation(Fake("http://127.0.0.1:1"))
    assert not cli._answer(talk, PlainScreen(), "hi")
    says = "(the answer ends here)" if said else "(the message is not kept)"
    assert says in capsys.readouterr().err and roles(talk) == ("ua" if said else "")


def test_a_server_of_its_own_is_asked_with_its_key(tmp_path: Path, monkeypatch: Any) -> None:
    """By --config too."""
    asked: list[Any] = []

    @contextlib.contextmanager
    def server(options: list[str], key: str | None) -> Iterator[Api]:
        asked.append((options, key))
        yield Api("http://127.0.0.1:1", key)

    monkeypatch.setattr(cli, "own_server", server)
    (tmp_path / "x.yaml").write_text("api-key: secret\nmodel-path: x\n")
    options = ["--config", str(tmp_path / "x.yaml")]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main([*options, "--plain", "hi"]) == 1
    assert asked == [(options, "secret")]


def test_images_go_with_the_next_message(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Fake(Api):
        def answer(self, fields: Any) -> Iterator[Event]:
            seen.append(fields["messages"][-1]["content"])
            yield Event("text", "seen")

    talk = Conversation(Fake("http://127.0.0.1:1"))
    (tmp_path / "a.png").write_bytes(b"png")
    talk.command(f"/image {tmp_path / 'a.png'}")
    talk.command("/image http://b/c.jpg")
    list(talk.ask("what is it"))
    list(talk.ask("and now"))
    assert [part["type"] for part in seen[0]] == ["image_url", "image_url", "text"]
    assert seen[0][0]["image_url"]["url"] == "data:image/png;base64,cG5n"
    assert seen[1] == "and now"
    talk.command("/undo")
    talk.command("/undo")
    list(talk.ask("again"))  # the attachments of what was taken back are there again
    assert len(seen[2]) == 3


@pytest.mark.parametrize("cut", range(40))
def test_blocks_end_outside_of_code(cut: int) -> None:
    text = "One\ntwo\n\n- a\n\n```py\nx\n\ny\n```\nlast"
    first, rest = split_blocks(text[:cut])
    assert first + rest == text[:cut]
    assert first.count("```") % 2 == 0
    whole, left = split_blocks(text)
    assert (whole, left) == (text[: text.index("last")], "last")


def test_screens_show_all_of_it() -> None:
    rich = pytest.importorskip("rich.console")
    parts = ["# Head\n\nSome **bold** text", " goes on.\n\n```py\nx = 1\n```\n", "The end[/b]."]
    plain, colour = io.StringIO(), io.StringIO()
    made = RichScreen(rich.Console(file=colour, force_terminal=True, width=80, highlight=False))
    for screen in (PlainScreen(plain), made):
        screen.begin()
        screen.show(Event("progress", "prefill 3 of [9]"))
        screen.show(Event("thinking", "let me see"))
        for part in parts:
            screen.show(Event("text", part))
        screen.end(Figures(9, 3, 5, 0.1, 0.5, "let me see", "length"))
        screen.say("told [x]")
    assert plain.getvalue() == "".join(parts) + "\ntold [x]\n"
    shown = colour.getvalue()
    for word in (
        "prefill 3 of [9]",
        "Head",
        "bold",
        "goes on",
        "The end[/b].",
        "3 of them cached",
        "told [x]",
    ):
        assert word in shown
    assert "**bold**" not in shown.split("Head")[-1].split("goes on")[0][-200:]


def test_several_lines_make_one_message() -> None:
    lines = iter(['"""one', "", 'two"""', "  plain  ", '"""same line"""'])
    read: Callable[[str], str] = lambda prompt: next(lines)  # noqa: E731
    assert [keys.read_message(read) for _ in range(3)] == ["one\n\ntwo", "plain", "same line"]
    assert keys.matches("/s") == [name for name in COMMANDS if name.startswith("/s")]
    assert keys.matches("s") == []


async def test_one_question(url: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first \udcff"))  # of a byte that is no UTF-8
    assert await asyncio.to_thread(cli.main, ["the", "word", "--url", url]) == 0
    assert capsys.readouterr().out == "The one.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    options = ["--url", url, "--max-new-tokens", "-1", "first"]
    assert await asyncio.to_thread(cli.main, options) == 1
    assert "max_tokens" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--url"):
        cli.main(["--url", "ftp://x", "hi"])
    with pytest.raises(ConfigError, match=r"--url: .* its own --dtype, --tp-size; leave it out"):
        cli.main(["--url", url, "--tp-size", "2", "--dtype", "float32", "hi"])
    with pytest.raises(ConfigError, match="did you mean '--system'"):
        cli.main(["--sytem", "x"])


async def test_lines_of_a_pipe_are_messages(url: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the second\n/nothing\n/undo\nthe first\n"))
    monkeypatch.setattr("builtins.input", lambda: _line(sys.stdin))
    assert await asyncio.to_thread(cli.main, ["--url", url]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["The other.", "taken back: the second", "The one."]
    assert "/nothing is no command" in err


def _line(file: Any) -> str:
    line: str = file.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, url: str, home: Path, kind: str, verb: str = "chat") -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ.update(HOME=str(home), TERM=kind, XDG_STATE_HOME=str(home))
            path = (str(home), os.environ.get("PYTHONPATH", ""))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background ignore it
            command = [sys.executable, "-m", "radixlm", verb, "--url", url]
            os.execv(sys.executable, command)
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until it has shown this since the last time."""
        limit_s = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < limit_s, self.seen
            self._read(1.0)
        self.seen = self.seen.partition(text)[2]

    def prompt(self) -> None:
        """Until it reads keys; before that a Ctrl-D means the end of a line that it then drops."""
        self.until(">")
        limit_s = time.monotonic() + 60
        while termios.tcgetattr(self._fd)[3] & termios.ICANON:
            assert time.monotonic() < limit_s, self.seen
            self._read(0.01)

    def _read(self, wait_s: float) -> None:
        if select.select([self._fd], [], [], wait_s)[0]:
            try:
                shown = os.read(self._fd, 65536).decode("utf-8", "replace")
            except OSError:
                pytest.fail(f"it has ended: {self.seen}")
            self.seen += shown
            if "\x1b[6n" in shown:  # where is the cursor?
                self.type("\x1b[1;1R")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Its exit status; it is killed if it does not end."""
        limit_s = time.monotonic() + 30
        while time.monotonic() < limit_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    os.read(self._fd, 65536)
                except OSError:
                    continue
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        return -9


def play(url: str, home: Path, kind: str) -> int:
    terminal = Terminal(url, home, kind)
    try:
        terminal.until("/help for commands")
        for line, shows in (
            ("the thirst\x7f\x7f\x7f\x7f\x7f\x7ffirst\n", "The one."),  # backspaces
            ("/clear\n", "begins anew"),
            ("\x10\x10\n", "The one."),  # back in the history
        ):
            terminal.prompt()
            terminal.type(line)
            terminal.until(shows)
        terminal.prompt()
        terminal.type("forever\n")
        terminal.until("Hello")
        terminal.type("\x03")  # Ctrl-C stops the answer
        terminal.prompt()
        terminal.type("\x04")
    finally:
        code = terminal.end()
    return code


@pytest.mark.parametrize("library", ["readline", "prompt_toolkit"])
@pytest.mark.parametrize("kind", ["dumb", "xterm"])
async def test_on_a_terminal(slow_url: str, tmp_path: Path, kind: str, library: str) -> None:
    pytest.importorskip(library)
    if library == "readline":
        (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
    assert await asyncio.to_thread(play, slow_url, tmp_path, kind) == 0
    lines = (tmp_path / "radixlm" / "chat_history").read_text()
    assert "the first" in lines and "/clear" in lines
