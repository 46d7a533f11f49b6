"""Place: where the weights of a model lie, kept in a local folder beside its config and tokenizer.

The folder stands for the model everywhere: ranks, replicas and restarted engines read the same
versions of the same files.
"""

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from radixlm.base import env
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import load
from radixlm.base.private_files import write_private
from radixlm.base.record import Record
from radixlm.weights.remote.reader import RangeReader, RemoteFile

PLACE_FILE: Final = "weights.remote"
READERS: Final = {
    "http": "radixlm.weights.remote.http:open_http",
    "https": "radixlm.weights.remote.http:open_http",
    "s3": "radixlm.weights.remote.s3:S3Reader",
    "redis": "radixlm.weights.remote.redis:RedisReader",
    "rediss": "radixlm.weights.remote.redis:RedisReader",
    "instance": "radixlm.weights.remote.instance:InstanceReader",
}


class Place(Record):
    """``url`` of a folder, without credentials; ``files``: those with weights."""

    url: str
    files: tuple[RemoteFile, ...]


def open_reader(url: str) -> RangeReader:
    """The reader of a URL; ConfigError for one that cannot be read."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(
            f"--model-path: the URL cannot be read ({error}); for example https://host:8080/model"
        ) from error
    if parts.scheme not in READERS or not parts.netloc:
        known = ", ".join(f"{scheme}://" for scheme in READERS)
        raise ConfigError(f"--model-path {url!r}: no such source of weights; expected {known}")
    if "@" in parts.netloc:
        raise ConfigError(
            f"--model-path {parts.scheme}://...@{parts.netloc.rpartition('@')[2]}: a URL must not "
            "hold a password, which process lists show; see docs/weight-sources.md"
        )
    if parts.query:  # it may be a signature: no message shows it
        raise ConfigError(
            f"--model-path {parts.scheme}://{parts.netloc}{parts.path}?...: a URL names a folder, "
            f"without a query; for example {parts.scheme}://{parts.netloc}/model"
        )
    reader: RangeReader = load(READERS[parts.scheme])(url)
    return reader


def cache_root() -> Path:
    """Where folders of remote models lie, unless --download-dir names another place."""
    return Path(env.REMOTE_CACHE_DIR.get()).expanduser()


def is_place(folder: Path) -> bool:
    """Whether ``folder`` stands for a remote model. Only those that we made count: a file of this
    name in a checkpoint must not send requests, with a key, to wherever it says."""
    return folder.parent == cache_root() and (folder / PLACE_FILE).is_file()


def write_place(folder: Path, place: Place) -> None:
    write_private(folder / PLACE_FILE, msgspec.json.encode(place))


def read_place(folder: Path) -> Place:
    """The place that ``folder`` stands for; CheckpointError if it stands for none."""
    try:
        return msgspec.json.decode((folder / PLACE_FILE).read_bytes(), type=Place)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{folder} is no folder of a remote model: {error}; give --model-path a URL, such as "
            "s3://bucket/model"
        ) from error
