"""The model of an engine whose KV cache has scales; see weights/kv_scales.py."""

import logging
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.topology import Place
from radixlm.engine.model_info import ModelInfo
from radixlm.kernels.ops.kv import BY_FLAG, FLOAT8
from radixlm.weights.folder import open_folder
from radixlm.weights.kv_scales import Scales, checkpoint_scales, file_scales, with_kv_scales

log = logging.getLogger(__name__)


def with_scaled_cache(config: ServerConfig, info: ModelInfo, place: Place) -> ModelInfo:
    """``info`` with the scales of --quantization-param-path, else of the checkpoint, where
    --kv-cache-dtype is an 8 bit float. ConfigError for a file that cannot be used."""
    file, flag = config.model.quantization_param_path, config.memory.kv_cache_dtype
    if BY_FLAG.get(flag) not in FLOAT8:
        if file:
            raise ConfigError(
                f"--quantization-param-path needs a cache in 8 bit floats, --kv-cache-dtype is "
                f"{flag}; use --kv-cache-dtype fp8_e4m3"
            )
        return info
    if info.is_transformers:
        if file:
            raise ConfigError("--quantization-param-path: models of transformers have no scales")
        return info
    decoder, count = with_kv_scales(info.decoder, _scales(config, info, file, place))
    if not count:
        return info
    log.info("KV cache: %d layers with scales, from %s", count, file or "the checkpoint")
    return replace(info, decoder=decoder)


def _scales(config: ServerConfig, info: ModelInfo, file: str | None, place: Place) -> Scales:
    if file:
        path = Path(file).expanduser()
        num_layers = len(info.decoder.blocks)
        return file_scales(path, num_layers, info.model_type, place.tp_rank, place.tp)
    if config.model.load_format in ("dummy", "sharded_state"):
        return {}
    source = open_folder(info.folder, config.model.load_format)
    try:
        return checkpoint_scales(source)
    finally:
        source.close()
