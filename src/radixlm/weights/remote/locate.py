"""From a URL to a local folder: the small files of the model lie in it, and a note of where its
weights are. With --download-dir the weights too."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.private_files import make_private_folder
from radixlm.base.record import replace
from radixlm.base.units import format_bytes
from radixlm.hub.choose import choose, index_names
from radixlm.hub.fetch import locked
from radixlm.hub.locate import Wanted
from radixlm.hub.progress import Progress
from radixlm.weights.remote.place import Place, cache_root, open_reader, write_place
from radixlm.weights.remote.reader import SAMPLED, RangeReader, RemoteFile

log = logging.getLogger(__name__)

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".zip")
_CHUNK_BYTES = 8 << 20
_WEIGHTS = ".safetensors"


def refuse_archive(path: str, flag: str = "--model-path") -> None:
    """ConfigError for an archive of a checkpoint."""
    if path.lower().endswith(ARCHIVES):
        raise ConfigError(
            f"{flag} {path}: an archive cannot be read in pieces; unpack it (tar xf) and give the "
            "folder, or upload the folder's files"
        )


def locate(scheme: str, name: str, wanted: Wanted) -> Path:
    """The folder of the model, tokenizer or adapter at ``scheme``://``name``."""
    url = f"{scheme}://{name.rstrip('/')}"
    refuse_archive(url, wanted.flag)
    with open_reader(url) as reader:
        return _folder_of(reader, url, wanted)


http, https = partial(locate, "http"), partial(locate, "https")
s3, redis, rediss = partial(locate, "s3"), partial(locate, "redis"), partial(locate, "rediss")
instance = partial(locate, "instance")


def _folder_of(reader: RangeReader, url: str, wanted: Wanted) -> Path:
    files = {file.name: file for file in reader.files() if _is_safe(reader, file)}
    tensors = [file for file in files.values() if file.tensor]
    is_streamed = wanted.kind == "model" and wanted.folder is None
    if wanted.load_format in ("remote", "remote_instance"):
        wanted = replace(wanted, load_format="safetensors" if is_streamed else "auto")
    chosen = [files[name] for name in _chosen(reader, files, wanted, bool(tensors))]
    chosen = [_pinned(reader, file) for file in chosen]
    is_far = {f.name for f in chosen if is_streamed and f.name.endswith(_WEIGHTS) and _is_top(f)}
    far = [file for file in chosen if file.name in is_far]
    far += [_pinned(reader, file) for file in tensors if is_streamed]
    near = [file for file in chosen if file.name not in is_far]
    place = Place(url, tuple(far))
    key = hashlib.sha256(msgspec.json.encode((place, near))).hexdigest()[:16]
    name = PurePosixPath(url).name.replace(":", "-")
    root = Path(wanted.folder).expanduser() if wanted.folder else cache_root()
    folder = root / f"{name}-{key}"
    if not (folder / ".complete").exists():
        _fill(reader, folder, near, place)
    size = format_bytes(sum(file.size for file in far))
    log.info("%s: %d files in %s, %s of weights to stream", url, len(near), folder, size)
    return folder


def _is_safe(reader: RangeReader, file: RemoteFile) -> bool:
    """Whether a name stays in its folder; files of other folders are of no use."""
    parts = PurePosixPath(file.name).parts
    if (
        not parts
        or ".." in parts
        or file.name.startswith("/")
        or "\\" in file.name
        or "\0" in file.name
    ):
        raise CheckpointError(f"{reader.url}: {file.name!r} is not the name of a file below it")
    return True


def _is_top(file: RemoteFile) -> bool:
    return "/" not in file.name and not file.name.startswith("adapter_model")


def _chosen(
    reader: RangeReader, files: dict[str, RemoteFile], wanted: Wanted, has_tensors: bool
) -> list[str]:
    """The files that are needed; CheckpointError if there are no weights that can be read."""
    names = [name for name, file in files.items() if not file.tensor]
    if reader.url.startswith("instance://") and wanted.kind == "model":
        return names  # the seed has chosen
    shards: list[str] = []
    for index in index_names(names, wanted.load_format) if wanted.kind == "model" else ():
        try:
            shards = shards_of(reader.read(files[index]))
        except ValueError as error:
            message = f"{reader.describe(files[index])} is no weight index ({error})"
            raise CheckpointError(message) from error
        if lost := [str(name) for name in shards if name not in files]:
            raise CheckpointError(f"{reader.url}: {index} names {lost[0]}, which is not there")
    if has_tensors:
        wanted = replace(wanted, load_format="dummy")  # the weights are no files
    try:
        return choose(names, wanted, "", shards)
    except CheckpointError as error:
        hint = "" if wanted.folder else "; only safetensors are streamed, --download-dir FOLDER "
        hint += "" if wanted.folder else "fetches other formats"
        archive = next((name for name in names if name.endswith(ARCHIVES)), None)
        if archive:
            refuse_archive(f"{reader.url.rstrip('/')}/{archive}", wanted.flag)
        raise CheckpointError(f"{wanted.flag} {reader.url}: {error}{hint}") from error


def shards_of(index: bytes) -> list[str]:
    """The files that an index.json names; ValueError if it is none."""
    try:
        return sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(repr(error)) from error


def _pinned(reader: RangeReader, file: RemoteFile) -> RemoteFile:
    """The file with what tells its version from others."""
    file = reader.with_digest(file)
    return file if file.tag or file.sha256 else replace(file, tag=SAMPLED + reader.sample(file))


def _fill(reader: RangeReader, folder: Path, files: Sequence[RemoteFile], place: Place) -> None:
    """Have ``files`` and the note of ``place`` in ``folder``, by one process at a time; files of an
    earlier try are resumed."""
    with _room(folder, files), locked(folder / ".lock", reader.url):
        if (folder / ".complete").exists():  # by another process, meanwhile
            return
        missing = [file for file in files if not (folder / file.name).exists()]
        needed = sum(file.size for file in missing)
        if needed > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with Progress(reader.url, needed) as progress:
            for file in missing:
                _download(reader, folder / file.name, file, progress)
        if place.files:
            write_place(folder, place)
        (folder / ".complete").touch()


@contextmanager
def _room(folder: Path, files: Sequence[RemoteFile]) -> Iterator[None]:
    """Make ``folder``; ConfigError where the disk refuses what is done in it."""
    try:
        make_private_folder(folder)
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}; {format_bytes(sum(f.size for f in files))} are "
            "needed: give a folder with room, by --download-dir or RADIXLM_REMOTE_CACHE"
        ) from error


def _download(reader: RangeReader, path: Path, file: RemoteFile, progress: Progress) -> None:
    """A whole file, resumed at the bytes that are there, checked against its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(path.name + ".incomplete")
    with partial_path.open("a+b") as out:
        out.seek(0)
        hasher = hashlib.sha256()
        while data := out.read(_CHUNK_BYTES):
            hasher.update(data)
        done = out.tell()
        progress.add(done, is_old=True)

        def write(piece: memoryview) -> None:
            out.write(piece)
            hasher.update(piece)
            progress.add(len(piece))

        while done < file.size:
            end = min(done + reader.download_bytes, file.size)
            reader.copy(file, done, end, write)
            done = end
    told = reader.digest(file) if file.sha256 else ""
    if done != file.size or (told and hasher.hexdigest() != told):
        partial_path.unlink()
        raise CheckpointError(
            f"{reader.describe(file)}: {done} bytes with SHA-256 {hasher.hexdigest()} have come, "
            f"the store says {file.size} with {told or 'no digest'}; start again"
        )
    partial_path.rename(path)
