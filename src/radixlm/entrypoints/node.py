"""``radixlm serve --node-rank N`` above 0: an agent that runs ranks for node 0, and a stub server.

Clients talk to node 0. Here GET /health answers 200 while the agent lives, and /ready once its
ranks run.
"""

import logging
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.log import set_up_logging
from radixlm.base.stop_signals import stop_signals
from radixlm.config.server_config import ServerConfig
from radixlm.engine.node_agent import NodeAgent, make_agent

log = logging.getLogger(__name__)


def run(config: ServerConfig, given: frozenset[str]) -> int:
    """Run the agent until node 0 stops or a signal; the exit status."""
    set_up_logging(
        f"node{config.parallel.node_rank}",
        config.observe.log_level,
        log_format=config.observe.log_format,
    )
    agent = make_agent(config, given, config.parallel.node_rank)
    for signum in stop_signals():
        signal.signal(signum, lambda *_: agent.stop())
    server = _stub(config, agent)
    threading.Thread(target=server.serve_forever, name="stub", daemon=True).start()
    try:
        return agent.run()
    finally:
        server.shutdown()
        server.server_close()


def _stub(config: ServerConfig, agent: NodeAgent) -> ThreadingHTTPServer:
    class Stub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ready = self.path == "/ready" and bool(agent.ranks)
            status = 200 if self.path == "/health" or is_ready else 404
            if self.path == "/ready" and not is_ready:
                status = 503
            text = (
                f"node {agent.node_rank}: ranks here: {len(agent.ranks)}; node 0 answers requests\n"
            )
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    host, port = config.serve.host, config.serve.port

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return Server((host, port), Stub)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; --port 0 takes a free port"
        ) from error
