"""Bytes of an image that a request names: data URI, base64, http(s), file; within limits.

Against server-side request forgery, addresses that are not public are refused: each redirect is
checked anew, and the connection is made to the address that was checked. Large and slow answers
are refused too. Only regular files are read, of allowed folders.
"""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record

MAX_REDIRECTS = 3
_CHUNK = 1 << 16


class FetchRules(Record):
    """``folders``: where files may be read from. ``allow_private``: also addresses of this
    machine and its network. ``domains``: whose hosts may be asked, subdomains too; (): all."""

    max_bytes: int = 32 << 20
    timeout_s: float = 10.0
    allow_private: bool = False
    folders: tuple[Path, ...] = ()
    domains: tuple[str, ...] = ()


def fetch(source: str, rules: FetchRules, where: str) -> bytes:
    """The bytes; InvalidRequest naming ``where`` for what is refused or cannot be fetched."""
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        return _data(source, rules, where)
    if is_web(source):
        return _web(source, rules, where)
    if scheme.startswith("file://") or source.startswith(("/", "./", "../", "~")):
        return _file(source, rules, where)
    if "://" in source[:32]:
        raise InvalidRequest(f"{where}: use http, https, file or data, not {source[:32]!r}", where)
    return _base64(source, rules, where)


def is_web(source: str) -> bool:
    """Whether a source is a web address."""
    return source[:8].lower().startswith(("http://", "https://"))


def host_of(url: str) -> str:
    """The host of a web address; "" where it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _data(source: str, rules: FetchRules, where: str) -> bytes:
    head, mark, body = source.partition(",")
    if not mark:
        raise InvalidRequest(f"{where}: a data URI needs a comma before its data", where)
    if head.lower().endswith(";base64"):
        return _base64(body, rules, where)
    return _small(unquote(body).encode("latin-1", "replace"), rules, where)


def _base64(text: str, rules: FetchRules, where: str) -> bytes:
    if len(text) > rules.max_bytes * 4 // 3 + 4:
        raise _too_large(rules, where)
    if "%" in text:  # a data URI may spell +, / and = so
        text = unquote(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        message = f"{where}: neither a URL nor base64 ({text[:40]!r})"
        raise InvalidRequest(message, where) from None


def _small(data: bytes, rules: FetchRules, where: str) -> bytes:
    if len(data) > rules.max_bytes:
        raise _too_large(rules, where)
    return data


def _too_large(rules: FetchRules, where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: more than {rules.max_bytes >> 20} MiB", where)


def _file(source: str, rules: FetchRules, where: str) -> bytes:
    refused = InvalidRequest(
        f"{where}: files are read from the folders of --allow-local-media only", where
    )
    if not rules.folders or "\0" in source:
        raise refused
    raw = unquote(urlsplit(source).path) if source.lower().startswith("file://") else source
    try:
        path = Path(raw).expanduser().resolve()
        if not _is_inside(path, rules):
            raise refused
        is_regular = stat.S_ISREG(path.stat().st_mode)
        data = _read_regular(path, rules) if is_regular else None
    except InvalidRequest:
        raise
    except (OSError, RuntimeError, ValueError):
        raise InvalidRequest(f"{where}: the file cannot be read", where) from None
    if data is None:
        raise InvalidRequest(f"{where}: only regular files are read", where)
    return _small(data, rules, where)


def _is_inside(path: Path, rules: FetchRules) -> bool:
    return any(path.is_relative_to(folder.resolve()) for folder in rules.folders)


def _read_regular(path: Path, rules: FetchRules) -> bytes | None:
    """At most ``max_bytes`` and one; None for what is no regular file inside the folders. The
    path may have changed since it was checked, so the opened file is checked again."""
    # opening a FIFO would wait for a writer without O_NONBLOCK
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        opened = Path(f"/proc/self/fd/{handle}")
        if opened.exists() and not _is_inside(opened.resolve(), rules):
            return None
        return file.read(rules.max_bytes + 1)


def _web(url: str, rules: FetchRules, where: str) -> bytes:
    deadline_s = time.monotonic() + rules.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        try:
            body, target = _get(url, rules, where, deadline_s)
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
            message = f"{where}: cannot be fetched ({type(error).__name__})"
            raise InvalidRequest(message, where) from None
        if body is not None:
            return body
        url = urljoin(url, target)
        if not url.lower().startswith(("http://", "https://")):
            raise InvalidRequest(f"{where}: redirected to what is no web address", where)
    raise InvalidRequest(f"{where}: more than {MAX_REDIRECTS} redirects", where)


def _get(url: str, rules: FetchRules, where: str, deadline_s: float) -> tuple[bytes | None, str]:
    """(body, "") or (None, where it is redirected to)."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if rules.domains and not any(f".{host}".endswith(f".{one}") for one in rules.domains):
        message = f"{where}: {host[:80]!r} is not in --allowed-media-domains"
        raise InvalidRequest(message, where)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _address(host, port, rules, where)
    timeout_s = max(0.1, deadline_s - time.monotonic())
    raw = socket.create_connection((address, port), timeout_s)  # a number: nothing is looked up
    # a timeout of the socket is one of each read: a server may send a byte now and then for hours
    line = raw.dup()  # TLS takes the first
    watch = threading.Timer(timeout_s, _hang_up, (line,))
    watch.daemon = True
    watch.start()
    try:
        return _asked(raw, url, rules, where, deadline_s)
    finally:
        watch.cancel()
        line.close()
        raw.close()


