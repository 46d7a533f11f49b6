"""The page in real Chromium, driven by playwright; one server and one browser for all tests.

Skipped where playwright (extra ``ui-tests``) or Chromium is missing. The ``page`` fixture fails a
test on errors of the console, violations of the Content-Security-Policy, dialogs, and requests to
another origin.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.http_server import listening, scripted_server
from tests.fakes.network import network


def __getattr__(name: str) -> Any:
    """``sync_api``: a module that imports it is skipped without playwright. A conftest.py that is
    skipped itself would end the whole run."""
    if name != "sync_api":
        raise AttributeError(name)
    return pytest.importorskip("playwright.sync_api", reason="needs playwright: extra ui-tests")


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
TIMEOUT_MS = 10_000
# a violation is told to the page only, so each document keeps its own
WATCH = """
window.cspViolations = [];
addEventListener("securitypolicyviolation", (e) => window.cspViolations.push(
  `${e.violatedDirective} ${e.blockedURI} ${e.sourceFile}:${e.lineNumber}`));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium of the system."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium on PATH")
    with __getattr__("sync_api").sync_playwright() as started:
        _loops.append(asyncio.get_running_loop())
        made = started.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield made
        asyncio._set_running_loop(_loops.pop())
        made.close()


_loops: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(autouse=True)
def playwright_loop() -> Iterator[None]:
    """Playwright's loop counts as running in this thread until it ends, and async tests after these
    ones need a loop of their own: it is hidden between tests."""
    asyncio._set_running_loop(_loops[0] if _loops else None)
    yield
    asyncio._set_running_loop(None)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server with the bundled model, without keys."""
    with RunningServer() as made:
        yield made


class Watched:
    """What a context's pages did that they must not do."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.problems: list[str] = []
        self.allowed: list[str] = []  # parts of console errors that a test provokes

    def attach(self, context: Any) -> None:
        context.add_init_script(WATCH)
        context.on("console", self._console)
        context.on("weberror", lambda error: self.problems.append(f"error: {error.error}"))
        context.on("request", self._request)
        context.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        if message.type == "error" and not any(part in message.text for part in self.allowed):
            self.problems.append(f"console: {message.text} {message.location.get('url', '')}")

    def _request(self, request: Any) -> None:
        url = request.url
        if not url.startswith((self.origin, "data:", "blob:", "about:")):
            self.problems.append(f"request to another origin: {url[:200]}")

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message[:100]}")
        dialog.dismiss()


NewPage = Callable[..., Any]


@pytest.fixture
def new_page(browser: Any, server: RunningServer) -> Iterator[NewPage]:
    """Opens pages: ``new_page(url=None, **options of the browser's context)``."""
    opened: list[tuple[Any, Watched]] = []

    def open_page(url: str | None = None, **options: Any) -> Any:
        base = url or server.url
        options = {"viewport": {"width": 1280, "height": 800}} | options
        context = browser.new_context(base_url=base, **options)
        context.set_default_timeout(TIMEOUT_MS)
        watched = Watched(base)
        watched.attach(context)
        page = context.new_page()
        page.watched = watched
        opened.append((context, watched))
        return page

    with network(changes=False):
        yield open_page
    problems: list[str] = []
    for context, watched in opened:
        for page in context.pages:
            problems += [f"CSP: {text}" for text in page.evaluate("window.cspViolations ?? []")]
        problems += watched.problems
        context.close()
    assert problems == []


@pytest.fixture
def page(new_page: NewPage) -> Any:
    """A blank page in a context of its own, whose addresses are relative to the server."""
    return new_page()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which is not in this repository."""
    path = Path(os.environ.get("AXE_CORE", f"{sys.prefix}/axe.min.js"))
    if not path.exists():
        pytest.skip(f"needs axe-core: scripts/vendor_ui --axe {path}")
    return path.read_text()


class Scripted:
    """A scripted model behind the real HTTP server, in a thread: it starts in milliseconds."""

    def __init__(self, folder: Path, script: Mapping[str, str], port: int, **options: Any) -> None:
        self._args = (folder, script, options)
        self._sock = socket.create_server(("127.0.0.1", port), reuse_port=True)
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "the scripted server does not start"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        folder, script, options = self._args
        async with scripted_server(folder, script, **options) as made:
            async with listening(made, self._sock):
                self._ready.set()
                await self._end.wait()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        self._sock.close()
        assert not self._thread.is_alive(), "the scripted server does not stop"


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture
def scripted(toy_folder: Path) -> Iterator[Callable[..., Scripted]]:
    """Starts scripted servers: ``scripted(script, port=0, **options)``."""
    started: list[Scripted] = []

    def start(script: Mapping[str, str], port: int = 0, **options: Any) -> Scripted:
        started.append(Scripted(toy_folder, script, port, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()
