"""What intake knows of the model and the server, to check requests."""

from radixlm.base.errors import Overloaded
from radixlm.base.record import Record


class IntakeFacts(Record):
    """``context_len`` counts prompt and output: the model's, or less where the KV cache holds less;
    ``max_total_tokens`` is what that holds (0 until the engine is ready)."""

    vocab: int
    context_len: int
    max_total_tokens: int = 0
    allow_auto_truncate: bool = False
    clamp_max_tokens: bool = False
    max_new_tokens: int | None = None  # of every answer
    request_timeout_s: float | None = None
    max_queue_time_s: float | None = None
    hidden_states_enabled: bool = False
    routed_shape: tuple[int, int] | None = None  # [layers, top_k] of routed experts, if enabled
    processors: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    embed_dim: int = 0  # width of embeddings and of hidden states, 0: not known
    is_generation: bool = True  # False: the model gives vectors or scores
    max_queued: int | None = None
    slice_size: int = 128  # sequences of one call that are with the engine at a time
    max_sequences: int = 8192  # of one call
    max_logprobs: int = 1 << 20  # entries that the answers of one call may hold together
    stall_timeout_s: float = 60.0  # how long a reader may leave what has come unread
    streaming_window: int = 0  # of requests that name none; 0: none
    streaming_sinks: int = 4
    default_priority: int = 0  # of requests that name none
    refuses_priorities: bool = False
    model_context_len: int = 0  # the model's own, for which the KV cache may have no room

    def priority_of(self, priority: int | None) -> int:
        """Of a request that names ``priority``, or none. Overloaded where none may be named."""
        if priority is not None and self.refuses_priorities:
            raise Overloaded(
                "priority: --enable-priority-scheduling is off; send the request without a "
                "priority",
                "priority",
            )
        return self.default_priority if priority is None else priority

    def more_room(self, num_tokens: int) -> str:
        """What to do so that ``num_tokens`` fit, as the end of a message; "" if nothing helps."""
        if not self.context_len < num_tokens <= self.model_context_len:
            return ""
        return (
            f" The model reads up to {self.model_context_len} tokens, but the KV cache has no room "
            "for them: raise --max-total-tokens or --mem-fraction-static, or use a smaller "
            "--kv-cache-dtype, such as int8."
        )
