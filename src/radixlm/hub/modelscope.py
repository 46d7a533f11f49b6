"""Models of ModelScope (RADIXLM_USE_MODELSCOPE, or modelscope://org/model), by its HTTP API, in the
folders that its own library uses: MODELSCOPE_CACHE/models/org/model."""

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Collection
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from radixlm.base import env
from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.hub.fetch import TIMEOUT_S, Download, digest_of, fetch_all
from radixlm.hub.folder import lacks, model_in
from radixlm.hub.locate import Repo, Wanted, split_repo
from radixlm.hub.pull import fetch_wanted

log = logging.getLogger(__name__)


def locate(name: str, wanted: Wanted) -> Path:
    """The folder of ``name``, or the .gguf file that it stands for; what is missing is downloaded.
    ConfigError, TransferError or CheckpointError if it cannot be had."""
    repo = split_repo(name, wanted.revision)
    folder = folder_of(repo, wanted)
    problem = lacks(folder, wanted, repo.selector) if folder.is_dir() else "it is not in the cache"
    if not problem and not (wanted.is_newest and not env.HF_HUB_OFFLINE.get()):
        log.info("%s: %s", repo.name, folder)
        return model_in(folder, wanted, repo.selector)
    if env.HF_HUB_OFFLINE.get():  # as in SGLang, it holds for this hub too
        raise ConfigError(
            f"{wanted.flag} {name}: {problem} ({folder}), and HF_HUB_OFFLINE is set; leave it out"
        )
    return pull(name, wanted)


def pull(name: str, wanted: Wanted) -> Path:
    """Have the newest files of the repository; as ``locate``."""
    repo = split_repo(name, wanted.revision)
    source = _Remote(repo, wanted)
    fetch_wanted(source, name, wanted, repo.selector)
    return model_in(source.folder, wanted, repo.selector)


def cache_of(wanted: Wanted) -> Path:
    """The folder of all models."""
    if wanted.folder:
        return Path(wanted.folder).expanduser()
    return Path(env.MODELSCOPE_CACHE.get()).expanduser() / "models"


def folder_of(repo: Repo, wanted: Wanted) -> Path:
    """The library keeps one revision of a model; others get a folder of their own."""
    name = repo.name.replace(".", "___")
    return cache_of(wanted) / (f"{name}@{repo.revision}" if repo.revision else name)


class _Remote:
    """A repository of ModelScope (``pull.Source``)."""

    def __init__(self, repo: Repo, wanted: Wanted) -> None:
        domain = env.MODELSCOPE_DOMAIN.get()
        base = domain if "://" in domain else f"https://{domain}"
        self._url = f"{base}/api/v1/models/{repo.name}/repo"
        self._repo, self._wanted = repo, wanted
        token = env.MODELSCOPE_API_TOKEN.get()
        self._headers = {"Cookie": f"m_session_id={token}"} if token else {}
        self.folder = folder_of(repo, wanted)
        self.files: dict[str, int] = {}
        self._sha256: dict[str, str] = {}
        for one in self._list():
            if one.get("Type") == "tree":
                continue
            name = str(one.get("Path"))
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{repo.name}: {name!r} is no name of a file")
            self.files[name] = int(one.get("Size") or 0)
            self._sha256[name] = str(one.get("Sha256") or "")

    def _list(self) -> list[dict[str, Any]]:
        what, repo = f"{self._wanted.flag} {self._repo.name}", self._repo
        query = {"Revision": repo.revision or "master", "Recursive": "True"}
        request = urllib.request.Request(f"{self._url}/files?{urlencode(query)}")
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                files: list[dict[str, Any]] = json.load(answer)["Data"]["Files"]
                return files
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in (401, 403, 404):
                raise TransferError(f"{what}: {request.host} answers {error.code}") from error
            raise ConfigError(
                f"{what}: {request.host} has no such repository or revision "
                f"{query['Revision']!r}; if it is private, set MODELSCOPE_API_TOKEN"
            ) from error
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise TransferError(f"{what}: {request.host} cannot be read ({error!r})") from error

    def fetch(self, names: Collection[str]) -> None:
        """Have the files in the folder; those that are there and differ are replaced."""
        files = []
        for name in names:
            sha256, query = self._sha256[name], {"Revision": self._repo.revision or "master"}
            path = self.folder / name
            digest = f"sha256:{sha256}" if sha256 else ""
            if path.exists() and digest and digest != digest_of(path, "sha256"):
                path.unlink()
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(
                Download(
                    name=name,
                    url=f"{self._url}?{urlencode(query | {'FilePath': name})}",
                    path=path,
                    size=self.files[name],
                    digest=digest,
                    headers=self._headers,
                    denied="set MODELSCOPE_API_TOKEN",
                )
            )
        locks = cache_of(self._wanted) / ".locks" / self._repo.name.replace("/", "--")
        fetch_all(self._repo.name, files, locks)
