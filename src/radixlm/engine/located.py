"""Models and adapters that the options name, looked up before anything of them is read."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from radixlm.base.addresses import url_host
from radixlm.base.errors import ConfigError
from radixlm.config.adapters import read_lora_path
from radixlm.config.server_config import ServerConfig
from radixlm.hub.locate import Wanted, locate_file, locate_model, scheme_of
from radixlm.weights.options import LoadOptions, read_options
from radixlm.weights.remote.place import PLACE_FILE

log = logging.getLogger(__name__)


def locate_all(config: ServerConfig) -> ServerConfig:
    """``config`` with ``located`` filled; as it is in a process that was told by its parent.
    ConfigError for a name that stands for nothing."""
    if config.located:
        return config
    found = {}
    for key, path, wanted in _named(config):
        # the model's own tokenizer comes with it
        is_own = key == "tokenizer_path" and path == config.model.model_path
        if path and not is_own and scheme_of(path) is not None:
            found[key] = str(locate_model(path, wanted))
        elif wanted.kind == "adapter" and not (folder := Path(str(path)).expanduser()).is_dir():
            # before the weights, which may take minutes to load
            raise ConfigError(
                f"{wanted.flag}: {folder} is no folder; an adapter is NAME=FOLDER, a folder with "
                "adapter_config.json, or NAME=org/repository of a hub"
            )
    draft, revision = config.speculate, config.model.revision
    if draft.speculative_algorithm and (ids := draft.speculative_token_map):
        file = locate_file(ids, "--speculative-token-map", config.model.download_dir)
        found |= {"speculative_token_map": str(file)} if str(file) != ids else {}
    unused = {
        "--revision": revision and "model_path" not in found,
        "--speculative-draft-model-revision": draft.speculative_draft_model_revision
        and "speculative_draft_model_path" not in found,
        "--download-dir": config.model.download_dir and not found,
    }
    for flag in (flag for flag, is_unused in unused.items() if is_unused):
        log.warning("%s has no effect: what it concerns lies in a local folder", flag)
    return replace(_streamed(config, found), located=found) if found else config


def _streamed(config: ServerConfig, found: Mapping[str, str]) -> ServerConfig:
    """``config`` with the load format of models whose weights stay where they are."""
    formats = {
        "model_path": "load_format",
        "speculative_draft_model_path": "speculative_draft_load_format",
    }
    changes = {
        option: "remote"
        for key, option in formats.items()
        if key in found and (Path(found[key]) / PLACE_FILE).is_file()
        if config.value(option) not in ("dummy", "remote_instance")
    }
    draft = config.speculate
    if "load_format" in changes and draft.speculative_draft_model_path is not None:
        changes.setdefault(
            "speculative_draft_load_format", draft.speculative_draft_load_format or "auto"
        )
    return config.with_values(changes) if changes else config


def load_options(config: ServerConfig) -> LoadOptions:
    """How the checkpoint is read; ConfigError for --model-loader-extra-config."""
    model = config.model
    return read_options(
        model.model_loader_extra_config, model.load_format, model.weight_loader_disable_mmap
    )


def _seed(config: ServerConfig) -> str:
    """The URL of the instance that gives its weights."""
    model = config.model
    host = model.remote_instance_weight_loader_seed_instance_ip
    port = model.remote_instance_weight_loader_seed_instance_service_port
    if host and port:
        return f"instance://{url_host(host)}:{port}"
    if (model.model_path or "").startswith("instance://"):
        return str(model.model_path)
    raise ConfigError(
        "--load-format remote_instance needs the seed: --remote-instance-weight-loader-seed-"
        "instance-ip and --remote-instance-weight-loader-seed-instance-service-port, or "
        "--model-path instance://host:port"
    )


def _named(config: ServerConfig) -> Iterator[tuple[str, str | None, Wanted]]:
    """(key in ``located``, what the user wrote, what it is) of each path."""
    model, draft, folder = config.model, config.speculate, config.model.download_dir
    yield (
        "model_path",
        _seed(config) if model.load_format == "remote_instance" else model.model_path,
        Wanted(revision=model.revision, folder=folder, load_format=model.load_format),
    )
    if not model.skip_tokenizer_init:
        yield (
            "tokenizer_path",
            model.tokenizer_path,
            Wanted("tokenizer", "--tokenizer-path", folder=folder),
        )
    if draft.speculative_algorithm:
        yield (
            "speculative_draft_model_path",
            draft.speculative_draft_model_path,
            Wanted(
                flag="--speculative-draft-model-path",
                revision=draft.speculative_draft_model_revision,
                revision_flag="--speculative-draft-model-revision",
                folder=folder,
                load_format=draft.speculative_draft_load_format or model.load_format,
            ),
        )
    for text in config.adapters.lora_paths or ():
        path = read_lora_path(text).path
        yield path, path, Wanted("adapter", "--lora-paths", folder=folder)


def tokenizer_folder(config: ServerConfig, model: Path) -> Path:
    is_own = config.model.tokenizer_path in (None, config.model.model_path)
    return model if is_own else Path(str(config.local("tokenizer_path")))
