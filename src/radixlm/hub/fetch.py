"""Downloads of files: in parallel, resumed where they broke off, checked by hash, once for all
processes of the machine."""

import errno
import fcntl
import hashlib
import logging
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.base.record import Record, field
from radixlm.base.units import format_bytes
from radixlm.hub.progress import Progress

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0  # without a byte
MAX_TRIES = 6  # in a row without a new byte
MAX_WRONG = 2  # downloads whose hash is wrong, before the file is given up
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
MAX_PAUSE_S = 60.0  # that a server may ask for
WORKERS = 8
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class Download(Record):
    """One file to have at ``path``. ``digest``: "sha256:<hex>", "git:<hex>" (SHA-1 of git's blob),
    or "" where the hub gives none. ``headers`` go to the host of ``url`` alone, not to others that
    it redirects to."""

    name: str
    url: str
    path: Path
    size: int
    digest: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    denied: str = ""  # what to do after 401 or 403

    @property
    def partial(self) -> Path:
        """Where the bytes lie until they are all there."""
        return self.path.with_name(self.path.name + ".incomplete")


def fetch_all(title: str, files: Sequence[Download], lock_dir: Path) -> None:
    """Have all ``files``. ConfigError without room for them, TransferError if the network or the
    server fails for good, CheckpointError for bytes that are wrong again and again."""
    files = [file for file in files if not file.path.exists()]
    if not files:
        return
    _check_room(title, files)
    stop = threading.Event()
    with Progress(title, sum(file.size for file in files)) as progress:
        pool = ThreadPoolExecutor(WORKERS, "download")
        try:
            largest_first = sorted(files, key=lambda file: -file.size)
            tasks = [pool.submit(_fetch, file, lock_dir, progress, stop) for file in largest_first]
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _check_room(title: str, files: Sequence[Download]) -> None:
    folder = files[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(file.partial.stat().st_size for file in files if file.partial.exists())
    needed, free = sum(file.size for file in files) - there, shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{title}: {format_bytes(needed)} are to be downloaded to {folder}, where "
            f"{format_bytes(free)} are free; name a folder with room by --download-dir or HF_HOME"
        )


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``, which other programs that use the cache know too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process downloads it; waiting for that", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(file: Download, lock_dir: Path, progress: Progress, stop: threading.Event) -> None:
    with locked(lock_dir / f"{file.path.name}.lock", file.name):
        if file.path.exists():  # by another process, meanwhile
            progress.add(file.size)
            return
        try:
            for number in range(MAX_WRONG + 1):
                found = _complete(file, progress, stop)
                if stop.is_set():
                    return
                is_whole = file.partial.stat().st_size == file.size
                if is_whole and (not file.digest or found == file.digest):
                    file.partial.replace(file.path)
                    return
                file.partial.unlink()
                progress.add(-file.size)
                again = "; fetching it anew" if number < MAX_WRONG else ""
                log.warning("%s: %s instead of %s%s", file.name, found, file.digest, again)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(
                    f"{file.name}: no space is left in {file.path.parent}; name a folder with room "
                    "by --download-dir or HF_HOME, what is there so far is kept"
                ) from error
            raise
    raise CheckpointError(
        f"{file.name}: the hash was wrong {MAX_WRONG + 1} times: {file.url} or a proxy before it "
        "sends damaged bytes"
    )


def _complete(file: Download, progress: Progress, stop: threading.Event) -> str:
    """Fill ``file.partial``, from where it ends; its digest. TransferError after too many tries
    without a byte."""
    num_failed = 0
    digest = _Digest(file)
    with file.partial.open("ab+") as out:
        out.seek(0)
        while block := out.read(CHUNK_BYTES):
            digest.update(block)
            progress.add(len(block), is_old=True)
        while (start := out.tell()) < file.size and not stop.is_set():
            try:
                _receive(file, out, digest, progress, stop)
            except (OSError, HTTPException) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                num_failed = 0 if out.tell() > start else num_failed
                _pause(file, error, num_failed, stop)
                num_failed += 1
    return str(digest)


def _receive(
    file: Download, out: Any, digest: "_Digest", progress: Progress, stop: threading.Event
) -> None:
    """Append what one answer brings."""
    start = out.tell()
    with _open(file, start) as answer:
        if start and answer.status != 206:  # the whole file again
            out.truncate(0)
            out.seek(0)
            progress.add(-start)
            digest.reset()
            start = 0
        while not stop.is_set() and (block := answer.read(CHUNK_BYTES)):
            if out.tell() + len(block) > file.size:
                raise CheckpointError(f"{file.name}: {file.url} sends more than {file.size} bytes")
            out.write(block)
            digest.update(block)
            progress.add(len(block))
        out.flush()
    if not stop.is_set() and out.tell() < file.size:
        raise HTTPException(f"the connection ended after {out.tell()} of {file.size} bytes")


def _open(file: Download, start: int) -> Any:
    request = urllib.request.Request(file.url)
    for name, value in file.headers.items():
        request.add_unredirected_header(name, value)
    if start:
        request.add_header("Range", f"bytes={start}-")
    return urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_S)


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Headers go along where a redirect stays on the host (of a repository with a new name)."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]:
            new.unredirected_hdrs.update(req.unredirected_hdrs)
        return new


def _pause(file: Download, error: Exception, num_failed: int, stop: threading.Event) -> None:
    """Wait before the next try; TransferError if there is to be none."""
    host = urlsplit(file.url).netloc
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code not in _TRANSIENT:
            hint = f": {file.denied}" if error.code in (401, 403) and file.denied else ""
            raise ConfigError(
                f"{file.name}: {host} answers {error.code} {error.reason}{hint}"
            ) from error
    if num_failed + 1 >= MAX_TRIES:
        raise TransferError(
            f"{file.name}: {host} cannot be read ({error}); start again to go on with the download"
        ) from error
    pause_s = PAUSES_S[min(num_failed, len(PAUSES_S) - 1)]
    asked = error.headers.get("Retry-After") if isinstance(error, urllib.error.HTTPError) else None
    if asked and asked.isdigit():
        pause_s = min(float(asked), MAX_PAUSE_S)
    log.warning("%s: %s; trying again in %g s", file.name, error, pause_s)
    stop.wait(pause_s)


class _Digest:
    """The hash of a file in the kind that its hub gives."""

    def __init__(self, file: Download) -> None:
        self._kind, self._size = file.digest.partition(":")[0], file.size
        self.reset()

    def reset(self) -> None:
        self._hash = _new_hash(self._kind, self._size)

    def update(self, block: bytes) -> None:
        if self._kind:
            self._hash.update(block)

    def __str__(self) -> str:
        return f"{self._kind}:{self._hash.hexdigest()}" if self._kind else ""


def _new_hash(kind: str, size: int) -> Any:
    """Of a file of so many bytes: git's where ``kind`` is "git", else SHA-256."""
    if kind != "git":
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size}\0".encode())


def digest_of(path: Path, kind: str) -> str:
    """The hash of a file, "sha256:..." or "git:..."."""
    state = _new_hash(kind, path.stat().st_size)
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, lambda: state).hexdigest()}"
