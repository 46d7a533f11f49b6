"""Processes, memory, profiles and records of ``radixlm.Engine``, under SGLang's names."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from radixlm.engine.launch import ProgramEngine
from radixlm.engine.process import running_pids

T = TypeVar("T")


class EngineDebug:
    """What watches an engine. InvalidRequest says why a call cannot be."""

    _engine: ProgramEngine

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _ask(self, verb: str, **args: Any) -> Any:
        return self._wait(self._engine.intake.control(verb, **args)).result()

    def get_all_child_pids(self) -> list[int]:
        """Processes that engines of this program run in; none for one rank and one replica, which
        run in threads."""
        return running_pids()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back to the system: of "weights", "kv_cache", "cuda_graph", all unless named.
        Requests wait until it is resumed. InvalidRequest while requests run, or without
        ``enable_memory_saver``."""
        self._wait(self._engine.intake.occupation.release(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take it back."""
        self._wait(self._engine.intake.occupation.resume(tags))

    def start_profile(self, **options: Any) -> dict[str, Any]:
        """Trace steps, with the fields of ``/start_profile``; {"output_dir": ...}."""
        found: dict[str, Any] = self._ask("start_profile", **options)
        return found

    def stop_profile(self) -> list[str]:
        """End the trace; its files."""
        files: list[str] = self._ask("stop_profile")["files"]
        return files

    def start_expert_distribution_record(self) -> None:
        """Record which experts tokens choose (``expert_distribution_recorder_mode``)."""
        self._ask("start_expert_record")

    def stop_expert_distribution_record(self) -> None:
        """Stop; what was recorded is kept."""
        self._ask("stop_expert_record")

    def dump_expert_distribution_record(self) -> None:
        """Write it to a file in RADIXLM_EXPERT_RECORDER_DIR, and forget it."""
        self._ask("dump_expert_record")
