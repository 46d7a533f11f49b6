"""What all programs of a process share: the default backend."""

from __future__ import annotations

from typing import Any

from radixlm.base.lazy import load
from radixlm.lang.backend.base_backend import BaseBackend


class GlobalConfig:
    """Attributes as in SGLang. ``verbosity`` 2 prints the text of each program that has run. The
    last two have no effect: there is no run with placeholders, and no route that joins caches."""

    def __init__(self) -> None:
        self.default_backend: Any = None
        self.verbosity = 0
        self.skip_special_tokens_in_output = True
        self.spaces_between_special_tokens_in_out = True
        self.enable_precache_with_tracing = True
        self.enable_parallel_encoding = True


global_config = GlobalConfig()


def backend_of(backend: Any, is_needed: bool = True) -> BaseBackend:
    """The backend behind what a program names: a BaseBackend, an Engine, a Runtime, or None for the
    default one. AssertionError if there is none."""
    found = backend if backend is not None else global_config.default_backend
    if found is None and not is_needed:
        return BaseBackend()
    assert found is not None, "Please specify a backend"
    if isinstance(found, BaseBackend):
        return found
    if hasattr(found, "endpoint"):
        endpoint: BaseBackend = found.endpoint
        return endpoint
    kept: BaseBackend | None = getattr(found, "program_backend", None)
    if kept is None:
        kept = found.program_backend = load("radixlm.lang.backend.engine:EngineBackend")(found)
    return kept
