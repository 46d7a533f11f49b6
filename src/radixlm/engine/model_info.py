"""What the HTTP process and the engine both know of the model, read without torch."""

import json
import logging
from pathlib import Path
from typing import Any, cast

from radixlm.arch.config import Config
from radixlm.arch.families.pools import is_bidirectional, vectors, with_bidirectional_attention
from radixlm.arch.generic import describe_generic, load_generic
from radixlm.arch.gguf import first_parts
from radixlm.arch.hf import (
    context_len,
    describe,
    eos_token_ids,
    load_config,
    load_generation_config,
)
from radixlm.arch.json_file import read_object
from radixlm.arch.media.registry import multimodal_spec
from radixlm.arch.media.spec import MultimodalSpec
from radixlm.arch.registry import TASK_ADAPTERS, UnknownArchitecture
from radixlm.arch.sentence_transformers import (
    SentenceTransformersConfig,
    read_sentence_transformers,
    with_modules,
)
from radixlm.arch.spec import Decoder, Moe, Rope
from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest
from radixlm.base.lazy import load
from radixlm.base.nearest import suggestion
from radixlm.base.record import Record
from radixlm.config.host import read_host_info
from radixlm.config.resolve import resolve
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.topology import refuse_too_many_ranks
from radixlm.engine.downloaded import check_deletable
from radixlm.engine.located import load_options, locate_all
from radixlm.engine.rank_processes import topology_of
from radixlm.hub.locate import Wanted, locate_model
from radixlm.weights.remote.locate import refuse_archive
from radixlm.wire.sampling_params import SamplingParams, parameter_names

ASSETS = Path(__file__).resolve().parent.parent / "assets"
log = logging.getLogger(__name__)

DEFAULT_MODEL = "radix-tiny"
# a checkout of the repository keeps its other trained models here
ZOO = Path(__file__).resolve().parents[3] / "zoo" / "models"

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # a pointer is never longer


class ModelInfo(Record):
    """The description of the model and what its folder says about generating."""

    folder: Path
    decoder: Decoder
    architecture: str
    model_type: str
    context_len: int
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    sentence: SentenceTransformersConfig | None = None
    media: MultimodalSpec | None = None  # of a model with encoders
    is_transformers: bool = False  # runs by transformers

    @property
    def is_generation(self) -> bool:
        """Whether the model writes text; else it gives vectors or scores."""
        return self.decoder.pool is None

    @property
    def is_multimodal(self) -> bool:
        """Whether encoders stand before the language model."""
        return self.media is not None

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(n for n, b in enumerate(self.decoder.blocks) if isinstance(b.ffn, Moe))

    @property
    def routed_shape(self) -> tuple[int, int]:
        """Layers, and experts that a token chooses in a layer at most."""
        blocks = self.decoder.blocks
        chosen = (block.ffn.top_k for block in blocks if isinstance(block.ffn, Moe))
        return len(blocks), max(chosen, default=0)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        found: list[Rope] = []
        for block in self.decoder.blocks:
            mixer = block.attention
            if mixer is not None and mixer.rope is not None:
                found.append(mixer.rope)
        return tuple(dict.fromkeys(found))


def refuse_special_files(folder: Path) -> None:
    """CheckpointError for a pipe, socket or device among the files of ``folder`` and of the folders
    in it: reading one would wait, or never end."""
    inside = [*folder.iterdir(), *folder.glob("*/*")] if folder.is_dir() else [folder]
    for path in inside:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: not a regular file (a pipe, a socket or a device)")


def refuse_pointers(model: Path) -> None:
    """CheckpointError if the file, or one of the folder, is a Git LFS pointer, without content.
    config.json is too small for Git LFS, and is read once at a start."""
    for path in model.iterdir() if model.is_dir() else [model]:
        if path.name != "config.json" and path.is_file() and path.stat().st_size < _POINTER_BYTES:
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise CheckpointError(
                        f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in "
                        "this folder, or give the model's name (org/model) to download it"
                    )


