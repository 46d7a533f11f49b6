"""Tensor dumps by the options --debug-tensor-dump-*."""

from __future__ import annotations

from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.config.execute import ExecuteConfig
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel
from radixlm.models.dump import TensorDump

_INPUT = "--debug-tensor-dump-input-file"


def open_dump(execute: ExecuteConfig, model: Model, rank: int) -> TensorDump | None:
    """What writes the steps of this rank; None without --debug-tensor-dump-output-folder.
    ConfigError for models whose layers it cannot stand before."""
    folder = execute.debug_tensor_dump_output_folder
    if folder is None:
        return None
    flag = "--debug-tensor-dump-output-folder"
    if not isinstance(model, DecoderModel) or model.decoder.cycles is not None:
        raise ConfigError(f"{flag}: the layers of this model cannot be dumped; leave it out")
    if model.context.attention_groups is not None:
        raise ConfigError(f"{flag}: leave out --enable-dp-attention")
    injected = None
    if execute.debug_tensor_dump_inject:
        injected = Path(execute.debug_tensor_dump_input_file or "")
        if injected.suffix != ".safetensors" or not injected.is_file():
            raise ConfigError(
                f"--debug-tensor-dump-inject: {_INPUT} {injected} is no dump; "
                "name a step-*.safetensors"
            )
    prefill_only = execute.debug_tensor_dump_prefill_only
    try:
        return TensorDump(model, Path(folder) / f"TP{rank}", prefill_only, injected)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror or error}") from error