def _hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _asked(
    raw: socket.socket, url: str, rules: FetchRules, where: str, deadline_s: float
) -> tuple[bytes | None, str]:
    """What the other end of ``raw`` answers."""
    parts = urlsplit(url)
    host, timeout_s = parts.hostname or "", raw.gettimeout()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme == "https":
        raw = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    connection.sock = raw
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "radixlm"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return None, answer.getheader("Location") or ""
        if answer.status != 200:
            raise InvalidRequest(f"{where}: the server answered {answer.status}", where)
        return _body(answer, rules, where, deadline_s), ""
    finally:
        connection.close()


def _body(
    answer: http.client.HTTPResponse, rules: FetchRules, where: str, deadline_s: float
) -> bytes:
    parts, size = [], 0
    while chunk := answer.read1(_CHUNK):
        size += len(chunk)
        if size > rules.max_bytes:
            raise _too_large(rules, where)
        if time.monotonic() > deadline_s:
            raise InvalidRequest(f"{where}: took longer than {rules.timeout_s:g} s", where)
        parts.append(chunk)
    if time.monotonic() > deadline_s:
        raise InvalidRequest(f"{where}: took longer than {rules.timeout_s:g} s", where)
    return b"".join(parts)


def _address(host: str, port: int, rules: FetchRules, where: str) -> str:
    """The address to connect to: the first one of a host all of whose addresses are public."""
    addresses = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not rules.allow_private and not all(is_public(str(address)) for address in addresses):
        message = f"{where}: addresses of this network are refused (--allow-local-media)"
        raise InvalidRequest(message, where)
    return str(addresses[0])


_UNICAST = ipaddress.IPv6Network("2000::/3")  # all global unicast addresses (RFC 4291)
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")  # RFC 9637, which Python 3.11 does not know
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the IPv4 address is in the last four bytes
_ISATAP = (0x00005EFE, 0x02005EFE)  # the third word of eight bytes before an IPv4 address


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address in digits is of the public internet. IPv6 addresses that
    carry an IPv4 address, which a gateway connects to, are public where both are."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    if ip.ipv4_mapped is not None:
        return is_public(str(ip.ipv4_mapped))
    low = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip in _NAT64:
        return is_public(str(low))
    if ip not in _UNICAST or ip in _DOCUMENTATION or not ip.is_global:
        return False
    carried = [ip.sixtofour, *(ip.teredo or ())]
    if int(ip) >> 32 & 0xFFFFFFFF in _ISATAP:
        carried.append(low)
    return all(one is None or is_public(str(one)) for one in carried)
