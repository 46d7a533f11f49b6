"""Where the packed cache lies, what its files are named by, and when they are read and written.

A file is found by what decides its bits: names and sizes of the checkpoint's files, the model's
description, options, this rank's part, the kernels, and the code that packs. A note beside it holds
when each file of the checkpoint changed last, and the SHA-256 of all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from radixlm.base.record import Record, replace
from radixlm.base.system_memory import system_memory
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.host import free_memory_bytes
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.groups import Ranks
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.packed_key import (
    WEIGHT_SUFFIXES,
    Stamp,
    cache_folder,
    checkpoint_key,
    content_of,
    digest_of,
    stamps_of,
)
from radixlm.engine.prefault import PACKED_SHARES
from radixlm.kernels.cpu.extension import available, native
from radixlm.kernels.dispatch import Kernels
from radixlm.models.decoder import DecoderModel
from radixlm.models.weight_pager import make_pager
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.weights.load import LoadReport
from radixlm.weights.mapper import LoadableModel
from radixlm.weights.packed_cache import (
    ModelRecorder,
    Recorder,
    StreamingRecorder,
    load_packed,
)
from radixlm.weights.packed_file import (
    VERSION,
    FileWriter,
    LayerEntry,
    MappedFile,
    PackedFile,
    PackedFileError,
    UnfitModelError,
)

log = logging.getLogger(__name__)
MIN_BYTES: Final = 64 << 20  # of a checkpoint that is cached without being asked
CHECKED_SHARE: Final = 0.5  # of available memory: larger files are not read when they are mapped
LARGE_SHARE: Final = 0.6  # of available memory: larger weights stay in their file
RESIDENT_SHARE: Final = 0.5  # of available memory: for the part of those that stays in memory
IDLE_S: Final = 10.0  # after which a server that nobody asks writes its cache
STALE_S: Final = 3600.0  # unfinished files of processes that were killed


class _Note(Record):
    """``content``: SHA-256 of the files, "" until it is computed. ``is_unfit``: some layer of this
    model cannot be made from a file."""

    stamps: tuple[Stamp, ...]
    content: str = ""
    is_unfit: bool = False


class PackedWeights(Feature):
    """The packed file of one rank's model. As a feature it learns of the first token, after which
    the file is written."""

    def __init__(
        self, config: ServerConfig, info: ModelInfo, kernels: Kernels, ranks: Ranks
    ) -> None:
        self._folder, model = info.folder, config.model
        self._directory, self._limit_bytes = cache_folder(config), int(model.packed_cache_gb * 1e9)
        self._stamps = stamps_of(info.folder)
        self._free_bytes = available_bytes() // config.parallel.num_processes
        self.is_large = False  # weights stay in their file
        self.is_on = available and self._wants(config, info, kernels)
        self.path = self._directory / "off"
        if self.is_on:
            self.path = self._directory / self._name(config, info, kernels, ranks)
            note = self._read_note()
            self.is_on = note is None or not note.is_unfit
        self.mapped_bytes = 0  # of a file that the model's weights lie in
        self._recorder: ModelRecorder | None = None
        self._streaming: StreamingRecorder | None = None
        self._report: LoadReport | None = None
        self._may_write, self._stops = threading.Event(), threading.Event()
        self.writer: threading.Thread | None = None

    def _wants(self, config: ServerConfig, info: ModelInfo, kernels: Kernels) -> bool:
        model, parallel = config.model, config.parallel
        num_bytes = sum(s.num_bytes for s in self._stamps if s.name.endswith(WEIGHT_SUFFIXES))
        is_cpu = config.execute.device == "cpu" and kernels.copies_weights
        if model.disable_packed_cache or not is_cpu or not num_bytes or parallel.enable_eplb:
            return False
        if info.is_transformers or model.load_format in ("dummy", "sharded_state"):
            return False
        kind = model.quantized_as
        share = next((share for name, share in PACKED_SHARES.items() if name in kind), 1.0)
        packed_bytes = share * num_bytes / config.parallel.world_size
        self.is_large = packed_bytes > LARGE_SHARE * self._free_bytes
        is_small = num_bytes < MIN_BYTES
        is_quantized = kind or checkpoint_quant(info.folder)
        return bool(model.packed_cache_dir or self.is_large or (is_quantized and not is_small))

    def _name(self, config: ServerConfig, info: ModelInfo, kernels: Kernels, ranks: Ranks) -> str:
        first = checkpoint_key(config, info.folder, self._stamps)
        chosen = sorted(kernels.chosen.items())
        facts = VERSION, torch.__version__, repr(info.decoder), repr(ranks.place), chosen
        return f"{first}-{digest_of(native().isa(), *facts)}.packed"

    def load(self, model: LoadableModel) -> LoadReport | None:
        """Make the model from its file; None if there is none that fits."""
        started = time.monotonic()
        try:
            file = PackedFile(self.path)
            self._check_note(file)
            if file.num_bytes < CHECKED_SHARE * self._free_bytes:
                file.check()
            load_packed(model, file)
            report = msgspec.convert(file.table.facts, LoadReport)
            self.mapped_bytes = file.num_bytes
            report = self._paged(model, file, file.table.layers, report)
        except FileNotFoundError:
            return None
        except (OSError, PackedFileError, msgspec.MsgspecError) as error:
            self.is_on = not isinstance(error, UnfitModelError)
            then = "it will be written again" if self.is_on else "this model gets no packed cache"
            log.warning("%s is not used: %s; %s", self.path, error, then)
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                if not self.is_on:
                    self._write_note(_Note(self._stamps, is_unfit=True))
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path)  # the file that was used longest ago goes first
        size, duration = format_bytes(file.num_bytes), format_seconds(time.monotonic() - started)
        log.info("mapped %d parameters, %s, from %s in %s",
                 report.num_params, size, self.path, duration)  # fmt: skip
        return report

    def _paged(
        self,
        model: LoadableModel,
        file: MappedFile,
        layers: Mapping[str, LayerEntry],
        report: LoadReport,
    ) -> LoadReport:
        """Let a model that is too large read its weights from the file in each step; the report
        with the bytes that stay in memory."""
        if not self.is_large or not isinstance(model, DecoderModel):
            return report
        most = int(RESIDENT_SHARE * self._free_bytes)
        stays = max(0, min(most, report.num_bytes))
        model.pager, model.use_program = make_pager(model, file, layers, stays), False
        log.info(
            "weights of %s are read from %s as they are needed; %s of them stay in memory",
            format_bytes(report.num_bytes), self.path, format_bytes(stays),
        )  # fmt: skip
        return replace(report, num_bytes=stays)

    def _check_note(self, file: PackedFile) -> None:
        """PackedFileError unless the checkpoint is the one that was packed: unchanged since, or of
        the same content."""
        note = self._read_note()
        if note is None:
            raise PackedFileError("the note of its checkpoint is missing")
        if note.stamps == self._stamps:
            return
        if not note.content or content_of(self._folder, self._stamps) != note.content:
            raise PackedFileError("the checkpoint has changed")
        with contextlib.suppress(OSError):
            self._write_note(_Note(self._stamps, note.content))

    @property
    def _note_path(self) -> Path:
        return self.path.with_suffix(".json")

    def _read_note(self) -> _Note | None:
        try:
            return msgspec.json.decode(self._note_path.read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write_note(self, note: _Note) -> None:
        part = self._note_path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(note))
        os.replace(part, self._note_path)

    def recorder(self) -> Recorder:
        """What is to note the layers of a model that is loaded in place of a file. A large one is
        written while it loads."""
        if self.is_large:
            try:
                self._streaming = self._stream()
                return self._streaming
            except (OSError, PackedFileError) as error:
                log.warning("%s: the weights must fit into memory: %s", self._directory, error)
        self._recorder = ModelRecorder()
        return self._recorder

    def _stream(self) -> StreamingRecorder:
        num_bytes = sum(stamp.num_bytes for stamp in self._stamps)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_room(self._directory, self._limit_bytes, num_bytes)
        return StreamingRecorder(FileWriter(self.path), 4 * num_bytes + (1 << 30))

    def gives_up(self, error: Exception) -> bool:
        """A large model could not be written while it was loaded: whether that is why."""
        if self._streaming is None:
            return False
        log.warning("%s: the weights must fit into memory: %s", self._directory, error)
        self._streaming.close()
        self._streaming, self.is_large = None, False
        return True

    def keep(self, model: LoadableModel, report: LoadReport) -> LoadReport:
        """The recorded model is loaded: write it after the first token, or when nobody asks. The
        report with the bytes that stay in memory."""
        if self._streaming is not None:
            self._write_note(_Note(self._stamps))
            self._streaming.write(msgspec.to_builtins(report))
            self.mapped_bytes = report.num_bytes
            return self._paged(model, self._streaming.file, self._streaming.layers, report)
        self._report = report
        self.writer = threading.Thread(target=self._write_later, name="packed cache", daemon=True)
        self.writer.start()
        return report

    def committed(self, request: Request, tokens: Sequence[int]) -> bool | None:
        """The first token is there."""
        self._may_write.set()
        return False

    def arrive(self, request: Request) -> bool:
        """Be told of its tokens until the first one."""
        return not self._may_write.is_set() and self.writer is not None

    def close(self) -> None:
        """Give up a file that is being written."""
        self._stops.set()
        self._may_write.set()
        if self.writer is not None:
            self.writer.join(5.0)

    def _write_later(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self._may_write.wait(IDLE_S)
        recorder, report, self._recorder = self._recorder, self._report, None
        assert recorder is not None and report is not None
        started = time.monotonic()
        try:
            if not self._write(recorder, report):
                return
        except OSError as error:
            log.warning("no packed weights are kept in %s: %s", self._directory, error.strerror)
            return
        except PackedFileError as error:
            log.warning("no packed weights are kept: %s", error)
            return
        size = format_bytes(self.path.stat().st_size)
        duration = format_seconds(time.monotonic() - started)
        log.info("wrote %s of packed weights to %s in %s", size, self.path, duration)

    def _write(self, recorder: ModelRecorder, report: LoadReport) -> bool:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_room(self._directory, self._limit_bytes, report.num_bytes)
        if stamps_of(self._folder) != self._stamps:
            raise PackedFileError("the checkpoint changed while it was loaded")
        self._write_note(_Note(self._stamps))
        writer = FileWriter(self.path)
        try:
            recorder.write(writer, msgspec.to_builtins(report), self._stops.is_set)
        finally:
            writer.close()
        if self._stops.is_set() or not self.path.exists():
            return False
        self._write_note(_Note(self._stamps, content_of(self._folder, self._stamps)))
        if stamps_of(self._folder) != self._stamps:
            self.path.unlink(missing_ok=True)
            raise PackedFileError("the checkpoint changed while it was packed")
        return True


def available_bytes() -> int:
    """Memory that this process could still take, within its container's limit."""
    return free_memory_bytes(system_memory().available)


def make_room(directory: Path, limit_bytes: int, num_bytes: int) -> None:
    """Delete what was used longest ago until ``num_bytes`` more fit into the limit, and unfinished
    files. PackedFileError if they do not fit, or the disk lacks room."""
    for part in directory.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_S:
                part.unlink()
    if num_bytes > limit_bytes:
        raise PackedFileError(
            f"{format_bytes(num_bytes)} are more than --packed-cache-gb {limit_bytes / 1e9:g}"
        )
    files = sorted(directory.glob("*.packed"), key=lambda path: path.stat().st_mtime)
    total = num_bytes + sum(path.stat().st_size for path in files)
    for path in files:
        if total <= limit_bytes:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
    if shutil.disk_usage(directory).free < 1.2 * num_bytes:
        raise PackedFileError(f"{directory} lacks room for {format_bytes(num_bytes)}")
