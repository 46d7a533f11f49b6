"""Hosts in URLs, and addresses that cannot be had."""

import errno
import socket

from radixlm.base.errors import ConfigError


def url_host(host: str) -> str:
    """A name or address as URLs have it: IPv6 in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def unusable(
    error: OSError | UnicodeError, host: str, flag: str, port: int, works: str
) -> ConfigError:
    """Why nothing can listen at ``host`` and the port of ``flag``. ``works``: what to do about the
    port. UnicodeError: the host cannot be written as a name."""
    number = getattr(error, "errno", None)
    if isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL:
        works = "--host 127.0.0.1 works, and --host 0.0.0.0 for other machines"
    why = getattr(error, "strerror", None) or "no name of a host"
    return ConfigError(f"--host {host} {flag} {port}: {why}; {works}")
