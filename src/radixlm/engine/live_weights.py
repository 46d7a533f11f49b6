"""WeightUpdater: other weights for the model that is served.

A thread reads and packs them beside those that are served (``models/shadow.py``) and checks names,
shapes, dtypes and NaN. ``publish_weights`` then exchanges pointers between two steps, which cannot
fail. See docs/design/weights.md.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial as bind
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from radixlm.arch.hf import describe, load_config
from radixlm.base.errors import CheckpointError, InvalidRequest, RadixError
from radixlm.base.heap import trim_heap
from radixlm.base.lazy import load
from radixlm.base.record import Record, replace
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.engine.adapters import AdapterLoader
from radixlm.engine.draft_model import LoadedDraft
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.offload import is_offloading
from radixlm.engine.packed_weights import available_bytes
from radixlm.engine.ranks import Peers
from radixlm.layers.module import Module
from radixlm.media.encoder_cache import EncoderCache
from radixlm.models.build import Model, NativeModel, is_transformers, mixtures_of
from radixlm.models.decoder import DecoderModel
from radixlm.models.shadow import Shadow
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.tiers.manifest import weight_files
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.weights.folder import open_folder
from radixlm.weights.load import load_weights
from radixlm.weights.mapper import WeightsMapper
from radixlm.weights.options import LoadOptions
from radixlm.weights.param_reader import fused_spellings
from radixlm.weights.size import stored_bytes
from radixlm.weights.source import TensorSource
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)

# share of the free memory that new weights may take beside the old ones
MAX_SHARE = 0.95


class Prepared(Record, eq=False):
    """Weights that wait to be published. ``calls`` put them in place, in this order; ``adapt`` does
    so with adapters and returns their digests. ``copies``: of files of another node."""

    source: WeightsSource
    calls: list[Callable[[], None]]
    adapt: Callable[[], dict[int, str]] | None
    seconds: float
    copies: list[TensorSpool]


class Partial(Record):
    """An update of some tensors."""

    names: list[str]
    num_bytes: int


class WeightUpdater:
    """The weights of one rank. Outlives the schedulers of the engine."""

    def __init__(
        self,
        config: ServerConfig,
        info: ModelInfo,
        model: Model,
        peers: Peers,
        source: WeightsSource | None,
        copies: list[TensorSpool],
    ) -> None:
        """``source``: what was loaded in place of the checkpoint of ``info``; ``copies`` of its
        files."""
        self._config, self._info, self._model, self._peers = config, info, model, peers
        self._copies = copies
        self.source = source or WeightsSource(str(info.folder), config.model.load_format)
        self.is_original = source is None
        # of a model whose weights are released, too
        self._is_paged = isinstance(model, DecoderModel) and model.pager is not None
        if source is not None:
            self.source = msgspec.structs.replace(source, digest=digest_of(source))
            if self.source.digest != source.digest:
                log.warning("%s: its files are others than those of the update", source.folder)
        self._prepared: Prepared | None = None
        self._thread = ThreadPoolExecutor(1, "update weights")

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What intake asks of it."""
        return {
            "prepare_weights": self._prepare,
            "publish_weights": self._publish,
            "drop_weights": self._drop,
        }

    def later(self) -> WeightsSource | None:
        """What is served in place of the checkpoint of the start."""
        return None if self.is_original else self.source

    @property
    def namespace(self) -> str:
        """Of cached pages."""
        return self._config.model.weight_version if self.is_original else self.source.namespace

    def follow(
        self,
        facts: dict[str, Any],
        draft: LoadedDraft | None,
        adapters: AdapterLoader | None,
        media: EncoderCache | None,
        exchange: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        """What hangs on the weights: what intake is told when an engine is ready, drafts, adapters
        and encoder. ``exchange`` makes calls while no CUDA graph knows addresses."""
        self._facts, self._draft, self._adapters = facts, draft, adapters
        self._media, self._exchange = media, exchange
        self._tell()

    def _tell(self) -> None:
        facts = self._facts
        facts["weights"] = "" if self.is_original else self.source.digest

    def read(self, name: str) -> Tensor | None:
        """A parameter by its name in the checkpoint, read from there, as the loaded one is packed
        for the kernels; of a tied model either name of the table. None if there is none."""
        if is_transformers(self._model):
            return self._model.weight(name)
        source = self.open_source()
        present = source.sizes()
        if name not in present and self._model.decoder.tied and name.endswith("lm_head.weight"):
            (name,) = WeightsMapper(self._model.decoder, present).mapping("embed", "weight").names()
        return source.read(name).clone() if name in present else None

    def open_source(self) -> TensorSource:
        """The tensors that are served, as floats; InvalidRequest if they have no names."""
        folder, load_format = Path(self.source.folder), self.source.load_format
        if load_format in ("dummy", "sharded_state") or is_transformers(self._model):
            raise InvalidRequest(f"--load-format {load_format} has no named tensors to show")
        deltas = tuple(map(Path, self.source.deltas))
        fused = fused_spellings(self._model)  # type: ignore[arg-type]
        return open_folder(folder, load_format, deltas=deltas, fused=fused)

    # ---- commands --------------------------------------------------------------------------

    def _prepare(self, args: dict[str, Any]) -> Future[Callable[[], dict[str, Any]]]:
        """Read the weights of ``source``. Of a ``partial`` update only the tensors ``names`` of
        ``num_bytes`` are new."""
        self._prepared = None
        source = msgspec.convert(args["source"], WeightsSource)
        partial = args.get("partial")
        return self._thread.submit(
            self._read_whole, source, None if partial is None else Partial(**partial)
        )

    def _read_whole(
        self, source: WeightsSource, partial: Partial | None
    ) -> Callable[[], dict[str, Any]]:
        try:
            prepared = self._read(*self._peers.bring(source, self._info.folder), partial)
        except (RadixError, OSError, RuntimeError, ValueError, MemoryError) as error:
            why = str(error) or type(error).__name__

            def fail() -> dict[str, Any]:
                raise InvalidRequest(f"{why}; the weights that are served have not changed")

            return fail

        def keep() -> dict[str, Any]:
            self._prepared = prepared
            return {"digest": prepared.source.digest, "seconds": prepared.seconds}

        return keep

    def _read(
        self, source: WeightsSource, copies: list[TensorSpool], partial: Partial | None
    ) -> Prepared:
        started_s = time.perf_counter()
        model = self._model
        if not isinstance(model, NativeModel):
            raise InvalidRequest(
                f"{self._info.architecture} runs by transformers, whose weights cannot be updated; "
                "a native model can (--model-impl radixlm), or start the server again"
            )
        if why := self._why_fixed():
            raise InvalidRequest(f"{why}; start the server again with the new weights")
        folder = Path(source.folder)
        self._check_folder(folder)
        is_empty = model.contents is not None and model.contents.is_dropped
        only = None if partial is None or is_empty else frozenset(partial.names)
        part_bytes = [partial.num_bytes] if partial is not None and not is_empty else []
        self._check_memory(min([stored_bytes(model), *part_bytes]), model.context.device)
        shadow = Shadow(model)
        load_weights(
            shadow.root,  # type: ignore[arg-type]
            folder,
            source.load_format,
            device=model.context.device,
            progress=False,
            deltas=tuple(map(Path, source.deltas)),
            only=only,
            options=LoadOptions(rank=model.context.ranks.place.tp_rank),
        )
        calls, adapt = [shadow.publish()], None
        if self._draft is not None:
            calls.append(self._draft.renew(source))
        if self._media is not None and partial is not None:
            self._check_part(folder, frozenset(partial.names))
        elif self._media is not None:
            make = load("radixlm.engine.mm_encoders:encoder_cache")
            other = make(replace(self._info, folder=folder), model.context.device)
            calls.append(bind(self._media.take_encoder, other))
        if self._adapters is not None:
            adapt = self._adapters.renew(cast(DecoderModel, shadow.complete()))
        if model.context.device.type == "cuda":  # copies on this thread's stream
            torch.cuda.synchronize(model.context.device)
        digest = digest_of(source)
        if source.digest not in ("", digest):
            raise InvalidRequest(f"{folder}: its files have changed meanwhile; update again")
        seconds = time.perf_counter() - started_s
        source = msgspec.structs.replace(source, digest=digest)
        return Prepared(source, calls, adapt, seconds, copies)

    def _why_fixed(self) -> str:
        """Why the options do not let weights change; "" if they do."""
        if is_offloading(self._config):
            return "--cpu-offload-gb, --offload-group-size: weights on the host cannot be updated"
        if self._config.parallel.enable_eplb:
            return "--enable-eplb has moved experts, which new weights do not know"
        if self._config.execute.enable_torch_compile:
            return "--enable-torch-compile has compiled the weights into its steps"
        if self._is_paged:
            return "weights that are read from their packed file cannot be updated"
        return ""

    def _check_part(self, folder: Path, names: frozenset[str]) -> None:
        """CheckpointError for tensors of an encoder, which comes as a whole."""
        layers = self._model.layers() if isinstance(self._model, Module) else ()
        known = WeightsMapper(self._info.decoder, names)
        own = {
            name
            for path, layer in layers
            for param in layer.own_params()
            for mapping in known.spellings(path, param)
            for name in mapping.names()
        }
        if left := sorted(names - own):
            raise CheckpointError(
                f"{left[0]} is not of the text model; an encoder is updated by "
                "/update_weights_from_disk with a whole checkpoint"
            )

    def _check_folder(self, folder: Path) -> None:
        """CheckpointError for the folder of another model."""
        own = Path(self._info.folder)
        if folder == own or not (folder / "config.json").is_file():
            return
        found, wanted = describe(load_config(folder)), describe(load_config(own))
        if found != wanted:
            names = (
                name
                for name in type(wanted).__struct_fields__
                if getattr(found, name) != getattr(wanted, name)
            )
            raise CheckpointError(
                f"{folder}: config.json describes another model than the one that is served "
                f"({self._info.architecture}): {', '.join(names)} differ; a checkpoint of the "
                "same model works"
            )
        if checkpoint_quant(folder) != checkpoint_quant(own):
            raise CheckpointError(
                f"{folder}: is quantized in another way than {own}; start the server with it"
            )

    def _check_memory(self, num_bytes: int, device: torch.device) -> None:
        """InvalidRequest where there is no room for so many bytes beside the weights."""
        if device.type == "cuda":
            found = torch.cuda.mem_get_info(device)[0]
        else:
            found = available_bytes() // self._config.parallel.num_processes
        free = int(found * MAX_SHARE)
        if num_bytes > free:
            raise InvalidRequest(
                f"the new weights take {format_bytes(num_bytes)} beside the old ones, which stay "
                f"whole until all is checked; {format_bytes(free)} are free: make room, or update "
                "some tensors at a time"
            )

    def _publish(self, args: dict[str, Any]) -> dict[str, Any]:
        """Let the prepared weights of this ``digest`` take effect."""
        prepared = self._prepared
        if prepared is None or prepared.source.digest != args["digest"]:
            raise InvalidRequest("no such weights are prepared; update again")
        self._prepared = None
        model = self._model
        assert isinstance(model, Module)
        self._exchange(prepared.calls)
        digests = prepared.adapt() if prepared.adapt is not None else {}
        for mixture in mixtures_of(model):
            mixture.record(mixture.is_recorded)  # the new experts know nothing of it
        if model.contents is not None:
            model.contents.is_dropped = False
        self.source, self.is_original = prepared.source, False
        self._copies = prepared.copies
        self._tell()
        self._thread.submit(_give_back_memory)
        log.info(
            "weights of %s are served now (digest %s), read in %s",
            self.source.deltas[-1] if self.source.deltas else self.source.folder,
            self.source.digest[:8],
            format_seconds(prepared.seconds),
        )
        adapters = [[number, digest] for number, digest in digests.items()]
        return {"namespace": self.namespace, "digest": self.source.digest, "adapters": adapters}

    def _drop(self, args: dict[str, Any]) -> None:
        """Forget what is prepared."""
        self._prepared = None
        self._thread.submit(_give_back_memory)


def digest_of(source: WeightsSource) -> str:
    """The digest of a checkpoint with its deltas, by every byte: an update may change few numbers,
    and cached pages of other weights must not be found. Alike for equal files."""
    hasher = hashlib.sha256()
    for number, folder in enumerate((source.folder, *source.deltas)):
        for path in weight_files(Path(folder)):
            about = path.stat()
            whole = _file_digest(path, about.st_ino, about.st_size, about.st_mtime_ns)
            hasher.update(f"{number} {path.name} {whole} ".encode())
    return hasher.hexdigest()


@functools.lru_cache(4096)  # a delta leaves the checkpoint below it as it is
def _file_digest(path: Path, *version: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _give_back_memory() -> None:
    """Return freed memory of torch's allocator and of the C heap to the system."""
    torch.cuda.empty_cache()  # of no effect without a GPU
    trim_heap()
