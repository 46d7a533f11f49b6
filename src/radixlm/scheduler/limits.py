"""The numbers that bound the scheduler, resolved at assembly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """``step_tokens``: tokens of one step, prefill and decode together. ``reserve``: the share of
    a running request's remaining tokens that admission keeps free (schedule conservativeness)."""

    max_running: int
    max_queued: int | None
    step_tokens: int
    max_prefill_tokens: int
    context_len: int
    page_size: int
    depth: int = 0
    reserve: float = 0.4
    policy: str = "fcfs"
    priorities: bool = False
    low_values_first: bool = False
    preemption_threshold: int = 10
    aging_s: float = 10.0  # a waiting request gains one priority every so many seconds
    chunked: bool = True
    mixed: bool = True
    eos_ids: tuple[int, ...] = ()
    vocab: int = 0
