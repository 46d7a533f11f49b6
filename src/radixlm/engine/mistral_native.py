"""A folder in Mistral's own format, as a checkpoint folder: config.json made of params.json, the
weights and the tokenizer by links."""

from contextlib import closing
from pathlib import Path
from typing import Any

from radixlm.arch.families.mistral_native import HEAD_PROJECTION, config_of
from radixlm.arch.json_file import read_object
from radixlm.engine.kept_folder import keep_folder
from radixlm.text.tekken import tekken_files
from radixlm.weights.safetensors_file import SafetensorsSource

PARAMS, _WEIGHTS, _INDEX = "params.json", "consolidated", ".safetensors.index.json"
_PREFIX = {".safetensors": "model", ".pth": "pytorch_model"}


def is_native(folder: Path) -> bool:
    """Whether a folder has weights and a description of them in this format only."""
    has_weights = any(any(folder.glob(f"{_WEIGHTS}*{ending}")) for ending in _PREFIX)
    return (folder / PARAMS).is_file() and has_weights


def unpacked(folder: Path) -> Path:
    """The folder with a config.json; CheckpointError for a format that is not known."""
    folder = folder.absolute()
    params = read_object(folder / PARAMS)
    config = config_of(params, str(folder / PARAMS), _is_head(folder))
    files: dict[str, Any] = {"config.json": config}
    tekken = folder / "tekken.json"
    if "vision_config" in config and tekken.is_file():  # processors read a tokenizer.json
        files |= tekken_files(read_object(tekken), str(tekken))
    links: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == PARAMS:
            continue
        if path.name == _WEIGHTS + _INDEX:
            index = read_object(path)
            held = index.get("weight_map", {}).items()
            index["weight_map"] = {tensor: _renamed(file) for tensor, file in held}
            files["model" + _INDEX] = index
        else:
            links[_renamed(path.name)] = path
    return keep_folder("mistral", folder, files, links)


def _is_head(folder: Path) -> bool:
    """Whether the weights are those of an EAGLE head."""
    weights = sorted(folder.glob(f"{_WEIGHTS}*.safetensors"))
    with closing(SafetensorsSource(weights)) as source:
        return f"{HEAD_PROJECTION}.weight" in source.sizes()


def _renamed(name: str) -> str:
    if not name.startswith(_WEIGHTS):
        return name
    return _PREFIX.get(Path(name).suffix, _WEIGHTS) + name.removeprefix(_WEIGHTS)
