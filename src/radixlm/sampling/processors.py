"""Logit processors of the operator, named on the command line, chosen by requests by name.

SGLang lets a request carry pickled code; here only processors that the operator installed can run.
An exception in one fails only the requests that chose it.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.base.record import Record
from radixlm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
FIELD = "custom_logit_processor"
_FLAG = "--logit-processor"


class RowInfo(Record):
    """The request of a row. ``output_ids``: all tokens before the one to choose, drafts included.
    Read only."""

    rid: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class LogitProcessor(Protocol):
    """Changes the logits of the rows whose requests chose it, before penalties and masks.

    It must not keep state between calls: a step may be repeated, alone or in another batch. Two
    more methods are called if they exist: ``bind(facts: ServerFacts)`` once, at the start, and
    ``check(params)`` when a request arrives, which refuses it (400) by raising."""

    def __call__(
        self,
        logits_RV: Tensor,
        params: Sequence[dict[str, Any] | None],
        rows: Sequence[RowInfo],
    ) -> Tensor:
        """fp32 [R, V] in (may be written to) and out; ``params`` holds custom_params of each
        row."""


class ServerFacts:
    """Facts about the server for processors. The tokenizer is loaded when first used."""

    def __init__(
        self,
        vocab_size: int = 0,
        eos_ids: tuple[int, ...] = (),
        load_tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        self._load_tokenizer = load_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """InvalidRequest if the server has none (--skip-tokenizer-init)."""
        if self._load_tokenizer is None:
            raise InvalidRequest("this logit processor needs the server's tokenizer", FIELD)
        return self._load_tokenizer()


class NamedProcessor:
    """One processor, whose errors fail only the rows that use it."""

    def __init__(self, name: str, call: LogitProcessor) -> None:
        self.name = name
        self._call = call

    def check(self, params: dict[str, Any] | None) -> None:
        """InvalidRequest if the processor refuses these custom_params."""
        check = getattr(self._call, "check", None)
        if check is None:
            return
        try:
            check(params)
        except InvalidRequest:
            raise
        except Exception as error:  # foreign code
            raise InvalidRequest(
                f"custom_params: logit processor {self.name!r}: {_describe(error)}", "custom_params"
            ) from None

    def run(
        self,
        logits_RV: Tensor,
        params: Sequence[dict[str, Any] | None],
        rows: Sequence[RowInfo],
    ) -> tuple[Tensor, dict[int, str]]:
        """New logits, and the error of each failed row, whose logits stay unchanged. If the batch
        fails, each row is run alone, so that one row cannot fail the others."""
        try:
            return self._checked(logits_RV.clone(), params, rows), {}
        except Exception as error:  # foreign code
            if len(rows) == 1:
                log.warning("logit processor %r, request %s", self.name, rows[0].rid, exc_info=True)
                return logits_RV, {0: f"logit processor {self.name!r}: {_describe(error)}"}
        failed: dict[int, str] = {}
        for row in range(len(rows)):
            one = slice(row, row + 1)
            logits_RV[one], errors = self.run(logits_RV[one], params[one], rows[one])
            if errors:
                failed[row] = errors[0]
        return logits_RV, failed

    def _checked(
        self,
        logits_RV: Tensor,
        params: Sequence[dict[str, Any] | None],
        rows: Sequence[RowInfo],
    ) -> Tensor:
        shape = logits_RV.shape
        changed = self._call(logits_RV, params, rows)
        if not isinstance(changed, Tensor) or changed.shape != shape:
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"it must return logits of the shape {list(shape)}, not {got}")
        changed = changed.to(logits_RV)
        if bool(changed.isnan().any()):
            raise ValueError("it returned a NaN")
        return changed


# with a request's options for it
ChosenProcessor = tuple[NamedProcessor, dict[str, Any] | None]


class LogitProcessors:
    """The processors of one server, by name."""

    def __init__(
        self, targets: Mapping[str, str] | None = None, facts: ServerFacts | None = None
    ) -> None:
        """``targets``: name -> "module:Class". ConfigError for one that cannot be loaded."""
        facts = facts or ServerFacts()
        self._by_name = {
            name: NamedProcessor(name, _load(name, target, facts))
            for name, target in (targets or {}).items()
        }

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def get(self, name: str) -> NamedProcessor:
        """The processor a request asks for; InvalidRequest if there is none of the name."""
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or f"none (see {_FLAG})"
            raise InvalidRequest(f"{FIELD}: {name!r:.80} is not known here; known: {known}", FIELD)
        return self._by_name[name]


def _load(name: str, target: str, facts: ServerFacts) -> LogitProcessor:
    module, _, attr = target.partition(":")
    if not (name and module and attr):
        raise ConfigError(f"{_FLAG} {name}={target} must look like name=package.module:Class")
    try:
        processor: Any = getattr(importlib.import_module(module), attr)()
        bind = getattr(processor, "bind", None)
        if bind is not None:
            bind(facts)
    except Exception as error:  # foreign code
        raise ConfigError(f"{_FLAG} {name}={target}: {_describe(error)}") from error
    if not callable(processor):
        raise ConfigError(f"{_FLAG} {name}={target}: an instance of {attr} cannot be called")
    checked: LogitProcessor = processor
    return checked


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
