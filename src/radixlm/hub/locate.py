"""From a name, such as "org/model", to a local folder or file. Each source has a scheme."""

import re
from pathlib import Path

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.record import Record

# scheme -> "module:function" that takes (name without the scheme, Wanted) and returns the folder of
# config and tokenizer, or a .gguf file
SCHEMES: dict[str, str] = {
    "hf": "radixlm.hub.huggingface:locate",
    "modelscope": "radixlm.hub.modelscope:locate",
} | {
    scheme: f"radixlm.weights.remote.locate:{scheme}"
    for scheme in ("http", "https", "s3", "redis", "rediss", "instance")
}
HUBS = ("hf", "modelscope")
# compiled when they are used: few starts do
# org/model, then @revision, then :file or quantization
_REPO = r"[\w][\w.-]*/[\w][\w.-]*(@[^:@]+)?(:[^:@]+)?"
_FILE = r"([\w][\w.-]*/[\w][\w.-]*)/(.+)"
_URL = r"([a-z][a-z0-9+.-]*)://(.+)"
# pages of a hub that people copy from a browser
_PAGE = (
    r"https://(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]+\.gguf))?)?/?(?:[?#].*)?"
)


class Wanted(Record):
    """What to look for. ``kind``: model, tokenizer, adapter or files (``include``). ``flag`` is
    named in errors."""

    kind: str = "model"
    flag: str = "--model-path"
    revision: str | None = None
    revision_flag: str = "--revision"
    folder: str | None = None  # --download-dir
    load_format: str = "auto"
    is_newest: bool = False  # ask the hub even if all is in the cache
    include: tuple[str, ...] = ()  # patterns of file names of `radixlm pull`
    exclude: tuple[str, ...] = ()


class Repo(Record):
    """A repository of a hub: "org/model@revision:selector" in its parts."""

    name: str
    revision: str | None
    selector: str  # file or quantization of a repository of GGUF files; "" is the usual one


def scheme_of(name: str) -> tuple[str, str] | None:
    """(scheme, rest of the name) of a name that is looked up; None for a plain path."""
    if "/" not in name:
        return None
    if page := re.fullmatch(_PAGE, name):
        repo, revision, file = page.groups()
        return "hf", repo + (f"@{revision}" if revision else "") + (f":{file}" if file else "")
    if (url := re.fullmatch(_URL, name)) and url[1] in SCHEMES:
        return url[1], url[2]
    if not re.fullmatch(_REPO, name) or (name.endswith(".gguf") and ":" not in name):
        return None
    return ("modelscope" if env.USE_MODELSCOPE.get() else "hf"), name


def split_repo(name: str, revision: str | None) -> Repo:
    """The parts of a hub's name; a revision in the name wins."""
    name, _, selector = name.partition(":")
    name, _, own = name.partition("@")
    return Repo(name, own or revision, selector)


def locate_model(path: str, wanted: Wanted | None = None) -> Path:
    """The local folder or file of ``path``: itself if it exists or is no name of a source, else
    what its source finds or downloads. ConfigError if there is none, with what to do."""
    local = Path(path).expanduser()
    found = None if local.exists() else scheme_of(path)
    if found is None and not local.exists() and (url := re.fullmatch(_URL, path)):
        flag = wanted.flag if wanted else Wanted().flag
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{flag} {path}: nothing is read from {url[1]}://; these work: {known}")
    if found is None:
        return local
    return Path(load(SCHEMES[found[0]])(found[1], wanted or Wanted()))


def locate_file(path: str, flag: str, folder: str | None = None) -> Path:
    """The local file of ``path``: itself if it exists, else the one of org/repository/file."""
    local, found = Path(path).expanduser(), re.fullmatch(_FILE, path)
    if local.exists() or found is None:
        return local
    wanted = Wanted("files", flag, folder=folder, include=(found[2],))
    return locate_model(found[1], wanted) / found[2]
