"""--delete-ckpt-after-loading: frees the disk of weights that this start has downloaded."""

import logging
from contextlib import suppress
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.units import format_bytes
from radixlm.config.server_config import ServerConfig
from radixlm.hub.locate import Wanted

log = logging.getLogger(__name__)

_FLAG = "--delete-ckpt-after-loading"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def check_deletable(config: ServerConfig) -> None:
    """ConfigError unless the checkpoint lies in --download-dir and one engine reads it, once."""
    model, parallel = config.model, config.parallel
    if not model.delete_ckpt_after_loading:
        return
    if parallel.num_replicas > 1 or parallel.nnodes > 1:
        raise ConfigError(f"{_FLAG}: other engines may still read it; --dp-size 1 --nnodes 1 works")
    if model.download_dir is None or "model_path" not in config.located:
        raise ConfigError(
            f"{_FLAG} deletes what was downloaded, never a folder of yours: give --model-path a "
            "name on a hub or a URL, and --download-dir FOLDER"
        )
    if Path(model.download_dir).expanduser().resolve() in _caches():
        raise ConfigError(
            f"{_FLAG}: --download-dir {model.download_dir} is a hub's cache, which other programs "
            "share; a folder of its own works"
        )


def _caches() -> list[Path]:
    """Of the hubs; Hugging Face's only with its library."""
    found = [load("radixlm.hub.modelscope:cache_of")(Wanted())]
    with suppress(ConfigError):
        found.append(load("radixlm.hub.huggingface:cache_top")())
    return [path.resolve() for path in found]


def delete_checkpoint(config: ServerConfig) -> None:
    """Delete the files with weights, and what links in --download-dir lead to in it; config and
    tokenizer stay."""
    model = config.model
    if not model.delete_ckpt_after_loading or model.download_dir is None or not config.located:
        return
    root, place = (
        Path(model.download_dir).expanduser().resolve(),
        Path(config.located["model_path"]),
    )
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    num_bytes = 0
    for path in files:
        target = path.resolve()
        if path.suffix in _WEIGHTS and target.is_file() and target.is_relative_to(root):
            num_bytes += target.stat().st_size
            target.unlink()
            path.unlink(missing_ok=True)
    log.warning(
        "%s: %s of weights in %s are deleted; an engine that dies cannot load them again, and the "
        "server ends with it",
        _FLAG,
        format_bytes(num_bytes),
        place,
    )
