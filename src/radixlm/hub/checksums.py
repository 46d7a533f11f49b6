"""--model-checksum: the files of a model against known hashes, before any of them is read.

They stand in a JSON file, {"checksums": {name: SHA-256}}, which SGLang's model_file_verifier
writes too, or are those of a repository on Hugging Face's hub: SHA-256 of what it keeps as LFS,
git's hash of other files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import load
from radixlm.hub.fetch import digest_of
from radixlm.hub.folder import names_in
from radixlm.hub.locate import Wanted, scheme_of, split_repo

FLAG = "--model-checksum"
_THREADS = 4
_TEXTS = re.compile(r"\.git|LICENSE|NOTICE|README|USE_POLICY")  # not the model's


def check_files(folder: Path, source: str, model_path: str, revision: str | None = None) -> int:
    """Hash the files of ``folder`` (or the one file that it is) that ``source`` knows: a JSON file,
    the name of a repository, or "" for that of ``model_path``. Returns their number.

    CheckpointError names those that differ or are missing; a folder may lack files of a repository
    that it does not need, but not all. ConfigError for a source that cannot be read."""
    file, names = Path(source).expanduser(), names_in(folder)
    if folder.is_file():
        folder, names = folder.parent, [folder.name]
    if source and file.is_file():
        expected = _listed(file)
        missing = [name for name in expected if not (folder / name).is_file()]
    else:
        expected, missing = _known_to_hub(names, source or model_path, revision), []
    present = [name for name in expected if name not in missing]
    with ThreadPoolExecutor(_THREADS) as pool:
        kinds = [expected[name].partition(":")[0] for name in present]
        hashes = pool.map(digest_of, [folder / name for name in present], kinds)
        different = [n for n, has in zip(present, hashes, strict=True) if has != expected[n]]
    if missing or different:
        faults = [f"{name} is missing" for name in missing]
        faults += [f"{name} differs" for name in different]
        raise CheckpointError(f"{FLAG} {source or model_path}: {folder}: {', '.join(faults)}")
    return len(present)


def _listed(file: Path) -> dict[str, str]:
    """Those of a JSON file."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        listed = found.get("checksums") if isinstance(found, Mapping) else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {file}: {error}") from error
    is_right = isinstance(listed, dict) and all(
        isinstance(sha, str) and re.fullmatch("[0-9a-fA-F]{64}", sha) and _is_inside(name)
        for name, sha in listed.items()
    )
    if not listed or not is_right:
        raise ConfigError(
            f'{FLAG} {file}: write {{"checksums": {{"model.safetensors": "<SHA-256>"}}}}, with '
            "names of files in the model's folder"
        )
    return {name: f"sha256:{sha.lower()}" for name, sha in listed.items()}


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def _known_to_hub(names: Sequence[str], name: str, revision: str | None) -> dict[str, str]:
    """Those of the files ``names`` that the repository has."""
    if (scheme_of(name) or ("",))[0] != "hf":
        raise ConfigError(
            f"{FLAG} {name}: neither a JSON file with checksums nor the name of a repository on "
            "the hub, such as Qwen/Qwen3-0.6B"
        )
    wanted = Wanted(flag=FLAG, revision=revision)
    digests: Mapping[str, str] = load("radixlm.hub.hf_remote:digests")(
        split_repo(name, revision), wanted
    )
    known = {n: digests[n] for n in names if n in digests and not _TEXTS.match(n)}
    if not known:
        raise CheckpointError(f"{FLAG} {name}: the model's folder has none of its files")
    return known
