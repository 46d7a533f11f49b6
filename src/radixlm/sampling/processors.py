"""Logit processors of the operator, named on the command line, chosen by requests by name.

The reference lets a request carry pickled code; here only what the operator installed can run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from radixlm.base.errors import ConfigError, InvalidRequest


class LogitProcessor(Protocol):
    """Changes the logits of the rows whose requests chose it, before penalties and masks."""

    def __call__(self, logits_RV: Tensor, params: Sequence[dict[str, Any] | None]) -> Tensor:
        """fp32 [R, V] in and out; ``params`` holds custom_params of each row."""
        ...


class LogitProcessors:
    """The processors of one server, by name."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """``entries`` are "name=module:Class". ConfigError for one that cannot be loaded."""
        self._by_name = dict(_load(entry) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def get(self, name: str) -> LogitProcessor:
        """The processor a request asks for; InvalidRequest if the operator has none of the name."""
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none (see --custom-logit-processor)"
            raise InvalidRequest(
                f"custom_logit_processor {name!r:.80} is unknown; the server has: {known}",
                "custom_logit_processor",
            )
        return self._by_name[name]


def _load(entry: str) -> tuple[str, LogitProcessor]:
    flag = "--custom-logit-processor"
    name, _, target = entry.partition("=")
    module, _, attr = target.partition(":")
    if not (name and module and attr):
        raise ConfigError(f"{flag} {entry!r} must look like name=package.module:Class")
    try:
        processor = getattr(importlib.import_module(module), attr)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"{flag} {entry!r}: {error}") from error
    if not callable(processor):
        raise ConfigError(f"{flag} {entry!r}: an instance of {attr} cannot be called")
    return name, processor
