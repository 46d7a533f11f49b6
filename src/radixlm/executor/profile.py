"""Traces of steps by torch's profiler, for /start_profile and /stop_profile. They open in
chrome://tracing and Perfetto."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from radixlm.base import env
from radixlm.base.errors import InvalidRequest
from radixlm.base.record import Record

log = logging.getLogger(__name__)

ACTIVITIES = ("CPU", "GPU", "MEM", "CUDA_PROFILER")
DEFAULT_ACTIVITIES = ("CPU", "GPU")


class ProfileRequest(Record):
    """A trace that was asked for. Steps are counted from the start of the engine."""

    folder: Path
    name: str
    activities: tuple[str, ...]
    first_step: int
    num_steps: int | None  # None: until it is stopped
    with_stack: bool
    record_shapes: bool


class Profiler:
    """At most one trace at a time. All calls come from the thread that runs the steps."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._device, self._rank = device, rank
        self._order: ProfileRequest | None = None
        self._profile: profile | None = None
        self._is_begun = False
        self.num_steps = 0

    def count(self) -> None:
        """Called before every step."""
        self.num_steps += 1
        order = self._order
        if order is None:
            return
        if not self._is_begun and self.num_steps >= order.first_step:
            self._begin(order)
        elif order.num_steps is not None and self.num_steps >= order.first_step + order.num_steps:
            self._end(order)

    def start(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trace now, or at ``start_step``; InvalidRequest for what cannot be."""
        if self._order is not None:
            raise InvalidRequest("a profile is being taken; /stop_profile ends it")
        order = self._read(args)
        try:
            order.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"output_dir: {error}", param="output_dir") from error
        self._order = order
        if args.get("start_step") is None and order.num_steps is None:
            self._begin(order)
        return {"output_dir": str(order.folder)}

    def stop(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """End the trace and write it; its files."""
        if self._order is None:
            raise InvalidRequest("no profile is being taken; /start_profile begins one")
        return {"files": self._end(self._order)}

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
            if args.get("activities") and "CPU" not in activities:
                raise InvalidRequest("activities: without a GPU only CPU works", "activities")
            activities = ("CPU",)
        if args.get("profile_by_stage") or args.get("profile_stages"):
            message = "profile_by_stage: prompts and decodes share a step"
            raise InvalidRequest(message, "profile_by_stage")
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
            )
            self._profile.start()
        if "MEM" in order.activities:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if "CUDA_PROFILER" in order.activities:
            torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
        log.info("profile of %s begins", ", ".join(order.activities))

    def _end(self, order: ProfileRequest) -> list[str]:
        """Write what was traced; names of the files."""
        self._order, is_begun, self._is_begun = None, self._is_begun, False
        running, self._profile = self._profile, None
        files = []
        if running is not None:
            running.stop()
            files.append(str(order.folder / f"{order.name}-TP-{self._rank}.trace.json.gz"))
            running.export_chrome_trace(files[-1])
        if is_begun and "MEM" in order.activities:
            files.append(str(order.folder / f"{order.name}-TP-{self._rank}-memory.pickle"))
            torch.cuda.memory._dump_snapshot(files[-1])  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        if is_begun and "CUDA_PROFILER" in order.activities:
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
        log.info("profile written: %s", ", ".join(files) or "nothing")
        return files


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
