"""Checksums of kept pages whose ranks are on several hosts (--warm-restart with --nnodes).

Rank 0 has the journal of all pages, but no way to the memory of other hosts. There the lowest rank
computes the checksums of its host. Questions and answers are values of node 0's store: so they
neither wait for the messages between ranks nor hold them up.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from radixlm.base.errors import RankLost
from radixlm.warm_restart.journal import NICE

WAIT_S = 86_400.0  # for a question
_PART = 4096  # pages of one question
_pack = msgspec.msgpack.encode

GroupDigests = Callable[[int, int, Sequence[int], Sequence[int]], list[int]]
"""(attention group, space, pages, seed of each) -> CRC-32 of each page's bytes."""


class Values(Protocol):
    """Node 0's store, seen from there or from another node."""

    def set(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key, which is forgotten; None if nobody sets it in time."""


class DigestsOfHosts:
    """``own``, the checksums of node 0, over those of ``nodes``, for any thread of rank 0. A call
    raises RankLost if a node does not answer within ``limit_s``."""

    def __init__(
        self,
        own: GroupDigests,
        values: Values,
        nodes: Sequence[int],
        generation: str,
        limit_s: float,
    ) -> None:
        self._own, self._values, self._nodes = own, values, nodes
        self._generation, self._limit_s = generation, limit_s
        self._number, self._lock = 0, threading.Lock()

    def __call__(
        self, group: int, space: int, pages: Sequence[int], seeds: Sequence[int]
    ) -> list[int]:
        found: list[int] = []
        for start in range(0, len(pages), _PART):
            end = start + _PART
            with self._lock:
                found += self._of_part(group, space, list(pages[start:end]), list(seeds[start:end]))
        return found

    def _of_part(self, group: int, space: int, pages: list[int], seeds: list[int]) -> list[int]:
        self._number += 1
        keys = [_keys(self._generation, node, self._number) for node in self._nodes]
        for question, _ in keys:
            self._values.set(question, _pack((group, space, pages, seeds)))
        digests = self._own(group, space, pages, seeds)
        for question, answer in keys:
            data = self._values.take(answer, self._limit_s)
            self._values.take(question, 0.0)  # it has been read
            if data is None:
                raise RankLost(f"no checksums of pages came within {self._limit_s:g} s")
            theirs = msgspec.msgpack.decode(data, type=list[int])
            digests = [
                zlib.crc32(their.to_bytes(4, "little"), digest)
                for their, digest in zip(theirs, digests, strict=True)
            ]
        return digests


def answer_digests(own: GroupDigests, values: Values, node: int, generation: str) -> None:
    """Answer the questions of rank 0 with the checksums of ``node``; ends when node 0 is gone."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    number = 1
    while True:
        question, answer = _keys(generation, node, number)
        try:
            if (data := values.take(question, WAIT_S)) is None:
                continue
            asked = msgspec.msgpack.decode(data, type=tuple[int, int, list[int], list[int]])
            values.set(answer, _pack(own(*asked)))
        except RankLost:
            return
        number += 1


def _keys(generation: str, node: int, number: int) -> tuple[str, str]:
    """Of a question and its answer; ``generation``: of the replica."""
    name = f"digests {generation} {node} {number}"
    return f"{name} of", f"{name} are"