def checked_generation(generation: dict[str, Any], folder: Path) -> dict[str, Any]:
    """generation_config.json without sampling parameters that no request could have; a warning
    names each."""
    names = parameter_names("checkpoint", "sampling_params")
    bad = []
    for name in names:
        value = generation.get(name)
        if value is None or (name == "top_k" and value == 0):
            continue
        try:
            SamplingParams.from_dict({name: value}).validate(1 << 31)
        except InvalidRequest as error:
            bad.append(name)
            file = folder / "generation_config.json"
            log.warning("%s: %s is ignored: %s", file, name, error)
    return {name: value for name, value in generation.items() if name not in bad}


def find_model(path: str | None, wanted: Wanted | None = None) -> Path:
    """The folder of ``--model-path``: a folder, a .gguf file, a bundled model, or the name of one
    on a hub, which is downloaded where it is not in the cache."""
    name = path or DEFAULT_MODEL
    refuse_archive(name)
    local = locate_model(name, wanted)
    file = _gguf_of(local)
    has_config = (local / "config.json").exists()
    is_native = not has_config and _is_native(local)
    is_model = bool(file) or has_config or is_native
    if path and local.exists() and (is_model or not local.is_dir()):
        refuse_special_files(local)
        refuse_pointers(local)
    for folder in (local, ASSETS / name, ZOO / name):
        if (folder / "config.json").is_file():
            return folder
    if file:
        return cast(Path, load("radixlm.engine.gguf:unpacked")(file))
    if is_native:
        return cast(Path, load("radixlm.engine.mistral_native:unpacked")(local))
    if local.is_dir():
        kind = load("radixlm.hub.folder:other_kind")(local)
        raise CheckpointError(f"{name}: no config.json in this folder{kind and '; ' + kind}")
    if local.is_file() and (local.parent / "config.json").is_file():
        raise ConfigError(
            f"--model-path {name!r} is a file of a model: give its folder, {local.parent}"
        )
    if local.is_symlink() and not local.exists():
        raise ConfigError(
            f"--model-path {name!r} is a link to {local.readlink()}, which does not exist"
        )
    if name.startswith(("/", "./", "../", "~")) and not local.exists():
        raise ConfigError(f"--model-path {name!r}: there is no such file or folder")
    bundled = sorted(p.parent.name for root in (ASSETS, ZOO) for p in root.glob("*/config.json"))
    near = suggestion(name, bundled) or load("radixlm.hub.huggingface:near_name")(name)
    raise ConfigError(
        f"--model-path {name!r} is neither a folder with a config.json, a .gguf file "
        f"nor a bundled model ({', '.join(bundled) or 'none is built'}), nor the name of one on a "
        f"hub, such as Qwen/Qwen3-0.6B{near}"
    )


def local_tokenizer(name: str, flag: str) -> Path:
    """The folder of a tokenizer: of a folder, a bundled model, or a name on a hub."""
    found = locate_model(name, Wanted("tokenizer", flag))
    return found if found.exists() else find_model(name)


def _is_native(folder: Path) -> bool:
    """Whether a folder without config.json is in Mistral's own format."""
    has_params = (folder / "params.json").is_file()
    return has_params and cast(bool, load("radixlm.engine.mistral_native:is_native")(folder))


