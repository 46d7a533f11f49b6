"""``--load-format sharded_state``: the model's own parameters, already concatenated, in a set of
files for each tensor-parallel rank, as SGLang and vLLM save it."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.quant.param import Param
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.mapper import LoadableModel
from radixlm.weights.options import LoadOptions
from radixlm.weights.origin import Origin, describe_files, describe_origins
from radixlm.weights.param_reader import ParamReader, listing
from radixlm.weights.safetensors_file import SafetensorsSource


class ShardedStateReader(ParamReader):
    """Reads parameters by their path in the model: this rank's, or where it has no files its parts
    of those that rank 0 has whole."""

    def __init__(self, model: LoadableModel, folder: Path, options: LoadOptions) -> None:
        pattern = options.pattern.replace("{part}", "*")
        names = pattern.replace("{rank}", str(options.rank))
        files = sorted(folder.glob(names)) or sorted(folder.glob(pattern.replace("{rank}", "0")))
        if not files:
            raise CheckpointError(f"{folder} holds no {names}")
        self.folder = folder
        self._source = SafetensorsSource(files)
        self._sizes = dict(self._source.sizes())
        self.total_bytes = sum(self._sizes.values())
        self.ignored: tuple[str, ...] = ()
        wanted = {f"{path}.{name}" for path, layer in model.layers() for name in layer.own_params()}
        where = describe_files(files, folder)
        problems = [f"missing from {where}: {n}" for n in sorted(wanted - self._sizes.keys())]
        problems += [
            f"not part of the model: {describe_origins(self._source.origins(name), folder)}"
            for name in sorted(self._sizes.keys() - wanted)
        ]
        if problems:
            raise CheckpointError(listing(f"{folder} was saved from another model", problems))

    def read(self, path: str, param: Param) -> Tensor:
        return param.part_of(self._source.read(path))

    def read_quantized(self, path: str, param: Param) -> QuantizedWeight | None:
        return None

    def quantized_bytes(self, path: str) -> int:
        return 0

    def origins(self, path: str) -> Sequence[Origin]:
        return self._source.origins(path)

    def release(self, path: str) -> int:
        self._source.release(path)
        return self._sizes[path]
