"""The numbers that bound the scheduler; ``engine`` computes them once from the options."""

from radixlm.base.record import Record


class RopeLengths(Record):
    """How KV depends on the prompt's length where a rope does: KV of prompts of up to ``original``
    tokens is interchangeable, KV of longer ones is another kind (``is_dynamic``: a kind for every
    length)."""

    original: int
    is_dynamic: bool

    def variant(self, prompt_len: int) -> str | None:
        """The kind of KV of such a prompt, a part of its cache key; None up to ``original``."""
        if prompt_len <= self.original:
            return None
        return f"rope{prompt_len}" if self.is_dynamic else "rope+"

    def share_limit(self, prompt_len: int) -> int:
        """Tokens from this position on have another kind of KV than the prompt."""
        if prompt_len <= self.original:
            return self.original
        return prompt_len if self.is_dynamic else 1 << 62


class Limits(Record):
    """``step_tokens``: tokens of one step, prefill and decode together. ``reserve``: the share of
    a running request's remaining tokens that admission keeps free (schedule conservativeness).
    ``weights_version`` and ``kv_layout`` are equal for all requests of an engine; they enter each
    request's CacheNamespace."""

    max_running: int
    max_queued: int | None
    step_tokens: int
    max_prefill_tokens: int
    context_len: int
    page_size: int
    depth: int = 0  # steps in flight while the next is planned
    # pipeline stages: steps in flight have disjoint requests, since a token is known when its step
    # has passed them all
    stages: int = 1
    max_micro_batch: int | None = None  # most requests of a step, with several stages
    waits_for_chunks: bool = False  # a chunk of a prompt is planned when the one before has ended
    reserve: float = 0.4
    max_reserved: int = 4096  # remaining tokens of a request that ``reserve`` counts at most
    reserved_tokens: int = 0  # of that output, what admission keeps free at least, in tokens
    running_s: float = 0.0  # that a request may run; 0: any
    policy: str = "fcfs"
    priorities: bool = False
    low_values_first: bool = False
    preemption_threshold: int = 10
    aging_s: float = 10.0  # seconds of waiting that raise a request's priority by one
    fair: bool = False  # users (fair_key) and their calls (call_key) take turns
    chunked: bool = True
    is_encoder: bool = False  # an encoder: whole prompts, no prefix cache
    mixed: bool = True  # prefill and decode may share a step
    # of a step in which prompts and decodes meet; 0: whatever it takes; None: as others bear it
    target_itl_s: float | None = 0.0
    attention_length: float = 0.0  # with it chunks are cut as in ``plan_parts.even_chunk``
    admit_every: int = 1  # tokens in turn between two looks at the queue while requests decode
    max_passes: int = 1  # tokens that a step decodes in turn at most; 0: those of a short time
    eos_ids: tuple[int, ...] = ()
    vocab: int = 0
    rope: RopeLengths | None = None
    weights_version: str = ""
    kv_layout: str = ""
    first_sparse: int | None = None  # output tokens from here on have other numbers than prompts
    max_drafts: int = 0  # drafted tokens of a row that a step verifies at most
    max_paths: int = 0  # further paths of trees of drafts in a step, of all rows
    log_interval: int = 0  # steps between two log lines about the load; 0: none
    log_every_s: float = 0.0  # and seconds, at least

    def rank(self, priority: int) -> int:
        """The larger, the more important."""
        return -priority if self.low_values_first else priority
