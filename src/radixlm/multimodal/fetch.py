"""Bytes of an image that a request names: data URI, base64, http(s), file; within limits.

Against server-side request forgery, addresses that are not public are refused: each redirect is
checked anew, and the connection is made to the address that was checked. Large and slow answers
are refused too. Files are read from allowed folders only.
"""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
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
    machine and its network."""

    max_bytes: int = 32 << 20
    timeout_s: float = 10.0
    allow_private: bool = False
    folders: tuple[Path, ...] = ()


def fetch(source: str, rules: FetchRules, where: str) -> bytes:
    """The bytes; InvalidRequest naming ``where`` for what is refused or cannot be fetched."""
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        return _data(source, rules, where)
    if scheme.startswith(("http://", "https://")):
        return _web(source, rules, where)
    if scheme.startswith("file://") or source.startswith(("/", "./", "../", "~")):
        return _file(source, rules, where)
    if "://" in source[:32]:
        raise InvalidRequest(f"{where}: use http, https, file or data, not {source[:32]!r}", where)
    return _base64(source, rules, where)


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
        if not any(path.is_relative_to(folder.resolve()) for folder in rules.folders):
            raise refused
        if path.stat().st_size > rules.max_bytes:
            raise _too_large(rules, where)
        return path.read_bytes()
    except (OSError, RuntimeError, ValueError):
        raise InvalidRequest(f"{where}: the file cannot be read", where) from None


def _web(url: str, rules: FetchRules, where: str) -> bytes:
    deadline_s = time.monotonic() + rules.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        try:
            body, target = _get(url, rules, where, deadline_s)
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
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _address(host, port, rules, where)
    timeout_s = max(0.1, deadline_s - time.monotonic())
    raw = socket.create_connection((address, port), timeout_s)
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
    if not rules.allow_private:
        for address in addresses:
            ip = ipaddress.ip_address(str(address).partition("%")[0])
            if not ip.is_global or ip.is_multicast:
                message = f"{where}: addresses of this network are refused (--allow-local-media)"
                raise InvalidRequest(message, where)
    return str(addresses[0])
