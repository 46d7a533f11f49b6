"""Messages from intake to the scheduler: typed records, never pickle.

Token ids travel as little-endian int32 bytes; embeddings as float32 bytes.
"""

from typing import Any

import msgspec
import numpy as np

from radixlm.wire.media import Media
from radixlm.wire.sampling_params import SamplingParams
from radixlm.wire.transfer import Hint

ABORTED = "aborted by request"  # what a client is told, unless whoever aborts says more
THINKING_BUDGET = "thinking_budget"  # the logit processor that bounds reasoning


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the output. ``kind``: json_schema, json_object, regex, ebnf, lark,
    structural_tag. ``after``: text that must come before the grammar begins (the end marker of a
    reasoning block); None: it begins with the first token. ``is_strict``: it is refused if a part
    of it cannot be enforced."""

    kind: str
    value: str
    after: str | None = None
    is_strict: bool = False


class LogprobParams(msgspec.Struct, frozen=True):
    """Which log-probabilities a request wants: those of the prompt tokens from index
    ``prompt_from`` on (none if < 0), of the ``top`` likeliest tokens and of ``token_ids``.
    ``kept``: also which tokens top_k, top_p and min_p left to draw each output token from.
    ``entropy``: also that of the distribution of each output token."""

    prompt_from: int = -1
    top: int = 0
    token_ids: tuple[int, ...] = ()
    kept: bool = False
    entropy: bool = False


class PoolingParams(msgspec.Struct, frozen=True):
    """The request wants a vector or scores, and no tokens. ``first_len``: tokens of the first text
    of a pair (0: there is one text). ``is_whole``: all positions are pooled, so that none may come
    from the prefix cache. ``with_hidden``: what the head got follows what it gave. ``per_token``:
    nothing is pooled, the head's outputs of each token come in the place of hidden states.
    ``is_raw``: without what the head does at its end (unit length, sigmoid, softmax)."""

    first_len: int = 0
    is_whole: bool = True
    with_hidden: bool = False
    per_token: bool = False
    is_raw: bool = False


NEVER = 1 << 30
WEIGHTS, KV_CACHE, CUDA_GRAPH = MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter that intake has had loaded. ``number``: of this load, never used again;
    ``digest``: of its content, 32 hex digits (lora/adapter.py). ``start``: the first token that it
    changes; of an aLoRA that the prompt does not invoke, NEVER."""

    name: str
    number: int
    digest: str
    start: int = 0


