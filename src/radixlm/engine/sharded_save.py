"""Engine.save_sharded_model: the parameters that are served as files of --load-format
sharded_state, which start without joining any tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.engine.live_weights import WeightUpdater
from radixlm.engine.packed_key import WEIGHT_SUFFIXES
from radixlm.models.decoder import DecoderModel
from radixlm.quant.param import Param
from radixlm.weights.load import open_reader
from radixlm.weights.options import DEFAULT, LoadOptions, is_pattern
from radixlm.weights.param_reader import ParamReader

MAX_BYTES = 5 << 30  # of a file


class ShardedSaver:
    """Of one engine. Each parameter is whole, in files of rank 0, so that any number of ranks takes
    its parts of them."""

    def __init__(self, model: Any, updater: WeightUpdater, has_encoder: bool) -> None:
        """``has_encoder``: of images, video or audio, whose weights are not the model's."""
        self._model, self._updater, self._has_encoder = model, updater, has_encoder
        self._thread = ThreadPoolExecutor(1, "save weights")

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What intake asks of it."""
        return {"save_sharded_model": self._save}

    def _save(self, args: dict[str, Any]) -> Future[Callable[[], Any]]:
        """``path``: of the folder; ``pattern``: of names, ``max_size``: bytes of a file, or None.
        InvalidRequest for models whose parameters are not all here."""
        model, source = self._model, self._updater.source
        is_whole = isinstance(model, DecoderModel) and model.stage.is_first and model.stage.is_last
        if not is_whole or self._has_encoder:
            raise InvalidRequest(
                "save_sharded_model: this engine has no whole native model, or an encoder beside "
                "it; --pp-size 1 with a text model works"
            )
        self._updater.open_source()  # InvalidRequest for weights without names
        pattern, size = args.get("pattern") or DEFAULT.pattern, args.get("max_size") or MAX_BYTES
        if not is_pattern(pattern):
            raise InvalidRequest(f"pattern: {pattern!r:.80}; {DEFAULT.pattern} works", "pattern")
        if not isinstance(size, int) or size <= 0:
            raise InvalidRequest(f"max_size: {size!r:.40} is no number of bytes", "max_size")
        target, folder = Path(args["path"]).expanduser(), Path(source.folder)
        deltas = tuple(map(Path, source.deltas))
        reader = open_reader(model, folder, source.load_format, None, deltas, LoadOptions())
        return self._thread.submit(
            lambda: self._write(model, reader, folder, target, pattern, size)
        )

    def _write(
        self,
        model: DecoderModel,
        reader: ParamReader,
        folder: Path,
        target: Path,
        pattern: str,
        max_bytes: int,
    ) -> Callable[[], Any]:
        first = pattern.replace("{rank}", "0")
        try:
            target.mkdir(parents=True, exist_ok=True)
            with closing(reader):
                sizes = [
                    _write_part(target / first.replace("{part}", str(part)), tensors)
                    for part, tensors in enumerate(_parts(model, reader, max_bytes))
                ]
            for file in folder.iterdir() if folder.is_dir() else ():
                if file.is_file() and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
                    shutil.copyfile(file, target / file.name)
        except (RadixError, OSError, ValueError) as error:
            why = f"path: {target}: {error}"
            return lambda: _refuse(why)
        return lambda: {"num_files": len(sizes), "num_bytes": sum(sizes)}


def _parts(
    model: DecoderModel, reader: ParamReader, max_bytes: int
) -> Iterator[Mapping[str, Tensor]]:
    """The parameters by their path, as many together as ``max_bytes`` hold."""
    part, num_bytes = dict[str, Tensor](), 0
    for layer_path, layer in model.layers():
        for name, own in layer.own_params().items():
            path, param = f"{layer_path}.{name}", Param(own.whole_shape, own.storage)
            param.fill(reader.read(path, param), model.weight_dtype, torch.device("cpu"))
            value = param.take().clone()
            reader.release(path)
            if part and num_bytes + value.nbytes > max_bytes:
                yield part
                part, num_bytes = {}, 0
            part[path], num_bytes = value, num_bytes + value.nbytes
    yield part


def _write_part(path: Path, tensors: Mapping[str, Tensor]) -> int:
    save_file(dict(tensors), path)
    return path.stat().st_size


def _refuse(why: str) -> None:
    raise InvalidRequest(why, "path")
