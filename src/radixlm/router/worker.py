"""Worker: a whole server behind the gateway, and the states that it goes through."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from radixlm.base.record import Record

if TYPE_CHECKING:
    from radixlm.router.stream import Stream

WorkerType = Literal["regular", "prefill", "decode"]


class State(StrEnum):
    """joining: it has not answered yet. ready: it gets requests. suspect: its breaker is open.
    unhealthy: health checks fail. draining: it ends what it has. gone: removed."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


class Load(Record):
    """What a worker last told of itself. ``kv_usage``: 0 to 1. ``tokens_per_s``: 0 if unknown."""

    num_queued_tokens: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0


class Worker:
    """One server, or one data-parallel rank of it (``dp_rank``). ``facts``: what /server_info and
    /model_info told. ``num_inflight`` and ``num_tokens`` (prompt and expected output) are charged
    when a request is sent, and given back at its end."""

    def __init__(
        self,
        url: str,
        *,
        model_id: str | None = None,
        worker_type: WorkerType = "regular",
        api_key: str | None = None,
        labels: Mapping[str, str] | None = None,
        priority: int = 50,
        cost: float = 1.0,
        bootstrap_port: int | None = None,
        dp_rank: int | None = None,
    ) -> None:
        """``url``: http://host:port, without a slash at the end."""
        self.id = str(uuid.uuid4())
        self.url, self.model_id, self.worker_type = url, model_id, worker_type
        self.is_named = model_id is not None  # else the server tells what its model is called
        self.api_key, self.labels = api_key, dict(labels or {})
        self.priority, self.cost = priority, cost
        self.bootstrap_port, self.dp_rank = bootstrap_port, dp_rank
        self.facts: dict[str, Any] = {}
        self.learned_s = 0.0  # when, of time.monotonic
        self.state = State.JOINING
        self.state_since_s = time.monotonic()
        self.disable_health_check = False
        self.num_inflight = 0
        self.num_tokens = 0
        self.num_routed = 0  # requests since it joined
        self.load: Load | None = None
        self.streams: set[Stream] = set()  # under way; each can ``move``

    @property
    def name(self) -> str:
        """The url, with the rank where there are several: "http://host:port@1"."""
        return self.url if self.dp_rank is None else f"{self.url}@{self.dp_rank}"

    @property
    def names(self) -> set[str]:
        """What a request may call its model or adapters."""
        told = (self.facts.get("served_model_name"), self.facts.get("model_path"))
        models = self.facts.get("models", ())
        return {name for name in (self.model_id, *told, *models) if isinstance(name, str)}

    @property
    def computes_alone(self) -> bool:
        """Whether it answers whole requests, though it be one of a pair: RadixLM's servers do."""
        return "resume_digest" in self.facts

    def of_rank(self, rank: int) -> Worker:
        """Another data-parallel rank of the same server."""
        other = Worker(
            self.url,
            model_id=self.model_id,
            worker_type=self.worker_type,
            api_key=self.api_key,
            labels=self.labels,
            priority=self.priority,
            cost=self.cost,
            bootstrap_port=self.bootstrap_port,
            dp_rank=rank,
        )
        other.facts, other.disable_health_check = self.facts, self.disable_health_check
        other.is_named = self.is_named
        return other

    @property
    def is_available(self) -> bool:
        """Whether it may get a new request."""
        return self.state is State.READY

    def __repr__(self) -> str:
        return f"Worker({self.name}, {self.state})"
