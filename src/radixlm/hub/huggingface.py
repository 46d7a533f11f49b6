"""Models of Hugging Face's hub, or of one with its API (HF_ENDPOINT), in the cache that all of its
programs share: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. What is there is
found without the network and with few imports; ``hf_remote`` asks and downloads."""

import importlib
import logging
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load, require
from radixlm.hub.folder import lacks, model_in
from radixlm.hub.locate import Repo, Wanted, split_repo

log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")


def locate(name: str, wanted: Wanted) -> Path:
    """The folder in the cache with the files of ``name``, or the .gguf file that it stands for;
    what is not there is downloaded. ConfigError if it cannot be had."""
    repo = split_repo(name, wanted.revision)
    cache = Cache(wanted, repo)
    here = cache.find()
    problem = "it is not in the cache" if here is None else lacks(here, wanted, repo.selector)
    asks = wanted.is_newest and not cache.is_offline
    if here is not None and not problem and not asks:
        found = model_in(here, wanted, repo.selector)
        what = f" {found.name}," if found != here else ""
        log.info(
            "%s:%s commit %s of the cache (radixlm pull looks for a newer one)",
            *(repo.name, what, here.name[:12]),
        )
        return found
    if cache.is_offline:
        raise ConfigError(
            f"{wanted.flag} {name}: {problem} ({cache.root}), and HF_HUB_OFFLINE is set: fetch it "
            f"where there is a network (radixlm pull {name}), or leave HF_HUB_OFFLINE out"
            f"{cache.suggestion()}"
        )
    return pull(name, wanted)


def pull(name: str, wanted: Wanted) -> Path:
    """Ask the hub for its newest commit and have the files of that; as ``locate``."""
    folder: Path = load("radixlm.hub.hf_remote:download")(name, wanted)
    return model_in(folder, wanted, split_repo(name, None).selector)


def cache_top(download_dir: str | None = None) -> Path:
    """The folder of all repositories; ConfigError without huggingface_hub."""
    constants: Any = require("huggingface_hub.constants", "hub", "a model of Hugging Face's hub")
    return Path(download_dir or constants.HF_HUB_CACHE).expanduser()


def cached_names(top: Path | None = None) -> dict[str, Path]:
    """Name -> folder of each repository in the cache ``top`` (HF_HUB_CACHE)."""
    top = top or cache_top()
    return {path.name[8:].replace("--", "/"): path for path in sorted(top.glob("models--*"))}


def near_name(name: str, top: Path | None = None) -> str:
    """ "; did you mean 'org/model'?" of a repository in the cache, with or without "org/"."""
    try:
        known = {one.lower(): one for one in cached_names(top) if one != name}
    except ConfigError:  # without huggingface_hub
        return ""
    tails = {one.rpartition("/")[2]: full for one, full in known.items()}
    near = get_close_matches(name.lower(), [*known, *tails], 1, 0.6)
    return f"; did you mean {(known | tails)[near[0]]!r}?" if near else ""


class Cache:
    """One repository in the cache."""

    def __init__(self, wanted: Wanted, repo: Repo) -> None:
        """ConfigError without huggingface_hub."""
        self.top = cache_top(wanted.folder)
        self.constants: Any = importlib.import_module("huggingface_hub.constants")
        self.repo = repo
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

    def suggestion(self) -> str:
        """ "; did you mean 'org/model'?" of a repository in the cache."""
        return near_name(self.repo.name, self.top)

    @property
    def is_offline(self) -> bool:
        """Whether HF_HUB_OFFLINE forbids to ask."""
        return bool(self.constants.HF_HUB_OFFLINE)

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit."""
        return self.root / "snapshots" / commit

    def note(self, commit: str) -> None:
        """Let the revision stand for ``commit`` from now on: all of its files are here."""
        if _COMMIT.fullmatch(self.revision):
            return
        ref = self.root / "refs" / self.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}")
        new.write_text(commit)
        new.replace(ref)
