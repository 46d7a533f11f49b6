"""Traces of steps by torch's profiler, for /start_profile and /stop_profile. They open in
chrome://tracing and Perfetto."""

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from radixlm.base import env
from radixlm.base.deferred import TORCH_SHAPES, run_deferred
from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record

log = logging.getLogger(__name__)

ACTIVITIES = ("CPU", "GPU", "MEM", "CUDA_PROFILER")
DEFAULT_ACTIVITIES = ("CPU", "GPU")
STAGES = {"prefill": "EXTEND", "decode": "DECODE"}  # as SGLang names their files


class ProfileRequest(Record):
    """A trace that was asked for. Steps are counted from the start of the engine."""

    folder: Path
    name: str
    activities: tuple[str, ...]
    first_step: int
    num_steps: int | None  # None: until it is stopped
    with_stack: bool
    record_shapes: bool
    stages: tuple[str, ...] = ()  # one trace each, of ``num_steps`` steps; (): all steps together


class Profiler:
    """At most one trace at a time. All calls come from the thread that runs the steps."""

    def __init__(self, device: torch.device, rank: int = 0, replica: int = 0) -> None:
        self._device = device
        self._who = f"DP-{replica}-TP-{rank}" if replica else f"TP-{rank}"
        self._order: ProfileRequest | None = None
        self._profile: profile | None = None
        self._is_begun = False
        self._stage, self._left = "", 0
        self._stages: list[str] = []  # yet to be traced
        self.num_steps = 0

    def count(self, is_decode: bool = False) -> None:
        """Called before every step. ``is_decode``: no part of a prompt is in it."""
        self.num_steps += 1
        order = self._order
        if order is None:
            return
        try:
            self._count(order, is_decode)
        except OSError as error:  # the step goes on
            log.error("the profile is lost: %s: %s", order.folder, error)

    def _count(self, order: ProfileRequest, is_decode: bool) -> None:
        if order.stages:
            self._count_stage(order, "decode" if is_decode else "prefill")
            return
        if not self._is_begun and self.num_steps >= order.first_step:
            self._begin(order)
        elif order.num_steps is not None and self.num_steps >= order.first_step + order.num_steps:
            self._end(order)

    def _count_stage(self, order: ProfileRequest, stage: str) -> None:
        """The next step is one of ``stage``: a stage's trace ends with its last step, or before the
        first of another kind."""
        if self.num_steps < order.first_step:
            return
        if self._is_begun and (stage != self._stage or not self._left):
            self._end(order)
            if not self._stages:
                return
            self._order = order
        if not self._is_begun and stage in self._stages:
            self._stages.remove(stage)
            self._stage, self._left = stage, order.num_steps or 1
            self._begin(order)
        self._left -= 1

    def start(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trace now, or at ``start_step``; InvalidRequest for what cannot be."""
        if self._order is not None:
            raise InvalidRequest("a profile is being taken; /stop_profile ends it")
        order = self._read(args)
        with _writing(order.folder):
            order.folder.mkdir(parents=True, exist_ok=True)
        run_deferred(TORCH_SHAPES)  # the profiler imports the rest of torch
        self._order, self._stages = order, list(order.stages)
        if args.get("start_step") is None and order.num_steps is None and not order.stages:
            self._begin(order)
        return {"output_dir": str(order.folder)}

    def stop(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """End the trace and write it; its files."""
        if self._order is None:
            raise InvalidRequest("no profile is being taken; /start_profile begins one")
        with _writing(self._order.folder):
            return {"files": self._end(self._order)}

    def _has_snapshot(self, order: ProfileRequest) -> bool:
        """Whether MEM is CUDA's memory history; on a CPU it is part of the trace."""
        return "MEM" in order.activities and self._device.type == "cuda"

    @contextmanager
    def of_graphs(self, is_wanted: bool) -> Iterator[None]:
        """Trace the recording of graphs, if that is wanted."""
        if not is_wanted:
            yield
            return
        self.start({"profile_prefix": "graphs"})
        try:
            yield
        finally:
            log.info("trace of the graphs: %s", self.stop({})["files"])

    def _read(self, args: Mapping[str, Any]) -> ProfileRequest:
        activities = tuple(args.get("activities") or DEFAULT_ACTIVITIES)
        unknown = sorted(set(activities) - set(ACTIVITIES))
        if unknown:
            known = ", ".join(ACTIVITIES)
            raise InvalidRequest(f"activities: {unknown[0]!r} is none of {known}", "activities")
        if self._device.type != "cuda":
            if args.get("activities") and not {"CPU", "MEM"} & set(activities):
                raise InvalidRequest("activities: without a GPU CPU and MEM work", "activities")
            activities = ("CPU", *(one for one in activities if one == "MEM"))
        start, count = args.get("start_step"), args.get("num_steps")
        parts = (args.get("profile_prefix"), args.get("profile_id") or f"{time.time():.3f}")
        return ProfileRequest(
            folder=_folder(args.get("output_dir")),
            name="-".join(Path(part).name for part in parts if part),
            activities=activities,
            first_step=max(int(start or 0), self.num_steps + 1),
            num_steps=None if count is None else int(count),
            with_stack=args.get("with_stack") is not False,
            record_shapes=bool(args.get("record_shapes")),
            stages=_stages(args),
        )

    def _begin(self, order: ProfileRequest) -> None:
        self._is_begun = True
        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        wanted = [kind for name, kind in kinds.items() if name in order.activities]
        if wanted:
            self._profile = profile(
                activities=wanted,
                with_stack=order.with_stack,
                record_shapes=order.record_shapes,
                profile_memory="MEM" in order.activities and self._device.type != "cuda",
            )
            with warnings.catch_warnings():  # torch 2.11: of further cycles, but there is one
                warnings.simplefilter("ignore")
                self._profile.start()
        if self._has_snapshot(order):
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if "CUDA_PROFILER" in order.activities:
            torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
        log.info("profile of %s begins", ", ".join(order.activities))

    def _end(self, order: ProfileRequest) -> list[str]:
        """Write what was traced; names of the files."""
        self._order, is_begun, self._is_begun = None, self._is_begun, False
        running, self._profile = self._profile, None
        files, name = [], f"{order.name}-{self._who}"
        if order.stages and is_begun:
            name = f"{name}-{STAGES[self._stage]}"
        if running is not None:
            running.stop()
            files.append(str(order.folder / f"{name}.trace.json.gz"))
            part = order.folder / f"{name}.part.json.gz"  # who sees the name finds a whole file
            try:
                running.export_chrome_trace(str(part))
                part.replace(files[-1])
            except OSError:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
        if is_begun and self._has_snapshot(order):
            files.append(str(order.folder / f"{name}-memory.pickle"))
            torch.cuda.memory._dump_snapshot(files[-1])  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        if is_begun and "CUDA_PROFILER" in order.activities:
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
        log.info("profile written: %s", ", ".join(files) or "nothing")
        return files


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Tell the client that its folder cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InvalidRequest(f"output_dir: {folder}: {reason}", param="output_dir") from error


def _stages(args: Mapping[str, Any]) -> tuple[str, ...]:
    """The stages to trace by themselves; InvalidRequest."""
    asked = args.get("profile_stages")
    if asked is None:
        return tuple(STAGES) if args.get("profile_by_stage") else ()
    for one in asked:
        if one not in STAGES:
            known = ", ".join(STAGES)
            raise InvalidRequest(
                f"profile_stages: {one!r:.80} is none of {known}", "profile_stages"
            )
    return tuple(asked)


def _folder(asked: str | None) -> Path:
    """The folder of a trace: ``asked`` by its real path, which must lie in RADIXLM_PROFILER_DIR, or
    that folder itself; InvalidRequest."""
    root = env.PROFILER_DIR.get()
    if not asked:
        return root
    try:
        folder = Path(asked).resolve()
        is_inside = folder.is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"output_dir: {error}", "output_dir") from error
    if not is_inside:
        raise InvalidRequest(
            f"output_dir: {asked!r:.200} is not in {root}; set RADIXLM_PROFILER_DIR", "output_dir"
        )
    return folder
