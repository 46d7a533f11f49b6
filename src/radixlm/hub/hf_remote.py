"""The network side of ``huggingface``: huggingface_hub says where things are and who may have them;
the bytes come through ``fetch``, which resumes and checks them."""

import importlib
import logging
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from radixlm import __version__
from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.base.lazy import require
from radixlm.hub.fetch import PAUSES_S, Download, fetch_all
from radixlm.hub.huggingface import Cache
from radixlm.hub.locate import Repo, Wanted, split_repo
from radixlm.hub.pull import fetch_wanted

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
_OFFLINE = "with the files in the cache HF_HUB_OFFLINE=1 works, else a local folder"


def download(name: str, wanted: Wanted) -> Path:
    """The folder of the newest commit, with the files that are wanted. ConfigError, TransferError
    or CheckpointError if they cannot be had."""
    repo = split_repo(name, wanted.revision)
    cache = Cache(wanted, repo)
    source = Remote(cache, wanted)
    fetch_wanted(source, name, wanted, repo.selector)
    cache.note(source.commit)
    return source.folder


def digests(repo: Repo, wanted: Wanted) -> dict[str, str]:
    """The hash of each file of a repository: "sha256:..." or, of git, "git:..."."""
    return dict(Remote(Cache(wanted, repo), wanted).digests)


class Remote:
    """A repository of the hub at its newest commit (``pull.Source``)."""

    def __init__(self, cache: Cache, wanted: Wanted) -> None:
        self._hub: Any = require("huggingface_hub", "hub", f"{wanted.flag} {cache.repo.name}")
        self._errors: Any = importlib.import_module("huggingface_hub.errors")
        self._cache, self._wanted, self._endpoint = cache, wanted, cache.constants.ENDPOINT
        info = self._ask()
        self.commit = _hex(info.sha)
        self.folder = cache.snapshot(self.commit)
        self.digests: dict[str, str] = {}
        self.files: dict[str, int] = {}
        for one in info.siblings or ():
            name, sha = one.rfilename, one.lfs and _hex(one.lfs.sha256)
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{cache.repo.name}: {name!r} is no name of a file")
            self.files[name] = one.size or 0
            self.digests[name] = f"sha256:{sha}" if sha else f"git:{_hex(one.blob_id)}"

    def _ask(self) -> Any:
        """What the hub has under the revision. ConfigError, TransferError with what to do."""
        name, errors = self._cache.repo.name, self._errors
        api = self._hub.HfApi(self._endpoint, library_name="radixlm", library_version=__version__)
        # httpx or httpx2, by the version of the library
        http = importlib.import_module(type(self._hub.get_session()).__module__.partition(".")[0])
        what = f"{self._wanted.flag} {name}"
        for pause_s in (*PAUSES_S, 0.0):
            try:
                return api.model_info(
                    name, revision=self._cache.revision, files_metadata=True, timeout=TIMEOUT_S
                )
            except errors.HfHubHTTPError as error:
                why = self._explain(error)
                if error.response.status_code < 500 and error.response.status_code != 429:
                    raise ConfigError(f"{what}: {why}") from error
            except errors.HFValidationError as error:
                raise ConfigError(f"{what}: {error}") from error
            except http.TransportError as error:
                why = f"{self._endpoint} cannot be reached ({error})"
                if not isinstance(error, http.TimeoutException):
                    raise TransferError(f"{what}: {why}; {_OFFLINE}") from error
            log.warning("%s: %s; trying again in %g s", what, why, pause_s)
            time.sleep(pause_s)
        raise TransferError(f"{what}: {why}")

    @property
    def _ask_for_access(self) -> str:
        return (
            "its authors share it on request: ask for access at "
            f"{self._endpoint}/{self._cache.repo.name}, then set HF_TOKEN or run "
            "`hf auth login`"
        )

    def _explain(self, error: Any) -> str:
        """What an answer of the hub means, and what to do."""
        errors, endpoint = self._errors, self._endpoint
        if isinstance(error, errors.GatedRepoError):
            return self._ask_for_access
        if isinstance(error, errors.RevisionNotFoundError):
            flag = self._wanted.revision_flag
            return f"it has no revision {self._cache.revision!r}; {flag} main works"
        if "Invalid credentials" in str(error):
            return (
                "the token of HF_TOKEN or `hf auth login` is not valid; leave it out, or renew it"
            )
        if isinstance(error, errors.RepositoryNotFoundError) or error.response.status_code == 401:
            return (
                f"{endpoint} has no such repository, and here is no such folder; if it is private, "
                f"set HF_TOKEN or run `hf auth login`{self._cache.suggestion()}"
            )
        return f"{endpoint} answers {error.response.status_code}: {error}"

    def fetch(self, names: Collection[str]) -> None:
        """Have the files as blobs, named by their hash, and links to them in the folder."""
        cache, title = self._cache, self._cache.repo.name
        headers = self._hub.utils.build_hf_headers(
            library_name="radixlm", library_version=__version__
        )
        base = f"{self._endpoint}/{title}/resolve/{self.commit}"
        blobs = {
            name: cache.root / "blobs" / self.digests[name].partition(":")[2]
            for name in names
            if not (self.folder / name).exists()
        }
        downloads = {
            blob: Download(
                name=name,
                url=f"{base}/{quote(name)}",
                path=blob,
                size=self.files[name],
                digest=self.digests[name],
                headers=headers,
                denied=self._ask_for_access,
            )
            for name, blob in blobs.items()
        }
        fetch_all(title, list(downloads.values()), cache.top / ".locks" / cache.root.name)
        for name, blob in blobs.items():
            _link(self.folder / name, blob)


def _hex(text: Any) -> str:
    """A hash that the hub has sent, which names a file or folder of the cache."""
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{40,64}", text):
        raise CheckpointError(f"the hub sends {text!r:.80} in place of a hash")
    return text


def _link(path: Path, blob: Path) -> None:
    """A relative link, as the library makes them; a copy where there are no links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        os.link(blob, new)
    new.replace(path)
