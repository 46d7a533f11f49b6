"""Models of Hugging Face's hub, or of one with its API (HF_ENDPOINT), in the cache that all of its
programs share: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. The library says
where things are; the bytes come through ``fetch``, which resumes and checks them."""

import importlib
import json
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
from radixlm.base.record import Record
from radixlm.hub.choose import (
    choose,
    gguf_files,
    has_tokenizer,
    index_names,
    is_gguf,
    missing_parts,
)
from radixlm.hub.fetch import PAUSES_S, Download, fetch_all
from radixlm.hub.locate import Repo, Wanted, split_repo

log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFile(Record):
    """A file of a repository: its size in bytes, its name in the cache and its hash."""

    name: str
    size: int
    etag: str
    digest: str


class Snapshot(Record):
    """The files of a repository at a commit."""

    commit: str
    files: dict[str, HubFile]


def locate(name: str, wanted: Wanted) -> Path:
    """The folder in the cache with the files of ``name``, or the .gguf file that it stands for;
    what is not there is downloaded. ConfigError if it cannot be had."""
    repo = split_repo(name, wanted.revision)
    cache = Cache(wanted, repo)
    here = cache.find()
    problem = "it is not in the cache" if here is None else lacks(here, wanted, repo.selector)
    if here is not None and not problem:
        log.info("%s: %s, of the cache", repo.name, cache.commit_of(here)[:12])
        return _result(here, wanted, repo.selector)
    if cache.is_offline:
        raise ConfigError(
            f"{wanted.flag} {name}: {problem} ({cache.root}), and HF_HUB_OFFLINE is set: fetch it "
            f"where there is a network (radixlm pull {repo.name}), or leave HF_HUB_OFFLINE out"
        )
    return _result(pull(name, wanted, cache), wanted, repo.selector)


def pull(name: str, wanted: Wanted, cache: "Cache | None" = None) -> Path:
    """Ask the hub for its newest commit and have the files of that; the snapshot's folder."""
    repo = split_repo(name, wanted.revision)
    cache = cache or Cache(wanted, repo)
    snapshot = cache.ask()
    folder = cache.root / "snapshots" / snapshot.commit
    try:
        indexes = index_names(snapshot.files, wanted.load_format)
        if indexes and wanted.kind == "model":
            cache.fetch(snapshot, indexes)
        shards = _shards(folder, indexes) if wanted.kind == "model" else []
        names = choose(snapshot.files, wanted, repo.selector, shards)
    except CheckpointError as error:
        raise CheckpointError(f"{wanted.flag} {name}: {error}") from error
    if lost := [shard for shard in shards if shard not in snapshot.files]:
        raise CheckpointError(f"{wanted.flag} {name}: the repository lacks {', '.join(lost)}")
    cache.fetch(snapshot, names)
    cache.note(snapshot.commit)
    return folder


