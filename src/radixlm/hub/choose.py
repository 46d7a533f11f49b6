"""Which files of a repository are needed. Pure functions over names of files."""

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from radixlm.base.errors import CheckpointError
from radixlm.hub.locate import Wanted

# configs, tokenizers and chat templates; in folders those of sentence-transformers, templates and
# adapters of tasks
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_SMALL_FOLDERS = re.compile(r"(\d+_[^/]*|additional_chat_templates|adapters/[^/]+)/[^/]+$")
_NOT_SMALL = ("trainer_state.json", "*.index.json", "README*", "LICENSE*", "model.json")
# files of trainers and other loaders beside the weights
_NOT_WEIGHTS = ("consolidated*", "optimizer*", "scheduler*", "training_args*", "rng_state*")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)$")
_PICKLES = (".bin",), (".pt", ".pth")
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_OWN_ADAPTER = re.compile(r"(adapters/[^/]+/)?adapter_model\.safetensors")  # a part of the model
# of several quantizations without a choice, the first that is there
_USUAL = ("q4_k_m", "q4_k_s", "q5_k_m", "q4_0", "q6_k", "q8_0", "bf16", "f16")


def index_names(names: Collection[str], load_format: str) -> list[str]:
    """The index that says which shards are the model, if there is one."""
    wanted = {"model.safetensors.index.json", "pytorch_model.bin.index.json"}
    if load_format in ("pt", "npcache"):
        wanted = {"pytorch_model.bin.index.json"}
    return sorted(wanted & set(names))[:1]


def choose(
    names: Collection[str], wanted: Wanted, selector: str = "", shards: Sequence[str] = ()
) -> list[str]:
    """The files to have of ``names`` (paths in the repository); ``shards`` are those of an index.
    CheckpointError if there are no weights in the format that is asked for."""
    small = [name for name in names if _is_small(name)]
    if wanted.kind == "tokenizer":
        return small
    if wanted.kind == "adapter":
        weights = [name for name in _ADAPTER if name in names][:1]
        return [*small, *weights]
    if is_gguf(names, wanted, selector):
        return gguf_files(names, selector)
    weights = list(shards) or _weights(names, wanted.load_format)
    if wanted.load_format != "dummy" and not weights:
        raise CheckpointError(_no_weights(names, wanted.load_format))
    index = [] if wanted.load_format == "dummy" else index_names(names, wanted.load_format)
    inner = [name for name in names if re.match(r"\d+_[^/]*/[^/]+\.(safetensors|bin)$", name)]
    inner = [name for name in inner if name.endswith(".safetensors")] or inner
    adapter = [name for name in names if _OWN_ADAPTER.fullmatch(name)]
    return list(dict.fromkeys([*small, *index, *weights, *inner, *adapter]))


def is_gguf(names: Iterable[str], wanted: Wanted, selector: str) -> bool:
    """Whether GGUF files are what is wanted of these."""
    if selector or wanted.load_format == "gguf":
        return True
    names = list(names)
    return (
        wanted.load_format == "auto"
        and any(name.endswith(".gguf") for name in names)
        and not _weights(names, "auto")
    )


def gguf_files(names: Iterable[str], selector: str) -> list[str]:
    """The file, or all parts of it, that ``selector`` names: a file or a quantization, such as
    Q4_K_M. CheckpointError with the choices if there is none."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not name.rpartition("/")[2].lower().startswith("mmproj"):
            part = _PART.fullmatch(name)
            models.setdefault(part[1] if part else name.removesuffix(".gguf"), []).append(name)
    if not models:
        raise CheckpointError("there are no GGUF files in it")
    exact = [
        files
        for files in models.values()
        if selector and selector in (files[0], files[0].rpartition("/")[2])
    ]
    if exact:
        return exact[0]
    asked = [selector.lower()] if selector not in ("", "latest") else [*_USUAL, ""]
    for quant in asked:
        token = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])" if quant else "")
        near = sorted((key for key in models if token.search(key.lower())), key=len)
        if near:
            return models[near[0]]
    choices = ", ".join(key.rpartition("/")[2] + ".gguf" for key in models)
    raise CheckpointError(f"no GGUF file matches {selector!r}; there are: {choices}")


def missing_parts(names: Collection[str]) -> list[str]:
    """Files of "-00001-of-00003" series that are not among ``names``."""
    found = [match for name in names if (match := _PART.fullmatch(name))]
    series = {(match[1], int(match[3]), match[3], match[4]) for match in found}
    whole = {
        f"{stem}-{number:05d}-of-{total}{ending}"
        for stem, count, total, ending in series
        for number in range(1, count + 1)
    }
    return sorted(whole - set(names))


def _is_small(name: str) -> bool:
    base = name.rpartition("/")[2]
    if "/" in name and not _SMALL_FOLDERS.match(name):
        return False
    return any(fnmatchcase(base, pattern) for pattern in _SMALL) and not any(
        fnmatchcase(base, pattern) for pattern in _NOT_SMALL
    )


def _weights(names: Iterable[str], load_format: str) -> list[str]:
    """Weight files at the top of the repository, in the first format that it has."""
    endings: tuple[tuple[str, ...], ...] = ((".safetensors",), *_PICKLES)
    if load_format in ("safetensors", "sharded_state"):
        endings = endings[:1]
    elif load_format in ("pt", "npcache"):
        endings = _PICKLES
    elif load_format in ("dummy", "gguf"):
        endings = ()
    top = [name for name in names if "/" not in name and name not in _ADAPTER]
    top = [name for name in top if not any(fnmatchcase(name, other) for other in _NOT_WEIGHTS)]
    for kinds in endings:
        if files := [name for name in top if name.endswith(kinds)]:
            return files
    return []


def _no_weights(names: Iterable[str], load_format: str) -> str:
    others = sorted({name.rpartition(".")[2] for name in names if "." in name})
    if "adapter_config.json" in set(names):
        return "it is a LoRA adapter (PEFT), no model: give it with --lora-paths"
    return (
        f"it has no weights that --load-format {load_format} reads "
        f"(*.safetensors, *.bin, *.gguf), only: {', '.join(others) or 'nothing'}"
    )