def _gguf_of(path: Path) -> Path | None:
    """The file itself, or the only one of a folder; of several parts the first."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    files = first_parts(list(path.glob("*.gguf"))) if path.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"--model-path {path}: has several GGUF files, name one: {names}")
    return files[0] if files else None


def config_overrides(config: ServerConfig) -> dict[str, Any]:
    """Of --json-model-override-args."""
    given = config.model.json_model_override_args
    overrides: dict[str, Any] = json.loads(given) if isinstance(given, str) else dict(given or {})
    return overrides


# keys that the loader of the weights reads in config.json itself
_OF_THE_WEIGHTS = {"has_lora_adapter", *(key for key, _ in TASK_ADAPTERS.values())}


def _config(config: ServerConfig, folder: Path) -> tuple[Config, bool]:
    """config.json of the model, with --json-model-override-args over it; and whether the model is
    to run by transformers: as --model-impl wants, or since no family of ours describes it."""
    overrides = config_overrides(config)
    if config.model.model_impl == "transformers":
        return load_generic(folder, overrides), True
    try:
        c = load_config(folder)  # its errors name the file
    except UnknownArchitecture:
        if config.model.model_impl == "radixlm" or not _is_known_elsewhere(folder):
            raise
        return load_generic(folder, overrides), True
    if fixed := sorted(set(overrides) & _OF_THE_WEIGHTS):
        raise ConfigError(
            f"--json-model-override-args: {fixed[0]!r} says what the weights are; "
            f"set it in {folder / 'config.json'}"
        )
    if overrides:
        c = load_config(read_object(folder / "config.json") | overrides)
    return c, False


def _is_known_elsewhere(folder: Path) -> bool:
    """Whether transformers is installed and has a decoder of the folder's model type."""
    try:
        from transformers.models.auto import modeling_auto  # noqa: PLC0415  (a second, seldom)
    except ImportError:
        return False
    kind = read_object(folder / "config.json").get("model_type")
    return kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def read_model(config: ServerConfig) -> tuple[ModelInfo, Config]:
    """The model of ``--model-path`` and its config; CheckpointError if it cannot be served."""
    folder = find_model(config.local("model_path"))
    c, is_transformers = _config(config, folder)
    generation = checked_generation(load_generation_config(folder), folder)
    described = describe_generic(c) if is_transformers else describe(c)
    decoder, sentence = _pooling(config, c, described, folder)
    asked = config.model.context_length
    info = ModelInfo(
        folder=folder,
        decoder=decoder,
        architecture=str(c.architecture),
        model_type=str(c.get("model_type") or ""),
        context_len=asked or _text_len(c, decoder, sentence),
        eos_ids=eos_token_ids(c, generation),
        generation=generation,
        sentence=sentence,
        media=_media(str(c.architecture), folder),
        is_transformers=is_transformers,
    )
    return info, c


def _pooling(
    config: ServerConfig, c: Config, decoder: Decoder, folder: Path
) -> tuple[Decoder, SentenceTransformersConfig | None]:
    """The model with the head of a sentence-transformers folder, or of --is-embedding. ConfigError
    for an option of models that generate."""
    sentence = read_sentence_transformers(folder)
    if decoder.pool is None and (sentence is not None or config.model.is_embedding):
        decoder = vectors(
            c, with_bidirectional_attention(c, decoder) if is_bidirectional(c) else decoder
        )
    if sentence is not None:
        decoder = with_modules(decoder, sentence, str(folder / "modules.json"))
    if decoder.pool is not None and config.execute.enable_double_sparsity:
        raise ConfigError(
            "--enable-double-sparsity: the model makes vectors of texts, and only tokens that it "
            "generates are sparse; leave the flag out"
        )
    return decoder, sentence


def _text_len(c: Config, decoder: Decoder, sentence: SentenceTransformersConfig | None) -> int:
    """Tokens that the model reads: an encoder and a table of positions have only so many places,
    and a folder of sentence-transformers may say that it was made for fewer."""
    has_places = decoder.encoder is not None or decoder.positions is not None
    length = min(context_len(c), decoder.max_positions) if has_places else context_len(c)
    return min(length, sentence.max_length or length) if sentence is not None else length


def _media(architecture: str, folder: Path) -> MultimodalSpec | None:
    return multimodal_spec(architecture, read_object(folder / "config.json"))


def resolved(
    config: ServerConfig, given: frozenset[str], tells: bool = True
) -> tuple[ServerConfig, ModelInfo]:
    """The model, and the configuration with everything filled in that depends on it. ``tells``:
    log which options have no effect."""
    if config.model.model_path in (None, ""):
        config = config.with_values({"model_path": DEFAULT_MODEL})
    config = locate_all(config)
    load_options(config)  # its errors before anything starts
    check_deletable(config)
    info, c = read_model(config)
    attention = [block.attention for block in info.decoder.blocks]
    heads = [one.heads for one in attention if one is not None]
    refuse_too_many_ranks(topology_of(config).place(0).attn_tp, heads)  # before any of them starts
    decoder, asked = info.decoder, config.model.context_length
    facts = read_host_info(
        {
            # a length that was asked for may go beyond what a text was made for, not beyond places
            "context_len": _text_len(c, decoder, info.sentence if asked is None else None),
            "is_moe": any(isinstance(b.ffn, Moe) for b in decoder.blocks),
            "has_window": any(getattr(b.attention, "window", 0) for b in decoder.blocks),
            "vocab": decoder.vocab,
            "architecture": info.architecture,
        }
    )
    return resolve(config, facts, given, tells), info