def lacks(folder: Path, wanted: Wanted, selector: str) -> str:
    """What is missing of a snapshot's folder, "" if all is there that ``wanted`` needs."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if wanted.kind == "adapter":
        is_whole = "adapter_config.json" in names and any("adapter_model" in one for one in names)
        return "" if is_whole else "its adapter_config.json or adapter_model.safetensors is missing"
    if wanted.kind == "model" and is_gguf(names, wanted, selector):
        try:
            lost = missing_parts(gguf_files(names, selector))
        except CheckpointError as error:
            return str(error)
        return f"{lost[0]} is missing" if lost else ""
    if not has_tokenizer(names):
        return "its tokenizer is missing"
    return _lacks_weights(folder, names, wanted) if wanted.kind == "model" else ""


def _lacks_weights(folder: Path, names: Collection[str], wanted: Wanted) -> str:
    if "config.json" not in names:
        return "its config.json is missing"
    try:
        shards = _shards(folder, index_names(names, wanted.load_format))
        files = choose(names, wanted, "", shards)
    except CheckpointError as error:
        return str(error)
    lost = [shard for shard in shards if shard not in names] or missing_parts(files)
    return f"{lost[0]} is missing" if lost else ""


def _shards(folder: Path, indexes: list[str]) -> list[str]:
    """The files that the index names."""
    if not indexes:
        return []
    try:
        found = json.loads((folder / indexes[0]).read_bytes())["weight_map"].values()
        return sorted({name for name in found if Path(name).name == name})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{indexes[0]} is no weight index ({error!r})") from error


def _result(folder: Path, wanted: Wanted, selector: str) -> Path:
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if wanted.kind == "model" and is_gguf(names, wanted, selector):
        file = gguf_files(names, selector)[0]
        log.info("%s of %s", file, ", ".join(sorted(n for n in names if n.endswith(".gguf"))))
        return folder / file
    return folder


class Cache:
    """One repository in the cache, and its side of the hub."""

    def __init__(self, wanted: Wanted, repo: Repo) -> None:
        """ConfigError without huggingface_hub."""
        self.hub: Any = require("huggingface_hub", "hub", f"{wanted.flag} {repo.name}")
        self._constants: Any = importlib.import_module("huggingface_hub.constants")
        self._errors: Any = importlib.import_module("huggingface_hub.errors")
        self.wanted, self.repo = wanted, repo
        self.top = Path(wanted.folder or self._constants.HF_HUB_CACHE).expanduser()
        self.root = self.top / f"models--{repo.name.replace('/', '--')}"
        self.revision = repo.revision or "main"

    def find(self) -> Path | None:
        """The folder of the revision, if some of it is here."""
        commit = self.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = (self.root / "refs" / commit).read_text().strip()
            except OSError:
                return None
        folder = self.root / "snapshots" / commit
        return folder if folder.is_dir() else None

    @property
    def is_offline(self) -> bool:
        """Whether HF_HUB_OFFLINE forbids to ask."""
        return bool(self._constants.HF_HUB_OFFLINE)

    @staticmethod
    def commit_of(folder: Path) -> str:
        return folder.name

    def ask(self) -> Snapshot:
        """What the hub has under the revision. ConfigError, TransferError with what to do."""
        api = self.hub.HfApi(
            self._constants.ENDPOINT, library_name="radixlm", library_version=__version__
        )
        http = importlib.import_module(type(self.hub.get_session()).__module__.partition(".")[0])
        errors, what = self._errors, f"{self.wanted.flag} {self.repo.name}"
        for pause_s in (*PAUSES_S, 0.0):
            try:
                info = api.model_info(
                    self.repo.name, revision=self.revision, files_metadata=True, timeout=30
                )
                return _snapshot(info)
            except errors.HfHubHTTPError as error:
                why, is_final = self._explain(error), error.response.status_code < 500
                if error.response.status_code == 429:
                    is_final = False
                if is_final:
                    raise ConfigError(f"{what}: {why}") from error
            except errors.HFValidationError as error:
                raise ConfigError(f"{what}: {error}") from error
            except http.TransportError as error:
                why = f"{api.endpoint} cannot be reached ({error})"
                if not isinstance(error, http.TimeoutException):
                    raise TransferError(f"{what}: {why}; {_OFFLINE}") from error
            log.warning("%s: %s; trying again in %g s", what, why, pause_s)
            time.sleep(pause_s)
        raise TransferError(f"{what}: {why}")

    @property
    def _ask_for_access(self) -> str:
        return (
            "its authors share it on request: ask for access at "
            f"{self._constants.ENDPOINT}/{self.repo.name}, then set HF_TOKEN or run "
            "`hf auth login`"
        )

    def _explain(self, error: Any) -> str:
        """What an answer of the hub means, and what to do."""
        errors, endpoint = self._errors, self._constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return self._ask_for_access
        if isinstance(error, errors.RevisionNotFoundError):
            return f"it has no revision {self.revision!r}; {self.wanted.revision_flag} main works"
        if isinstance(error, errors.RepositoryNotFoundError) or error.response.status_code == 401:
            return (
                f"{endpoint} has no such repository, and here is no such folder; if it is private, "
                "set HF_TOKEN or run `hf auth login`"
            )
        return f"{endpoint} answers {error.response.status_code}: {error}"

    def fetch(self, snapshot: Snapshot, names: Collection[str]) -> None:
        """Have the files in the snapshot's folder."""
        folder, blobs = self.root / "snapshots" / snapshot.commit, self.root / "blobs"
        headers = self.hub.utils.build_hf_headers(
            library_name="radixlm", library_version=__version__
        )
        base = f"{self._constants.ENDPOINT}/{self.repo.name}/resolve/{snapshot.commit}"
        files = [snapshot.files[name] for name in names if not (folder / name).exists()]
        downloads = {
            file.etag: Download(
                name=file.name,
                url=f"{base}/{quote(file.name)}",
                path=blobs / file.etag,
                size=file.size,
                digest=file.digest,
                headers=headers,
                denied=self._ask_for_access,
            )
            for file in files
        }
        fetch_all(self.repo.name, list(downloads.values()), self.top / ".locks" / self.root.name)
        for file in files:
            _link(folder / file.name, blobs / file.etag)

    def note(self, commit: str) -> None:
        """Let the revision stand for ``commit`` from now on: all of its files are here."""
        if _COMMIT.fullmatch(self.revision):
            return
        ref = self.root / "refs" / self.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}")
        new.write_text(commit)
        new.replace(ref)


_OFFLINE = "with the files in the cache HF_HUB_OFFLINE=1 works, else a local folder"


def _snapshot(info: Any) -> Snapshot:
    files = {}
    for one in info.siblings or ():
        sha = one.lfs.sha256 if one.lfs is not None else ""
        digest = f"sha256:{sha}" if sha else f"git:{one.blob_id}"
        name = one.rfilename
        if name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{name!r} is no name of a file in a repository")
        files[name] = HubFile(name, one.size or 0, sha or one.blob_id, digest)
    return Snapshot(info.sha, files)


def _link(path: Path, blob: Path) -> None:
    """A relative link, as the library makes them; a copy where there are no links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        os.link(blob, new)
    new.replace(path)
