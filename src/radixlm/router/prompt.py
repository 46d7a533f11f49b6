"""Prompt: what the gateway knows of one call's prompt, for the choice of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from radixlm.router.kv_index import Known
from radixlm.router.placements import Placements
from radixlm.router.prefix_hashes import Namespace, TokenIds

if TYPE_CHECKING:
    from radixlm.router.call import Call
    from radixlm.router.kv_readers import KvReaders
    from radixlm.router.worker import Worker

PLACED_BLOCKS = 4  # a placement is found again by so many blocks at a time
RECENT_S = 2.0  # in which a prompt that was sent is not told of yet


class Prompt:
    """``ids``: int32 [n], of the prompt's tokens, or (``is_text``) of the bytes of its text, which
    no event can match. ``num_tokens``: about four bytes are a token."""

    __slots__ = ("ids", "is_text", "known", "namespace", "num_tokens")

    def __init__(self, ids: TokenIds, namespace: Namespace, is_text: bool = False) -> None:
        self.known: Known = {}
        self.ids, self.namespace, self.is_text = ids, namespace, is_text
        self.num_tokens = len(ids) // 4 + 1 if is_text else len(ids)


class Holdings:
    """What workers hold of a prompt: by their KV events; without these, and in the seconds until an
    event comes, by what they were sent."""

    def __init__(self, index: Callable[[], KvReaders | None], options: Any) -> None:
        """``index``: of the gateway, None while no worker tells of its cache."""
        limit, size = (options.index_max_mb << 20) // 4, PLACED_BLOCKS * options.block_size
        self._index = index
        self._sent = Placements(options.placement_ttl_secs, limit, size)
        self._recent = Placements(RECENT_S, limit, size)  # of workers whose events are complete

    def of(self, prompt: Prompt) -> dict[str, int]:
        """Tokens of the prompt's start that each worker holds, by its name; those that hold none
        are left out."""
        index, asked = self._index(), (prompt.ids, prompt.namespace, prompt.known)
        if index is None or prompt.is_text:
            unit = 4 if prompt.is_text else 1
            return {name: n // unit for name, n in self._sent.matched(*asked).items()}
        held = {name: match.any for name, match in index.matched(*asked).items()}
        sent = self._sent.matched(*asked)
        guesses = [(name, n) for name, n in sent.items() if not index.is_complete(name)]
        for name, tokens in (*guesses, *self._recent.matched(*asked).items()):
            held[name] = max(tokens, held.get(name, 0))
        return held

    def placed(self, prompt: Prompt, worker: Worker) -> None:
        """The prompt was sent to ``worker``."""
        index = self._index()
        is_told = index is not None and not prompt.is_text and index.is_complete(worker.name)
        placements = self._recent if is_told else self._sent
        placements.placed(worker.name, prompt.ids, prompt.namespace, prompt.known)

    def occupancy(self, worker: Worker) -> float:
        """The share of the worker's device memory that holds cached tokens, 0 if unknown."""
        index, room = self._index(), worker.facts.get("max_total_num_tokens")
        if index is None or not isinstance(room, int) or room <= 0:
            return 0.0
        return min(1.0, index.index.held_tokens(worker.name) / room)

    def forget(self, name: str) -> None:
        """The worker ``name`` is gone, or has cleared its cache."""
        for placements in (self._sent, self._recent):
            placements.forget(name)

    def tick(self, now_s: float) -> None:
        """About once a second."""
        self._sent.tick(now_s)
        self._recent.tick(now_s)


def plain_prompt(call: Call, namespace: Namespace) -> Prompt | None:
    """The prompt of a call without a tokenizer: its token ids, or its text."""
    for key in ("input_ids", "prompt"):
        ids = call.fields.get(key)
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return id_prompt(ids, namespace)
    text = call.text.encode("utf-8", "surrogatepass")
    if not text:
        return None
    return Prompt(np.frombuffer(text, np.uint8).astype(np.int32), namespace, is_text=True)


def id_prompt(ids: list[int], namespace: Namespace) -> Prompt | None:
    """Token ids as a prompt; None where they cannot be any."""
    try:
        return Prompt(np.array(ids, np.int32), namespace)
    except (OverflowError, ValueError):
        return None
