"""Placements: which worker was sent which prompt, where no KV events tell what it holds."""

from __future__ import annotations

from radixlm.router.kv_index import Known, KvIndex
from radixlm.router.prefix_hashes import Namespace, PrefixHashes, TokenIds


class Placements:
    """Prompts of the last ``ttl_s`` seconds (at least half of it, at most all), within
    ``max_bytes``: two indexes, of which the older one is dropped in turn."""

    def __init__(
        self, ttl_s: float, max_bytes: int, block_size: int, hashes: PrefixHashes | None = None
    ) -> None:
        """``block_size``: in tokens, the unit of what is found again."""
        self._ttl_s, self._max_bytes, self._block_size = ttl_s, max_bytes, block_size
        self._hashes = hashes
        self._young, self._old = self._fresh(), self._fresh()
        self._turn_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, nearly."""
        return self._young.num_bytes + self._old.num_bytes

    def placed(
        self, worker: str, ids: TokenIds, namespace: Namespace, known: Known | None = None
    ) -> None:
        """``worker`` was sent a prompt, int32 [n]. ``known``: see ``KvIndex``."""
        if not self._young.assume(worker, ids, self._block_size, namespace, known):
            self._turn()
            self._young.assume(worker, ids, self._block_size, namespace, known)

    def matched(
        self, ids: TokenIds, namespace: Namespace, known: Known | None = None
    ) -> dict[str, int]:
        """Tokens at the start of ``ids`` that each worker was sent before."""
        result = {w: m.any for w, m in self._old.matched(ids, namespace, known).items()}
        for worker, match in self._young.matched(ids, namespace, known).items():
            result[worker] = max(match.any, result.get(worker, 0))
        return result

    def forget(self, worker: str) -> None:
        """``worker`` is gone, or holds nothing any more."""
        self._young.left(worker)
        self._old.left(worker)

    def tick(self, now_s: float) -> None:
        """Drop what is too old."""
        if now_s - self._turn_s >= self._ttl_s / 2:
            self._turn_s = now_s
            self._turn()

    def _turn(self) -> None:
        self._old, self._young = self._young, self._fresh()

    def _fresh(self) -> KvIndex:
        return KvIndex(self._max_bytes // 2, self._hashes)