class StreamingWindow(msgspec.Struct, frozen=True):
    """A request that sees the first ``sinks`` tokens of its stream and the last ones, ``tokens`` at
    most (arXiv:2309.17453). When they are that many, the older half is dropped and the rest gets
    the positions behind the sinks: what is seen depends on the stream's tokens alone."""

    tokens: int
    sinks: int = 4

    @property
    def size(self) -> int:
        """Tokens that are seen at most."""
        return self.sinks + self.tokens

    def num_dropped(self, num_tokens: int) -> int:
        """Tokens behind the sinks that a stream of ``num_tokens`` tokens has lost."""
        half = self.tokens // 2
        return max(0, -(-(num_tokens + 1 - self.size) // half) * half)


class TokenizedRequest(msgspec.Struct, tag="generate", frozen=True):
    """One sequence to continue (or to pool, with ``pooling``).

    ``num_emitted``: how many of the last ids were already sent to the client, before an engine died
    or retracted the request. ``media`` stand at the positions of the prompt whose ids are made by
    ``wire/media.py``. ``rope_ids``: int32 [3, prompt], the positions for M-RoPE where they differ
    from those in the prompt. ``deadline_s`` and ``queue_deadline_s``: ``time.monotonic`` values
    (0 = none), equal in all processes of one machine. ``fair_key``: the client, ``call_key``: the
    body that the request came in; both take turns. ``routing_key``: requests of equal ones are
    best computed together. ``is_quarantined``: an engine died while it
    held the request, so its prompt is computed in steps of its own. Only requests whose
    ``cache_salt``, ``extra_key`` and ``tenant`` are equal share cached prefixes. ``owner``: whose
    request it is (``intake/identity.py``). ``bad_words``: token ids of each; the last token of one
    never follows the others in the output. ``prediction``: int32 ids that the output may repeat.
    ``hint``: the servers that prefill and decode it. ``streaming``: its window, None without one.
    ``reasoning_bound``: custom_params of a thinking_budget that comes after ``processor``.
    """

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    num_emitted: int = 0
    logprobs: LogprobParams | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None
    tenant: str | None = None
    owner: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float = 0.0
    queue_deadline_s: float = 0.0
    grammar: GrammarSpec | None = None
    embeds: bytes | None = None
    media: tuple[Media, ...] = ()
    rope_ids: bytes | None = None
    adapter: AdapterRef | None = None
    processor: str | None = None
    pooling: PoolingParams | None = None
    fair_key: str | None = None
    call_key: str | None = None
    routing_key: str | None = None
    stream: bool = True
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: bytes = b""
    is_quarantined: bool = False
    hint: Hint | None = None
    streaming: StreamingWindow | None = None
    reasoning_bound: dict[str, Any] | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether each token has a row of hidden states, of chosen experts, or of both."""
        if self.pooling is not None and self.pooling.per_token:
            return True
        return self.return_hidden_states or self.return_routed_experts

    def __post_init__(self) -> None:
        """ValueError for a message that intake cannot have made; the codec rejects it."""
        size = len(self.input_ids)
        if size % 4 or not 0 <= self.num_emitted < max(1, size // 4) or not self.rid:
            raise ValueError(
                f"{size} bytes of token ids with {self.num_emitted} emitted, rid {self.rid!r:.80}"
            )
        if len(self.prediction) % 4:
            raise ValueError(f"{len(self.prediction)} bytes of predicted token ids")
        if self.embeds is not None and len(self.embeds) % 4:
            raise ValueError(f"{len(self.embeds)} bytes of embeddings")
        num_prompt = self.prompt_len
        if any(start + count > num_prompt for media in self.media for start, count in media.spans):
            raise ValueError(f"media beyond a prompt of {num_prompt} tokens")
        if self.rope_ids is not None and len(self.rope_ids) != 12 * num_prompt:
            raise ValueError(f"{len(self.rope_ids)} bytes of positions for {num_prompt} tokens")

    @property
    def prompt_len(self) -> int:
        return len(self.input_ids) // 4 - self.num_emitted

    def text_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The token ids without those that stand for media."""
        ids = self.ids()
        if not self.media:
            return ids
        is_text = np.ones(len(ids), np.bool_)
        for media in self.media:
            for start, count in media.spans:
                is_text[start : start + count] = False
        return ids[is_text]

    def ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The token ids as an int32 array (a view, read only)."""
        return np.frombuffer(self.input_ids, dtype="<i4")


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """End ``rids`` (or all) now. ``quiet``: intake already knows; the scheduler sends no reply.
    ``owner``: end only requests of this owner; None: of all."""

    rids: tuple[str, ...] = ()
    all: bool = False
    quiet: bool = False
    message: str = ABORTED
    owner: str | None = None

    def text(self, waits: bool) -> str:
        """What a client is told: the message, or if there is none and the request ``waits``, that
        in SGLang's words."""
        return "Abort in waiting queue" if waits and self.message == ABORTED else self.message


class Control(msgspec.Struct, tag="control", frozen=True):
    """An operator's command: flush, pause, continue, info, weights_by_name, slow_down, ...

    Answered by exactly one ``ControlReply`` with the same ``call_id``.
    """

    call_id: str
    verb: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop now; running requests are dropped."""


ToScheduler = TokenizedRequest | AbortRequest | Control | Shutdown


def pack_ids(ids: Any) -> bytes:
    """Token ids (list or array) as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()
