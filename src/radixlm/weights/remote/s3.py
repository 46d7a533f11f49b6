"""s3://bucket/prefix: objects of Amazon's S3, or of a server with its API (AWS_ENDPOINT_URL)."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import require
from radixlm.weights.remote.reader import TIMEOUT_S, Body, PassingFault, RangeReader, RemoteFile

_CONNECTIONS = 16
_WHY = "--model-path s3://"


class S3Reader(RangeReader):
    """Objects below ``url``. Credentials, region and endpoint as boto3 finds them."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        super().__init__(url, **options)
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._prefix += "/" if self._prefix else ""
        boto3, core = require("boto3", "s3", _WHY), require("botocore", "s3", _WHY)
        self._errors: Any = require("botocore.exceptions", "s3", _WHY)
        settings = require("botocore.config", "s3", _WHY).Config(
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1},  # ours resume at the byte
            max_pool_connections=_CONNECTIONS,
        )
        try:
            self._client = boto3.session.Session().client("s3", config=settings)
        except core.exceptions.BotoCoreError as error:
            raise CheckpointError(f"{url}: {error}") from error

    def files(self) -> Sequence[RemoteFile]:
        found = self.attempt(self.url, self._list)
        if not found:
            raise CheckpointError(f"{self.url}: no object has this prefix")
        return found

    def _list(self) -> list[RemoteFile]:
        with self._faults(self.url):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            items = [item for page in pages for item in page.get("Contents", ())]
        return [
            RemoteFile(item["Key"].removeprefix(self._prefix), item["Size"], item["ETag"])
            for item in items
            if not item["Key"].endswith("/")  # what consoles make for a folder
        ]

    def with_digest(self, file: RemoteFile) -> RemoteFile:
        """The file with the SHA-256 of the whole object, if it was uploaded with one."""

        def head() -> dict[str, Any]:
            with self._faults(self.describe(file)):
                answer: dict[str, Any] = self._client.head_object(
                    Bucket=self._bucket, Key=self._prefix + file.name, ChecksumMode="ENABLED"
                )
            return answer

        answer = self.attempt(self.describe(file), head)
        text = answer.get("ChecksumSHA256", "")
        if not text or "-" in text or answer.get("ChecksumType") == "COMPOSITE":
            return file  # of parts, not of the bytes
        return RemoteFile(file.name, file.size, file.tag, base64.b64decode(text).hex())

    @contextmanager
    def _open(self, file: RemoteFile, start: int, end: int) -> Iterator[Body]:
        where = self.describe(file)
        with self._faults(where):
            answer = self._client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + file.name,
                Range=f"bytes={start}-{end - 1}",
                IfMatch=file.tag,
            )
        with answer["Body"]:
            # servers that are not Amazon's may know no IfMatch
            total = answer.get("ContentRange", "").rpartition("/")[2]
            if answer["ETag"] != file.tag or total != str(file.size):
                raise CheckpointError(
                    f"{where} changed while it was read: it was {file.tag} of {file.size} bytes, "
                    f"it is {answer['ETag']} of {total or '?'}; start again"
                )
            yield _S3Body(self, where, answer["Body"])

    @contextmanager
    def _faults(self, where: str) -> Iterator[None]:
        """boto3's errors as ours."""
        try:
            yield
        except self._errors.ClientError as error:
            told, status = error.response["Error"], _status(error)
            message = f"{told.get('Code')} {told.get('Message', '')}".strip()
            if status in (408, 429, 500, 502, 503, 504) or told.get("Code") == "SlowDown":
                raise PassingFault(message) from error
            if status == 412:
                message = f"changed while it was read ({message}); start again"
            raise CheckpointError(f"{where}: {message}") from error
        except (
            self._errors.HTTPClientError,  # timeouts, closed connections
            self._errors.ConnectionError,
            self._errors.IncompleteReadError,
            self._errors.ResponseStreamingError,
        ) as error:
            raise PassingFault(str(error)) from error
        except self._errors.BotoCoreError as error:  # no credentials, a bad region
            raise CheckpointError(f"{where}: {error}") from error

    def close(self) -> None:
        super().close()
        self._client.close()


class _S3Body:
    def __init__(self, reader: S3Reader, where: str, body: Any) -> None:
        self._reader, self._where, self._body = reader, where, body

    def readinto(self, view: memoryview, /) -> int:
        with self._reader._faults(self._where):
            count: int = self._body.readinto(view)
        return count


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
