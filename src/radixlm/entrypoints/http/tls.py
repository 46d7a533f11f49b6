"""TLS of the server: its context, by the flags, and new certificates while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.config.serve import ServeConfig

log = logging.getLogger(__name__)

POLL_S = 5.0


def make_context(serve: ServeConfig) -> ssl.SSLContext | None:
    """None without --ssl-certfile. ConfigError names the file that cannot be used."""
    if serve.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(serve, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')}: give --ssl-certfile FILE too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"] if serve.enable_http2 else ["http/1.1"])
    _load(context, serve)
    return context


def _load(context: ssl.SSLContext, serve: ServeConfig) -> None:
    assert serve.ssl_certfile is not None
    for flag in ("ssl_certfile", "ssl_keyfile"):
        name = getattr(serve, flag)
        if name is not None and not Path(name).is_file():
            raise ConfigError(f"--{flag.replace('_', '-')} {name}: there is no such file")
    password = serve.ssl_keyfile_password or ""  # without one, OpenSSL asks at the terminal
    try:
        context.load_cert_chain(serve.ssl_certfile, serve.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        key = f" --ssl-keyfile {serve.ssl_keyfile}" if serve.ssl_keyfile else ""
        raise ConfigError(f"--ssl-certfile {serve.ssl_certfile}{key}: {error}") from error
    if serve.ssl_ca_certs is None:
        return
    try:
        context.load_verify_locations(serve.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-ca-certs {serve.ssl_ca_certs}: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED


class Refresher:
    """Reads changed files into a context; connections under way keep what they have."""

    def __init__(self, context: ssl.SSLContext, serve: ServeConfig) -> None:
        self._context, self._serve = context, serve
        named = (serve.ssl_certfile, serve.ssl_keyfile, serve.ssl_ca_certs)
        self._files = [Path(name) for name in named if name is not None]
        self._seen = self._times()

    def _times(self) -> list[int]:
        return [file.stat().st_mtime_ns for file in self._files]

    def look(self) -> bool:
        """Read them if one has changed; whether that worked. A half-written file is tried again at
        the next look."""
        try:
            times = self._times()
            if times == self._seen:
                return False
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._serve)  # as a trial
            _load(self._context, self._serve)
        except (OSError, ConfigError) as error:
            log.warning("the certificate stays as it is: %s", error)
            return False
        self._seen = times
        log.info("the certificate was read again")
        return True

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.look)
