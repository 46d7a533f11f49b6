"""What a local folder holds: whether all is there that is wanted, and what it is if it is no
model."""

import json
from collections.abc import Collection
from pathlib import Path

from radixlm.arch.json_file import object_or_empty
from radixlm.base.errors import CheckpointError
from radixlm.base.tokenizer_files import has_tokenizer
from radixlm.hub.choose import (
    choose,
    gguf_files,
    index_names,
    is_gguf,
    missing_parts,
)
from radixlm.hub.locate import Wanted


def names_in(folder: Path) -> list[str]:
    """Paths of the files of a folder that has no loops, relative to it."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def lacks(folder: Path, wanted: Wanted, selector: str = "") -> str:
    """What is missing in ``folder``, "" if all is there that ``wanted`` needs."""
    names = names_in(folder)
    if wanted.include:
        lost = [name for name in wanted.include if name not in names]
        return f"{lost[0]} is missing" if lost else ""
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
        shards = shards_of(folder, index_names(names, wanted.load_format))
        files = choose(names, wanted, "", shards)
    except CheckpointError as error:
        return str(error)
    lost = [shard for shard in shards if shard not in names] or missing_parts(files)
    return f"{lost[0]} is missing" if lost else ""


def shards_of(folder: Path, indexes: list[str]) -> list[str]:
    """The files that the index names; CheckpointError for a broken index."""
    if not indexes:
        return []
    try:
        found = json.loads((folder / indexes[0]).read_bytes())["weight_map"].values()
        return sorted({name for name in found if Path(name).name == name})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{indexes[0]} is no weight index ({error!r})") from error


def model_in(folder: Path, wanted: Wanted, selector: str = "") -> Path:
    """The folder itself, or the .gguf file in it that is the model."""
    names = names_in(folder)
    if wanted.kind == "model" and is_gguf(names, wanted, selector):
        return folder / gguf_files(names, selector)[0]
    return folder


def other_kind(folder: Path) -> str:
    """What a folder without config.json is, with what to do; "" if that cannot be told."""
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names:
        base = object_or_empty(folder / "adapter_config.json").get("base_model_name_or_path")
        return f"it is a LoRA adapter (PEFT): --model-path {base or 'BASE'} --lora-paths {folder}"
    if "model_index.json" in names:
        return "it is a diffusion pipeline (model_index.json), which is not served"
    if "params.json" in names:
        return "it has weights in their maker's own format: use those for transformers"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inner:
        return f"folders in it have one: {', '.join(inner[:5])}"
    if any(name.endswith(".safetensors") for name in names):
        return "it has weights only: copy config.json and the tokenizer of the model to them"
    return ""
