"""The numbers that bound the scheduler, resolved at assembly."""

from __future__ import annotations

from radixlm.base.record import Record


class RopeLengths(Record):
    """Ropes whose angles depend on the prompt's length: up to ``original`` tokens all KV is alike,
    beyond it is of another kind ("dynamic": of a kind for every length)."""

    original: int
    is_dynamic: bool

    def variant(self, prompt_len: int) -> str | None:
        """What KV of such a prompt may be shared with; None is the common kind."""
        if prompt_len <= self.original:
            return None
        return f"rope{prompt_len}" if self.is_dynamic else "rope+"

    def share_limit(self, prompt_len: int) -> int:
        """Tokens from here on are of another kind than the prompt's."""
        if prompt_len <= self.original:
            return self.original
        return prompt_len if self.is_dynamic else 1 << 62


class Limits(Record):
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
    fair: bool = False  # users (fair_key) share the slots evenly
    chunked: bool = True
    is_encoder: bool = False  # nothing is kept of a text: neither chunks nor a prefix cache
    mixed: bool = True
    admit_every: int = 1  # steps between two looks at the queue while requests decode
    eos_ids: tuple[int, ...] = ()
    vocab: int = 0
    rope: RopeLengths | None = None
    log_interval: int = 0  # steps between two lines about the load; 0: none
