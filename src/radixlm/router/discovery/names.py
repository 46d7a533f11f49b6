"""Names whose every address is a worker, asked of DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from radixlm.base.errors import ConfigError
from radixlm.router.discovery.source import Source

log = logging.getLogger(__name__)

LOOKS = 3  # that an address may be missing in: answers may be parts, or old


class Names:
    """``texts``: "host:port" or "https://host:port" each."""

    def __init__(self, texts: Sequence[str], source: Source) -> None:
        """ConfigError: a text has no port."""
        self._names = [_split(text) for text in texts]
        self._source = source
        self._missed: list[dict[str, int]] = [{} for _ in texts]  # url -> looks without it
        self._failed: set[str] = set()

    async def look(self) -> None:
        """Ask for all names. One that cannot be asked keeps its workers."""
        for place, (scheme, host, port) in enumerate(self._names):
            found = await self._addresses(host, port)
            if found is None:
                continue
            before = self._missed[place].items()
            missed = {url: count + 1 for url, count in before if count + 1 < LOOKS}
            now = {f"{scheme}://{address}:{port}": 0 for address in found}
            self._missed[place] = missed | now
        self._source.sync({url: {} for missed in self._missed for url in missed})

    async def _addresses(self, host: str, port: int) -> list[str] | None:
        """The addresses of a name, those of IPv6 in brackets; None if it cannot be asked."""
        try:
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if host not in self._failed:
                self._failed.add(host)
                log.warning("dns discovery: %s: %s", host, error)
            return None
        self._failed.discard(host)
        addresses = dict.fromkeys(str(info[4][0]) for info in infos)
        return [f"[{one}]" if ":" in one else one for one in addresses]


def _split(text: str) -> tuple[str, str, int]:
    scheme, mark, rest = text.partition("://")
    host, colon, port = (rest if mark else text).rpartition(":")
    if (mark and scheme not in ("http", "https")) or not host or not colon or not port.isdigit():
        raise ConfigError(f"--discovery-dns {text!r}: workers.default.svc:30000 works")
    return (scheme if mark else "http"), host.strip("[]"), int(port)
