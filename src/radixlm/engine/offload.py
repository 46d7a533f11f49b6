"""--cpu-offload-gb and --offload-group-size: which blocks of a GPU's model stay on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from radixlm.base.errors import ConfigError
from radixlm.base.units import format_bytes
from radixlm.config.memory import MemoryConfig
from radixlm.config.server_config import ServerConfig
from radixlm.layers.module import Module
from radixlm.models.decoder import DecoderModel
from radixlm.models.offload import CudaCopies, Offloader

log = logging.getLogger(__name__)

FLAGS = "--cpu-offload-gb, --offload-group-size"


def is_offloading(config: ServerConfig) -> bool:
    """Whether weights of this server's model stay on the host."""
    memory, device = config.memory, config.execute.device or "cpu"
    return device != "cpu" and (memory.cpu_offload_gb > 0 or memory.offload_group_size > 0)


@contextmanager
def offloading(config: ServerConfig, model: Module) -> Iterator[None]:
    """Within it, the model is loaded; each chosen block goes to the host as soon as it is whole,
    so that the device never holds all of them. ConfigError for models that cannot."""
    if not is_offloading(config):
        yield
        return
    if not isinstance(model, DecoderModel) or model.decoder.cycles is not None or model.banks:
        raise ConfigError(f"{FLAGS}: blocks of this model share their weights; leave them out")
    offloader = Offloader(model, config.memory.offload_prefetch_step, CudaCopies)
    blocks = [model.blocks[layer] for layer in range(model.stage.first, model.stage.end)]
    chooses = _choice(config.memory, len(blocks))
    for index, block in enumerate(blocks):
        finish = partial(_finish_and_take, block.finish, offloader, block, index, chooses)
        vars(block)["finish"] = finish
    yield
    for block in blocks:
        del vars(block)["finish"]
    offloader.finish()
    log.info("%s of weights stay in host memory", format_bytes(offloader.num_bytes))


def _finish_and_take(
    finish: Callable[[], None],
    offloader: Offloader,
    block: Module,
    index: int,
    chooses: Callable[[int, int], bool],
) -> None:
    finish()  # the last layer of the block
    if chooses(index, offloader.num_bytes):
        with torch.no_grad():
            offloader.take(block)


def _choice(memory: MemoryConfig, num_blocks: int) -> Callable[[int, int], bool]:
    """Whether block ``index`` is offloaded when so many bytes are already: the last ones of each
    group, or as many as the limit says, evenly spread so that copies have time."""
    size, limit = memory.offload_group_size, memory.cpu_offload_gb << 30
    if size > 0:
        first = size - memory.offload_num_in_group
        return lambda index, num_bytes: index % size >= first
    return lambda index, num_bytes: num_bytes < limit * (index + 1) // num_blocks
