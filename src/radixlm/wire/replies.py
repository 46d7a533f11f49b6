"""What the scheduler sends to intake: one ``StepReply`` a step carries all deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

# [logprob, token id] of one place; None before the first prompt token
Logprob = tuple[float | None, int]
TopLogprobs = list[tuple[float, int]]


class Finish(msgspec.Struct, frozen=True):
    """Why a sequence ended. ``matched``: the token id that stopped it."""

    kind: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    message: str | None = None
    status: int = 0
    retry_after_s: float | None = None


class Logprobs(msgspec.Struct, omit_defaults=True):
    """Log-probabilities of some places in a row, of the prompt or of the output."""

    chosen: list[Logprob] = []
    top: list[TopLogprobs | None] = []
    asked: list[TopLogprobs | None] = []


class TokenDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one sequence. ``pooled`` is the answer of an embedding request."""

    rid: str
    tokens: list[int] = []
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    prompt_logprobs: Logprobs | None = None
    logprobs: Logprobs | None = None
    hidden_states: list[bytes] | None = None
    pooled: list[float] | None = None
    queue_time_s: float = 0.0


class LoadReport(msgspec.Struct, omit_defaults=True):
    """What the scheduler holds now."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_retracted: int = 0
    num_paused: int = 0
    num_grammar_queue: int = 0
    steps: int = 0
    num_breaches: int = 0
    num_dropped: int = 0


class StepReply(msgspec.Struct, tag="step", omit_defaults=True):
    """All that is new after one step. Most sequences have just one token more: ``tokens[i]`` of the
    request ``rids[i]``. A request is named once, there or in a delta; its first delta and its last
    are always whole."""

    deltas: list[TokenDelta]
    load: LoadReport | None = None
    rids: Sequence[str] = ()
    tokens: Sequence[int] = ()


class Ready(msgspec.Struct, tag="ready"):
    """The engine can serve. ``facts``: vocabulary, context length, pages, dtype, weights ..."""

    facts: dict[str, Any]


class Heartbeat(msgspec.Struct, tag="beat"):
    """The loop is alive."""

    load: LoadReport


class ControlReply(msgspec.Struct, tag="control_reply"):
    """Answer to a ``Control``."""

    call_id: str
    ok: bool
    message: str = ""
    data: Any = None


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start or go on. ``kind``: the class of the error."""

    kind: str
    message: str


ToIntake = StepReply | Ready | Heartbeat | ControlReply | Failed
