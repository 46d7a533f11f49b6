"""Prompt: what the gateway knows of one call's prompt, for the choice of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from radixlm.router.kv_index import Known
from radixlm.router.placements import Placements
from radixlm.router.prefix_hashes import Namespace, TokenIds

if TYPE_CHECKING:
    from radixlm.router.call import Call
    from radixlm.router.kv_readers import KvReaders
    from radixlm.router.worker import Worker

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
        limit = (options.index_max_mb << 20) // 4
        size = options.block_size
        self._index = index
        self._sent = Placements(options.placement_ttl_secs, limit, size)
        self._recent = Placements(RECENT_S, limit, size)

    def of(self, prompt: Prompt, workers: Mapping[str, Worker]) -> dict[str, int]:
        """Tokens of the prompt's start that each worker holds, by its name."""
        index, asked = self._index(), (prompt.ids, prompt.namespace, prompt.known)
        sent = self._sent.matched(*asked)
        unit = 4 if prompt.is_text else 1
        held = {name: tokens // unit for name, tokens in sent.items() if name in workers}
        if index is None or prompt.is_text:
            return held
        recent, true = self._recent.matched(*asked), index.matched(*asked)
        for name, worker in workers.items():
            if name in true or index.is_trusted(worker):
                told = true[name].any if name in true else 0
                guess = recent if index.is_trusted(worker) else held
                held[name] = max(told, guess.get(name, 0))
        return held

    def placed(self, prompt: Prompt, worker: Worker) -> None:
        """The prompt was sent to ``worker``."""
        index = self._index()
        is_told = index is not None and not prompt.is_text and index.is_trusted(worker)
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
