"""What lies on this machine: the models of the hubs' caches, for ``radixlm models``."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixlm.arch.families.gguf import config_of
from radixlm.arch.gguf import first_parts, read_header
from radixlm.arch.hf import describe
from radixlm.arch.json_file import object_or_empty
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.hub.folder import lacks, names_in
from radixlm.hub.huggingface import cache_top, cached_names
from radixlm.hub.locate import Wanted
from radixlm.hub.modelscope import cache_of


class LocalModel(Record):
    """``name`` is what --model-path takes, ``path`` the folder or .gguf file. ``problem``: why it
    cannot be served, "" if it can. ``used_s``: Unix time of the last read of a file."""

    name: str
    source: str
    path: str
    folder: str
    revision: str
    num_bytes: int
    dtype: str
    quantization: str
    architecture: str
    problem: str
    used_s: float


def local_models(download_dir: str | None = None) -> list[LocalModel]:
    """All of the Hugging Face cache (or of ``download_dir``) and of ModelScope's, by name."""
    found = []
    for name, root in cached_names(cache_top(download_dir)).items():
        for folder, revision in _snapshots(root):
            shown = name if revision == "main" else f"{name}@{revision}"
            found += _models_in(folder, shown, "huggingface", revision)
    scope = cache_of(Wanted(folder=download_dir))
    for folder in sorted(scope.glob("[!.]*/[!.]*")):
        if _is_repository(folder) and not _is_hf(folder):
            name, _, revision = f"{folder.parent.name}/{folder.name}".partition("@")
            shown = f"modelscope://{name.replace('___', '.')}"
            found += _models_in(folder, shown, "modelscope", revision or "master")
    return sorted(found, key=lambda one: one.name)


def _is_repository(folder: Path) -> bool:
    """Whether it is one of a model: --download-dir may hold other folders, which are the user's."""
    marks = ("configuration.json", "config.json", "adapter_config.json")
    is_marked = any((folder / mark).is_file() for mark in marks) or any(folder.glob("*.gguf"))
    return is_marked and not folder.is_symlink()


def _is_hf(folder: Path) -> bool:
    return folder.parent.name.startswith("models--")


def _snapshots(root: Path) -> Iterator[tuple[Path, str]]:
    """(folder, revision) of each commit in the cache; a commit without a name under its hash."""
    refs = {
        path.read_text().strip(): str(path.relative_to(root / "refs"))
        for path in sorted((root / "refs").rglob("*"))
        if path.is_file()
    }
    for folder in sorted((root / "snapshots").glob("*")):
        yield folder, refs.get(folder.name, folder.name)


def _models_in(folder: Path, name: str, source: str, revision: str) -> list[LocalModel]:
    """One model, or each of the GGUF files."""
    names = names_in(folder)
    files = [folder / one for one in names]
    ggufs = [file for file in files if _is_gguf(file)] if "config.json" not in names else []
    ggufs = first_parts(ggufs)
    rows = [(name, folder, files, *_facts(folder))] if not ggufs else []
    for file in ggufs:
        try:
            header = read_header(file)
        except CheckpointError as error:
            rows.append((f"{name}:{file.relative_to(folder)}", file, [file], *_unread(error)))
            continue
        facts = _gguf_facts(header)
        rows.append((f"{name}:{file.relative_to(folder)}", file, list(header.files), *facts))
    return [
        LocalModel(
            *(
                title,
                source,
                str(path),
                str(folder),
                revision,
                sum(one.stat().st_size for one in parts),
            ),
            *(dtype, quantization, architecture, problem),
            max((one.stat().st_atime for one in parts), default=0.0),
        )
        for title, path, parts, dtype, quantization, architecture, problem in rows
    ]


def _is_gguf(file: Path) -> bool:
    return file.suffix == ".gguf" and not file.name.lower().startswith("mmproj")


def _unread(error: CheckpointError) -> tuple[str, str, str, str]:
    return "", "", "", str(error)


def _gguf_facts(header: Any) -> tuple[str, str, str, str]:
    """(dtype, quantization, architecture, problem)"""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.kind] += tensor.end - tensor.start
    most = sizes.most_common(1)[0][0] if sizes else ""
    try:
        config = config_of(header)
        describe(config)
    except CheckpointError as error:
        kind = str(header.metadata.get("general.architecture") or "")
        return "", f"gguf {most}", kind, str(error)
    return "", f"gguf {most}", config["architectures"][0], ""


def _facts(folder: Path) -> tuple[str, str, str, str]:
    """(dtype, quantization, architecture, problem)"""
    config = object_or_empty(folder / "config.json")
    adapter = object_or_empty(folder / "adapter_config.json")
    if adapter and not config:
        base = adapter.get("base_model_name_or_path") or "an unnamed model"
        return "", "", f"LoRA of {base}", lacks(folder, Wanted("adapter"))
    text = config.get("text_config")
    dtypes = [one.get(key) for one in (config, text or {}) for key in ("dtype", "torch_dtype")]
    dtype = str(next((one for one in dtypes if one), "")).removeprefix("torch.")
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    quant = config.get("quantization_config") or (text or {}).get("quantization_config") or {}
    method, bits = str(quant.get("quant_method") or ""), quant.get("bits")
    shown = f"{method} {bits} bit" if bits else method
    problem = lacks(folder, Wanted())
    try:
        describe(folder)
        if quant and load("radixlm.quant.checkpoint:parse")(quant) is None:
            problem = problem or f"quantization {method} is not read"
    except (CheckpointError, ConfigError) as error:
        problem = problem or str(error)
    return dtype, shown, architecture, problem
