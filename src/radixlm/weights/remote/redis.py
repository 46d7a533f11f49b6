"""redis://host:port/name: a model in a Redis server, laid out as SGLang's connector does.

<name>/files/<file>            config.json, tokenizer.json, and safetensors files, if any
<name>/keys/rank_0/<tensor>    a safetensors file of the one tensor "tensor_bytes"
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from radixlm.base import env
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import require
from radixlm.weights.remote.reader import TIMEOUT_S, Body, PassingFault, RangeReader, RemoteFile

PIECE_BYTES: Final = 512 << 10  # a longer reply would hold up the server's other clients
_CONNECTIONS: Final = 16


class RedisReader(RangeReader):
    """Strings below ``<name>/``. The first part of the path is the database if it is a number."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        super().__init__(url, **options)
        redis = require("redis", "redis", "--model-path redis://")
        parts = urlsplit(url)
        first, _, rest = parts.path.strip("/").partition("/")
        database, self._name = (
            (int(first), rest) if first.isdigit() and rest else (0, f"{first}/{rest}")
        )
        self._name = self._name.strip("/")
        if not self._name:
            raise ConfigError(f"--model-path {url}: expected redis://host:port/name")
        self._errors = redis.exceptions
        self._client = redis.Redis(
            host=parts.hostname,
            port=parts.port or 6379,
            db=database,
            password=env.WEIGHTS_KEY.get() or None,
            ssl=parts.scheme == "rediss",
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=_CONNECTIONS,
            retry=None,
        )

    def files(self) -> Sequence[RemoteFile]:
        found = self.attempt(self.url, self._list)
        if not found:
            raise CheckpointError(
                f"{self.url}: no keys {self._name}/files/* or {self._name}/keys/rank_0/*"
            )
        if ranks := {f.name.split("/")[1] for f in found if f.tensor} - {"rank_0"}:
            raise CheckpointError(
                f"{self.url} was saved by {len(ranks) + 1} ranks, each with its part; save it by "
                "one (tp_size 1)"
            )
        return found

    def _list(self) -> list[RemoteFile]:
        with self._faults():
            prefixes = (f"{self._name}/files/", f"{self._name}/keys/")
            keys = sorted(
                key.decode(errors="replace")  # such a key is then absent, by its name
                for prefix in prefixes
                for key in self._client.scan_iter(match=f"{_literal(prefix)}*", count=1000)
            )
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.strlen(key)
            sizes = pipe.execute()
        return [self._file(key, size) for key, size in zip(keys, sizes, strict=True)]

    def _file(self, key: str, size: int) -> RemoteFile:
        name = key.removeprefix(f"{self._name}/")
        if name.startswith("files/"):
            return RemoteFile(name.removeprefix("files/"), size)
        return RemoteFile(name, size, tensor=name.split("/", 2)[-1])

    @contextmanager
    def _open(self, file: RemoteFile, start: int, end: int) -> Iterator[Body]:
        key = f"{self._name}/{file.name if file.tensor else f'files/{file.name}'}"
        pipe = self._client.pipeline(transaction=False)
        for at in range(start, end, PIECE_BYTES):
            pipe.getrange(key, at, min(at + PIECE_BYTES, end) - 1)
        with self._faults():
            data = b"".join(pipe.execute())
        if len(data) != end - start:
            raise CheckpointError(
                f"{self.describe(file)} changed while it was read: bytes {start} to {end} are "
                f"{len(data)} bytes; start again"
            )
        yield io.BytesIO(data)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """The client's errors as ours."""
        errors = self._errors
        try:
            yield
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            message = f"{self.url}: {error}; the password goes into RADIXLM_WEIGHTS_KEY"
            raise CheckpointError(message) from error
        except (errors.ConnectionError, errors.TimeoutError) as error:
            raise PassingFault(str(error)) from error
        except errors.RedisError as error:
            raise CheckpointError(f"{self.url}: {error}") from error

    def close(self) -> None:
        super().close()
        self._client.close()
        self._client.connection_pool.disconnect()


def _literal(text: str) -> str:
    """``text`` in a pattern of SCAN."""
    return "".join(f"\\{c}" if c in "*?[]\\^" else c for c in text)
