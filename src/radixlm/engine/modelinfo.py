"""What the HTTP process and the engine both know of the model, read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.composite import COMPOSITES
from radixlm.arch.hf import (
    context_len,
    describe,
    eos_token_ids,
    load_config,
    load_generation_config,
)
from radixlm.arch.spec import Attention, Decoder, LatentAttention, Moe, Rope
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.config.facts import host_facts
from radixlm.config.resolve import resolve
from radixlm.config.root import ServerConfig

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEFAULT_MODEL = "radix-tiny"
# a checkout of the repository keeps its other trained models here
ZOO = Path(__file__).resolve().parents[3] / "zoo" / "models"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of the model and what its folder says about generating."""

    folder: Path
    decoder: Decoder
    architecture: str
    model_type: str
    context_len: int
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    image_token_id: int | None = None  # stands for pictures in a prompt

    @property
    def is_multimodal(self) -> bool:
        """Whether towers stand before the language model."""
        return self.architecture in COMPOSITES

    @property
    def ropes(self) -> tuple[Rope, ...]:
        found: list[Rope] = []
        for block in self.decoder.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention | LatentAttention) and mixer.rope is not None:
                found.append(mixer.rope)
        return tuple(dict.fromkeys(found))


def find_model(path: str | None) -> Path:
    """The folder of ``--model-path``: a folder, or the name of a bundled model."""
    name = path or DEFAULT_MODEL
    for folder in (Path(name).expanduser(), ASSETS / name, ZOO / name):
        if (folder / "config.json").is_file():
            return folder
    if Path(name).is_dir():
        raise CheckpointError(f"{name}: no config.json in this folder")
    bundled = sorted(p.parent.name for root in (ASSETS, ZOO) for p in root.glob("*/config.json"))
    raise ConfigError(
        f"--model-path {name!r} is neither a folder with a config.json nor a bundled model "
        f"({', '.join(bundled) or 'none is built'}); nothing is downloaded"
    )


def _config(config: ServerConfig, folder: Path) -> Config:
    """config.json of the model, with --json-model-override-args over it."""
    given = config.model.json_model_override_args
    overrides = json.loads(given) if isinstance(given, str) else dict(given or {})
    if not overrides:
        return load_config(folder)
    load_config(folder)  # its errors name the file
    return load_config(json.loads((folder / "config.json").read_bytes()) | overrides)


def read_model(config: ServerConfig) -> ModelInfo:
    """Describe the model of ``--model-path``; CheckpointError if it cannot be served."""
    folder = find_model(config.model.model_path)
    c = _config(config, folder)
    generation = load_generation_config(folder)
    length = context_len(c)
    asked = config.model.context_length
    return ModelInfo(
        folder=folder,
        decoder=describe(c),
        architecture=str(c.architecture),
        model_type=str(c.get("model_type") or ""),
        context_len=asked or length,
        eos_ids=eos_token_ids(c, generation),
        generation=generation,
        image_token_id=_image_token_id(folder),
    )


def _image_token_id(folder: Path) -> int | None:
    raw = json.loads((folder / "config.json").read_bytes())
    token = raw.get("image_token_id", raw.get("image_token_index"))
    return token if isinstance(token, int) else None


def resolved(config: ServerConfig, given: frozenset[str]) -> tuple[ServerConfig, ModelInfo]:
    """The model, and the configuration with everything filled in that depends on it."""
    if config.model.model_path in (None, ""):
        config = config.with_values({"model_path": DEFAULT_MODEL})
    info = read_model(config)
    decoder = info.decoder
    c = _config(config, info.folder)
    facts = host_facts(
        {
            "context_len": context_len(c),
            "is_moe": any(isinstance(b.ffn, Moe) for b in decoder.blocks),
            "has_window": any(getattr(b.mixer, "window", 0) for b in decoder.blocks),
            "vocab": decoder.vocab,
        }
    )
    return resolve(config, facts, given), info
