"""http(s)://: byte ranges of a web server, over connections that are kept open."""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from radixlm.base import env
from radixlm.base.errors import CheckpointError
from radixlm.weights.remote.reader import (
    COPY_BYTES,
    SAMPLED,
    TIMEOUT_S,
    Body,
    PassingFault,
    RangeReader,
    RemoteFile,
)

# what a folder may hold, asked for one by one where the server lists nothing
KNOWN_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json", "modules.json"),
    *("hf_quant_config.json", "model.safetensors.index.json", "model.safetensors"),
)
LIST_FILES = ("files.json", "files.txt")
MAX_LIST_BYTES = 64 << 20
MAX_REDIRECTS = 5
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_HREF = re.compile(r"""<a\s[^>]*href=["']([^"'?#]+)["']""", re.IGNORECASE)
_HINTS = {401: "; the key goes into RADIXLM_WEIGHTS_KEY", 403: "; may the key read it?"}
_BREAKS = (OSError, http.client.HTTPException)  # of a connection


class HttpReader(RangeReader):
    """Files below ``url``. ``key``: a bearer token, which no other host is told.

    Names come from files.json (names, or objects with name, size, etag, sha256), files.txt, the
    server's own index page, or else are those that a checkpoint folder usually has.
    """

    download_bytes = 1 << 62  # in one answer: servers without byte ranges have no other

    def __init__(
        self, url: str, key: str = "", timeout_s: float = TIMEOUT_S, **options: Any
    ) -> None:
        super().__init__(url if url.endswith("/") else url + "/", **options)
        self._base = self.url
        self._key, self._timeout_s = key, timeout_s
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._final: dict[str, str] = {}  # name -> where redirects have led

    def files(self) -> Sequence[RemoteFile]:
        for name in LIST_FILES:
            if (text := self._text(name)) is not None:
                return self._listed(name, text)
        names = _HREF.findall(self._text("") or "")
        names = [unquote(name).removeprefix("./") for name in names]
        names = [name for name in names if name and "/" not in name and name not in (".", "..")]
        found = [file for name in names or KNOWN_FILES if (file := self.stat(name)) is not None]
        known = {file.name for file in found}
        for index in [file for file in found if file.name.endswith(".safetensors.index.json")]:
            found += [self.require(name) for name in _indexed(self, index) if name not in known]
        if not found:
            raise CheckpointError(f"{self.url} has no config.json, files.json or index page")
        return found

    def _address(self, name: str) -> str:
        return self._base + quote(name)  # not joined: a name may begin with //

    def _listed(self, name: str, text: str) -> list[RemoteFile]:
        """The files of a list; those without a size are asked for."""
        try:
            rows = json.loads(text) if name.endswith(".json") else text.split()
            rows = rows["files"] if isinstance(rows, dict) else rows
            return [
                self.require(row)
                if isinstance(row, str)
                else RemoteFile(
                    row["name"], int(row["size"]), row.get("etag", ""), row.get("sha256", "")
                )
                for row in rows
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.url}{name} is no list of files ({error!r}); for example: "
                '[{"name": "config.json", "size": 700}, "model.safetensors"]'
            ) from error

    def require(self, name: str) -> RemoteFile:
        """The file; CheckpointError if it is absent."""
        file = self.stat(name)
        if file is None:
            raise CheckpointError(f"{self.url}{name}: 404, but it is listed")
        return file

    def stat(self, name: str) -> RemoteFile | None:
        """Size, tag and digest of a file; None if there is none."""

        def head() -> RemoteFile | None:
            with self._request("HEAD", name, {}) as answer:
                if answer.status == 404:
                    return None
                size = answer.headers.get("Content-Length", "")
                if not size.isdigit():
                    raise CheckpointError(f"{self.url}{name}: the server says no Content-Length")
                return RemoteFile(name, int(size), _tag(answer.headers), _sha256(answer.headers))

        return self.attempt(f"{self.url}{name}", head)

    def _text(self, name: str) -> str | None:
        def get() -> str | None:
            with self._request("GET", name, {}, absent=(403, 404)) as answer:
                if answer.status in (403, 404):
                    return None
                try:
                    return answer.read(MAX_LIST_BYTES).decode("utf-8", "replace")
                except _BREAKS as error:
                    raise PassingFault(str(error)) from error

        return self.attempt(f"{self.url}{name}", get)

    @contextmanager
    def _open(self, file: RemoteFile, start: int, end: int) -> Iterator[Body]:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        is_strong = file.tag.startswith('"')
        is_sampled = not file.tag or file.tag.startswith(SAMPLED)
        if is_strong:
            headers["If-Match"] = file.tag
        with self._request("GET", file.name, headers, absent=(404, 412, 416)) as answer:
            where = f"{self.url}{file.name}"
            tag, status = _tag(answer.headers), answer.status
            if status in (404, 412, 416) or (tag and tag != file.tag and not is_sampled):
                raise CheckpointError(
                    f"{where} changed while it was read: status {status}, it was "
                    f"{file.tag or 'there'}, it is {tag or 'gone'}; start again"
                )
            if status != 206 and end < file.size:
                raise CheckpointError(
                    f"{where}: the server sends no byte ranges (status {status}); --download-dir "
                    "FOLDER fetches whole files"
                )
            skipped = 0 if status == 206 else start
            self._check_length(where, answer, file, end - start + skipped)
            yield _Answer(answer, skipped)

    @staticmethod
    def _check_length(
        where: str, answer: http.client.HTTPResponse, file: RemoteFile, expected: int
    ) -> None:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdigit() and int(total) != file.size:
            raise CheckpointError(f"{where} has {total} bytes, expected {file.size}: start again")
        length = answer.headers.get("Content-Length", "")
        if length.isdigit() and int(length) != expected:
            raise CheckpointError(f"{where}: the answer has {length} bytes, expected {expected}")

    @contextmanager
    def _request(
        self, method: str, name: str, headers: Mapping[str, str], absent: Sequence[int] = (404,)
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer of status 2xx or of ``absent``. A connection whose answer was not read to its
        end is closed."""
        url = self._final.get(name) or self._address(name)
        for _ in range(MAX_REDIRECTS):
            with self._sent(method, url, headers) as answer:
                if answer.status not in _REDIRECTS:
                    self._check(name, answer, absent)
                    yield answer
                    return
                self._final[name] = url = urljoin(url, answer.headers.get("Location", ""))
        raise CheckpointError(f"{self.url}{name}: more than {MAX_REDIRECTS} redirects")

    def _check(self, name: str, answer: Any, absent: Sequence[int]) -> None:
        status, what = answer.status, f"{answer.status} {answer.reason}"
        if 200 <= status < 300 or status in absent:
            return
        if status in _PASSING:
            after = answer.headers.get("Retry-After", "")
            raise PassingFault(what, float(after) if after.isdigit() else None)
        if self._final.pop(name, None):  # a signed address expires: ask for the next one
            raise PassingFault(what)
        raise CheckpointError(f"{self.url}{name}: {what}{_HINTS.get(status, '')}")

    @contextmanager
    def _sent(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request. Its connection is kept if the answer was read to its end."""
        parts, own = urlsplit(url), urlsplit(self._base)
        sent = {"User-Agent": "radixlm", "Accept-Encoding": "identity", **headers}
        place = (parts.scheme, parts.netloc)
        if self._key and place == (own.scheme, own.netloc):
            sent["Authorization"] = f"Bearer {self._key}"
        with self._lock:
            idle = self._idle.setdefault(place, [])
            connection = idle.pop() if idle else self._connection(*place)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        answer = None
        try:
            try:
                connection.request(method, path, headers=sent)
                answer = connection.getresponse()
            except _BREAKS as error:
                raise PassingFault(f"{type(error).__name__}: {error}") from error
            yield answer
        finally:
            is_whole = answer is not None and answer.length == 0  # no byte is missing
            if answer is not None and is_whole:
                answer.read()
            with self._lock:
                if not is_whole or self.is_closed:
                    connection.close()
                else:
                    idle.append(connection)
            if answer is not None:
                answer.close()

    def close(self) -> None:
        super().close()
        with self._lock:
            for connection in [c for idle in self._idle.values() for c in idle]:
                connection.close()
            self._idle.clear()

    def _connection(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        if scheme not in ("http", "https"):
            raise CheckpointError(
                f"{self.url}: a redirect leads to {scheme}://; expected http(s)://"
            )
        try:
            if scheme == "http":
                return http.client.HTTPConnection(netloc, timeout=self._timeout_s)
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(netloc, timeout=self._timeout_s, context=context)
        except http.client.InvalidURL as error:
            raise CheckpointError(f"{self.url}: a redirect leads nowhere: {error}") from error


def open_http(url: str) -> HttpReader:
    """The reader of a web server's folder."""
    return HttpReader(url, env.WEIGHTS_KEY.get())


class _Answer:
    """The body of an answer behind its first ``skipped`` bytes, read straight into the caller's
    memory."""

    def __init__(self, answer: http.client.HTTPResponse, skipped: int) -> None:
        self._answer, self._skipped = answer, skipped

    def readinto(self, view: memoryview, /) -> int:
        try:
            while self._skipped:
                count = len(self._answer.read(min(self._skipped, COPY_BYTES)))
                if not count:
                    return 0
                self._skipped -= count
            return self._answer.readinto(view)
        except _BREAKS as error:
            raise PassingFault(f"{type(error).__name__}: {error}") from error


def _indexed(reader: RangeReader, index: RemoteFile) -> list[str]:
    """The files that an index.json names."""
    try:
        return sorted(set(json.loads(reader.read(index))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{reader.describe(index)}: not a weight index ({error!r})"
        ) from error


def _tag(headers: Any) -> str:
    """The ETag, or when the file was modified."""
    if tag := headers.get("ETag", ""):
        return str(tag)
    try:
        return parsedate_to_datetime(headers.get("Last-Modified", "")).astimezone(UTC).isoformat()
    except ValueError:
        return ""


def _sha256(headers: Any) -> str:
    """SHA-256 of the whole file, as hubs and S3's servers say it."""
    for name in ("X-Linked-ETag", "X-Checksum-Sha256"):
        value = headers.get(name, "").strip('"').lower()
        if re.fullmatch("[0-9a-f]{64}", value):
            return str(value)
    return ""
