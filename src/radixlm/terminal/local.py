"""The server that a chat talks to: one that runs here, or one of its own while it lasts."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from radixlm.base.errors import ConfigError
from radixlm.engine.startup import die_with_parent
from radixlm.terminal.api import Api, Refused

DEFAULT_URL = "http://127.0.0.1:30000"
_POLL_S = 0.1


def running(key: str | None) -> Api | None:
    """The server at the usual port, if there is one that answers."""
    api = Api(DEFAULT_URL, key)
    with contextlib.suppress(Refused, OSError), socket.create_connection(("127.0.0.1", 30000), 0.2):
        names = api.models(wait_s=2.0)
        if names:
            api.model = names[0]
            return api
    return None


@contextlib.contextmanager
def own_server(options: Sequence[str], key: str | None) -> Iterator[Api]:
    """A server with these options, among them its ``key``, on a free port of this machine.
    ConfigError if it does not come up; what it says of that is on standard error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "radixlm", "serve", *options]
    if not any(word.replace("_", "-").partition("=")[0] == "--log-level" for word in options):
        command += ["--log-level", "warning"]
    # the last of a flag holds; a session of its own: Ctrl-C is for the chat
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-cache-report"]
    child = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=sys.stderr,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        yield _await(child, f"http://127.0.0.1:{port}", key)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _await(child: subprocess.Popen[bytes], url: str, key: str | None) -> Api:
    api = Api(url, key)
    while child.poll() is None:
        with contextlib.suppress(Refused):
            api.read("/health")  # 503 until the model has answered
            api.model = api.models(wait_s=2.0)[0]
            return api
        time.sleep(_POLL_S)
    raise ConfigError(
        f"the model could not be loaded (radixlm serve ended with {child.returncode})"
    )
