"""Packed training rows, made by a process of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from chat import Conversation, Encoder
from data import BUCKETS, stream

ROWS = {"short": 8, "middle": 4, "long": 1}
POOL = 48


@dataclass(frozen=True, slots=True)
class Rows:
    """ids [B, L], document numbers [B, L] (-1: padding), loss weights [B, L] (0: not written)."""

    ids: np.ndarray[Any, Any]
    documents: np.ndarray[Any, Any]
    written: np.ndarray[Any, Any]


class Packer:
    """Packs the documents of a source into rows, the longest that fits first."""

    def __init__(
        self,
        encoder: Encoder,
        source: Iterator[Conversation],
        length: int,
        num_rows: int,
        seed: int = 0,
    ) -> None:
        self.encoder, self.source = encoder, source
        self.length, self.num_rows = length, num_rows
        self.pool: list[tuple[list[int], list[int]]] = []
        self.rng = Random(seed)

    def _fill(self) -> None:
        while len(self.pool) < (POOL if self.length < 1000 else 6):
            ids, mask = self.encoder.document(next(self.source))
            if len(ids) <= self.length:
                self.pool.append((ids, mask))
        self.rng.shuffle(self.pool)

    def rows(self) -> Rows:
        """The next packed rows."""
        shape = (self.num_rows, self.length)
        ids, documents = np.zeros(shape, np.int16), np.full(shape, -1, np.int16)
        written = np.zeros(shape, np.uint8)
        for row in range(self.num_rows):
            self._fill()
            at = number = 0
            while True:
                room = self.length - at
                fits = [i for i, (doc, _) in enumerate(self.pool) if len(doc) <= room]
                if not fits:
                    break
                # Any document first, then the one that fills the row best.
                i = fits[0] if at == 0 else max(fits, key=lambda i: len(self.pool[i][0]))
                doc, mask = self.pool.pop(i)
                end = at + len(doc)
                ids[row, at:end], documents[row, at:end] = doc, number
                written[row, at:end] = mask
                at, number = end, number + 1
        return Rows(ids, documents, written)


def bucket_packer(encoder: Encoder, bucket: str, seed: int) -> Packer:
    """The packer of one row length of the curriculum."""
    return Packer(encoder, stream(bucket, seed), BUCKETS[bucket], ROWS[bucket], seed)


def _work(tokenizer: Path, seed: int, queues: dict[str, Any]) -> None:
    packers = {name: bucket_packer(Encoder(tokenizer), name, seed) for name in queues}
    while True:
        for name in sorted(queues, key=lambda name: queues[name].qsize()):
            if not queues[name].full():
                queues[name].put(packers[name].rows())
                break
        else:
            # Every queue is full: waiting on the one that is used most costs nothing.
            queues["short"].put(packers["short"].rows())


class Feed:
    """Rows from a background process; each bucket has a short queue."""

    def __init__(self, tokenizer: Path, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.queues = {name: context.Queue(6) for name in BUCKETS}
        self.process = context.Process(
            target=_work, args=(tokenizer, seed, self.queues), daemon=True
        )
        self.process.start()

    def rows(self, bucket: str) -> Rows:
        """The next rows of a bucket."""
        made: Rows = self.queues[bucket].get(timeout=300)
        return made

    def close(self) -> None:
        """Stop the process."""
        self.process.terminate()
        self.process.join()
