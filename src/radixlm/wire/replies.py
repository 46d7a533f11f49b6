"""Messages from the scheduler to intake: one ``StepReply`` a step carries all deltas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from radixlm.base.errors import InvalidRequest

# (log-probability, token id) of one position; None for the first prompt token
Logprob = tuple[float | None, int]
TopLogprobs = list[tuple[float, int]]
# the log-probability of a token among those that it was drawn from, and their ids
Kept = tuple[float, list[int]]


# steps that are recorded as graphs, under SGLang's names
GRAPH_KINDS = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode",
               "draft_extend")  # fmt: skip


class Finish(msgspec.Struct, frozen=True):
    """Why a sequence ended. ``matched``: the token id or the stop string that ended it."""

    kind: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    message: str | None = None
    status: int = 0
    retry_after_s: float | None = None
    code: str | None = None  # of the error, for clients


class Logprobs(msgspec.Struct, omit_defaults=True):
    """Log-probabilities of consecutive positions, of the prompt or of the output. ``chosen``: of
    the tokens themselves; ``top``: of the likeliest; ``asked``: of the requested ids. ``kept``:
    what output tokens were drawn from; ``entropy``: of their distributions, in nats."""

    chosen: list[Logprob] = []
    top: list[TopLogprobs | None] = []
    asked: list[TopLogprobs | None] = []
    kept: list[Kept] = []
    entropy: list[float] = []

    def first(self, count: int) -> Logprobs:
        """The first ``count`` positions."""
        return Logprobs(*(getattr(self, name)[:count] for name in self.__struct_fields__))

    @staticmethod
    def joined(parts: Iterable[Logprobs | None]) -> Logprobs | None:
        """Those of consecutive positions as one record; None if there are none."""
        present = [part for part in parts if part is not None]
        if len(present) < 2:
            return next(iter(present), None)
        names = Logprobs.__struct_fields__
        return Logprobs(*(list(chain(*(getattr(p, n) for p in present))) for n in names))


class TokenDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one sequence. ``pooled``: the vector or scores of a pooling request."""

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
    # steps that verified drafts of it, by the number that was accepted; and drafted tokens
    draft_rounds: list[int] | None = None
    num_drafted: int = 0
    # of the cached tokens, those that came from each tier for this request
    cached_by_tier: dict[str, int] | None = None


class DraftTotals(msgspec.Struct, omit_defaults=True):
    """Of all requests since the start: ``num_rounds`` counts each request of a step with drafts;
    ``num_steps`` steps with drafts; ``seconds`` what drafting on the host took."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    seconds: float = 0.0


class PageCounts(msgspec.Struct, omit_defaults=True):
    """Pages of a KV pool, of ``size`` tokens. ``cached``: of the prefix cache, ``locked`` of them
    by requests; ``window`` and ``states``: used and all of the second page space."""

    size: int = 0
    total: int = 0
    free: int = 0
    cached: int = 0
    locked: int = 0
    window_used: int = 0
    window_total: int = 0
    states_used: int = 0
    states_total: int = 0


KEY_BOUNDS = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200, math.inf)  # requests of a routing key


class LoadReport(msgspec.Struct, omit_defaults=True):
    """The load of a scheduler. ``is_paused``: an operator has paused it. ``released``: tags of the
    memory that its engine has given back. ``num_prefilled``: prompt tokens computed since the
    start, ``num_hits``: found in the prefix cache. ``tiers``: figures of features: of pages that
    arrive (``engine/features/page_arrivals.py``), of grammars. ``forward_s``: seconds of steps
    since the start, by what they computed: "extend" (prompts), "decode" or "mixed". ``cpu_s``: CPU
    seconds of the process since its start; 0 without metrics.
    ``routing_keys``: see ``scheduler/queue.py: count_keys``."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_evicted_tokens: int = 0
    num_retracted: int = 0
    num_prefilled: int = 0
    num_hits: int = 0
    num_generated: int = 0
    num_paused: int = 0
    is_paused: bool = False
    released: tuple[str, ...] = ()
    num_grammar_queue: int = 0
    steps: int = 0
    num_breaches: int = 0
    num_dropped: int = 0
    spec_accept_length: float = 0.0
    drafts: DraftTotals | None = None
    tiers: dict[str, float] = {}
    pages: PageCounts | None = None
    forward_s: dict[str, float] = {}
    cpu_s: float = 0.0
    routing_keys: dict[str, int] = {}


# what the scheduler does with a request: its id; "prefill" (of a chunk), "grammar" (compiled) or
# "retracted"; begin and end in monotonic seconds (0: it goes on); tokens; the first one's place
Moment = tuple[str, str, float, float, int, int]


class StepReply(msgspec.Struct, tag="step", omit_defaults=True):
    """The result of one step. ``tokens[i]`` is the one new token of request ``rids[i]``; a request
    with more news has a delta instead, as its first and last reply always are."""

    deltas: list[TokenDelta]
    load: LoadReport | None = None
    rids: Sequence[str] = ()
    tokens: Sequence[int] = ()
    moments: Sequence[Moment] = ()


class Ready(msgspec.Struct, tag="ready"):
    """The engine can serve. ``facts``: vocabulary, context length, pages, dtype, weights ..."""

    facts: dict[str, Any]


# monotonic seconds, level, role, text
LogLine = tuple[float, str, str, str]


class Heartbeat(msgspec.Struct, tag="beat", omit_defaults=True):
    """The loop is alive. ``lines``: that it has logged since the last one. ``num_orphans``: for the
    successor of a dead HTTP process, once: requests of that one which were aborted."""

    load: LoadReport
    lines: list[LogLine] = []
    num_orphans: int = 0


class ControlReply(msgspec.Struct, tag="control_reply"):
    """Answer to a ``Control``."""

    call_id: str
    ok: bool
    message: str = ""
    data: Any = None

    def result(self, param: str | None = None) -> Any:
        """``data``; InvalidRequest with ``message`` if the command was refused."""
        if not self.ok:
            raise InvalidRequest(self.message, param)
        return self.data


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start or has failed. ``kind``: the class of the error."""

    kind: str
    message: str


ToIntake = StepReply | Ready | Heartbeat | ControlReply | Failed
