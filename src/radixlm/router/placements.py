"""Placements: which worker was sent which prompt, where no KV events tell what it holds."""

from __future__ import annotations

from typing import Final

from radixlm.router.kv_index import Known, losses, prefixes_of
from radixlm.router.prefix_hashes import Namespace, TokenIds

_ENTRY_BYTES: Final = 110  # of a dict, with its integers
_SPARE_BITS: Final = 256


class Placements:
    """Prompts of the last ``ttl_s`` seconds (at least half of it, at most all), within
    ``max_bytes``: two tables, of which the older one is dropped in turn."""

    def __init__(self, ttl_s: float, max_bytes: int, block_size: int) -> None:
        """``block_size``: in tokens, the unit of what is found again."""
        self._ttl_s, self._block_size = ttl_s, block_size
        self._max_blocks = max_bytes // 2 // _ENTRY_BYTES
        self._young: dict[int, int] = {}  # hash of a prefix -> bits of the workers
        self._old: dict[int, int] = {}
        self._bits: dict[str, int] = {}  # number of a worker's bit; those forgotten are not reused
        self._names: list[str] = []
        self._turn_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, nearly."""
        return (len(self._young) + len(self._old)) * _ENTRY_BYTES

    def placed(self, worker: str, ids: TokenIds, namespace: Namespace, known: Known) -> None:
        """``worker`` was sent a prompt, int32 [n]. ``known``: see ``KvIndex``."""
        number = self._bits.get(worker)
        if number is None:
            number = self._bits[worker] = len(self._names)
            self._names.append(worker)
        bit, young = 1 << number, self._young
        for prefix in prefixes_of(ids, self._block_size, namespace, known).tolist():
            young[prefix] = young.get(prefix, 0) | bit
        if len(young) > self._max_blocks:
            self._turn()

    def matched(self, ids: TokenIds, namespace: Namespace, known: Known) -> dict[str, int]:
        """Tokens at the start of ``ids`` that each worker was sent before."""
        if not self._bits:
            return {}
        young, old, result = self._young, self._old, dict[str, int]()
        prefixes = prefixes_of(ids, self._block_size, namespace, known)

        def bits(at: int) -> int:
            prefix = int(prefixes[at])
            return young.get(prefix, 0) | old.get(prefix, 0)

        for depth, lost in losses(bits, len(prefixes)):
            while lost:
                number = (lost & -lost).bit_length() - 1
                lost &= lost - 1
                name = self._names[number]
                if self._bits.get(name) == number:
                    result[name] = depth * self._block_size
        return result

    def forget(self, worker: str) -> None:
        """``worker`` is gone, or holds nothing any more."""
        self._bits.pop(worker, None)

    def tick(self, now_s: float) -> None:
        """Drop what is too old."""
        if now_s - self._turn_s >= self._ttl_s / 2:
            self._turn_s = now_s
            self._turn()

    def _turn(self) -> None:
        self._old, self._young = self._young, {}
        if len(self._names) > len(self._bits) + _SPARE_BITS:  # many were forgotten
            self._old, self._bits, self._names = {}, {}, []
