"""instance://host:port: the files that a running RadixLM serves its model from, by its own port."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from radixlm.base import env
from radixlm.base.errors import CheckpointError
from radixlm.weights.remote.http import HttpReader
from radixlm.weights.remote.reader import RemoteFile

ROUTE = "/weights_files"
DIGEST_OF = "\0"  # before a name: its SHA-256 is asked for


class InstanceReader(HttpReader):
    """Files by ``GET /weights_files?name=...`` of the seed, with its admin key. The seed hashes its
    files while they are read; the digests are compared at the end."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(f"http://{urlsplit(url).netloc}{ROUTE}", env.WEIGHTS_KEY.get(), **options)
        self.url = url

    def _address(self, name: str) -> str:
        what = "digest_of" if name.startswith(DIGEST_OF) else "name"
        name = name.removeprefix(DIGEST_OF)
        return self._base.rstrip("/") + (f"?{what}={quote(name, safe='')}" if name else "")

    def files(self) -> Sequence[RemoteFile]:
        text = self._text("")
        if text is None:
            raise CheckpointError(
                f"{self.url} does not give its weights: the seed's admin key goes into "
                "RADIXLM_WEIGHTS_KEY; a server on a public address needs --admin-api-key"
            )
        return self._listed("files.json", text)

    def digest(self, file: RemoteFile) -> str:
        return self._text(DIGEST_OF + file.name) or ""
