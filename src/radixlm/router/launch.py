"""Start of the gateway, its signals and its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence

import uvloop

from radixlm.base.addresses import unusable, url_host
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.base.stop_signals import stop_signals
from radixlm.router.app import Gateway
from radixlm.router.hand_over import hand_over
from radixlm.router.logs import set_up
from radixlm.router.options import Options, parse

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """``radixlm router``."""
    if any(word.partition("=")[0] == "--launch-servers" for word in argv):
        return int(load("radixlm.router.servers:main")(argv))
    began_s = time.monotonic()
    options = parse(argv)
    set_up_logging("router", options.log_level)
    set_up(options)
    return run(options, began_s)


Attach = Callable[[Gateway, Callable[[], None]], None]


def run(options: Options, began_s: float | None = None, attach: Attach | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. ConfigError: the address cannot be bound, a
    certificate cannot be read. ``began_s``: of time.monotonic, for the log; ``attach``: is called
    with the gateway and with what ends it, before it starts."""
    began_s = time.monotonic() if began_s is None else began_s
    context = server_context(options.tls_cert_path, options.tls_key_path)
    sock = bind(options.host, options.port, is_shared=options.reuse_port)
    status: int = uvloop.run(_serve(options, sock, context, began_s, attach))
    return status


async def _serve(
    options: Options,
    sock: socket.socket,
    context: ssl.SSLContext | None,
    began_s: float,
    attach: Attach | None,
) -> int:
    gateway = Gateway(options)
    signals: asyncio.Queue[int] = asyncio.Queue()
    if attach is not None:
        attach(gateway, lambda: signals.put_nowait(signal.SIGTERM))
    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, signals.put_nowait, signum)
    try:
        await gateway.start(sock, context)
        scheme = "https" if context else "http"
        log.info(
            "ready on %s://%s:%d after %.2f s",
            scheme,
            url_host(options.host),
            sock.getsockname()[1],
            time.monotonic() - began_s,
        )
        await signals.get()
        grace_s = options.shutdown_grace_period_secs
        log.info("ending: %d requests under way get %g s", gateway.server.num_active, grace_s)
        if options.reuse_port and await hand_over(sock):
            log.info("the gateway that was started after this one has the port")
        draining = asyncio.ensure_future(gateway.drain(grace_s))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        if gateway.server.num_active:
            log.warning("cut %d requests", gateway.server.num_active)
        for task in (draining, again):
            task.cancel()
    finally:
        await gateway.stop()
    log.info("stopped")
    return 0


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket, not yet listening. ``is_shared``: another process may have the port too.
    ConfigError: the address is taken or is none of this machine's."""
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        raise unusable(error, host, "--port", port, "--port 0 takes a free one") from error
    sock.setblocking(False)
    return sock


def server_context(cert_path: str | None, key_path: str | None) -> ssl.SSLContext | None:
    """TLS for clients, or None. ConfigError: only one of the two files, or one is not PEM."""
    if not cert_path and not key_path:
        return None
    if not cert_path or not key_path:
        raise ConfigError("--tls-cert-path and --tls-key-path: give both, or none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_path, key_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert-path {cert_path}: {error}") from error
    return context
