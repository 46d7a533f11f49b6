"""The index of cached blocks, beside a plain model of sets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from radixlm.router.block_table import BlockTable
from radixlm.router.kv_index import GROUP, KvIndex, Match
from radixlm.router.prefix_hashes import MAX_BLOCK, PLAIN, Namespace, PrefixHashes

HASHES = PrefixHashes(b"k" * 32)
NAMESPACES: tuple[Namespace, ...] = (PLAIN, ("adapter", None, None), (None, "salt", "extra"))
Path = tuple[Namespace, tuple[int, ...]]


def ids_of(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


class Worker:
    """A cache whose blocks are known by their whole prefix. A parent outlives its children: in
    device memory, and in both tiers together."""

    def __init__(self, name: str, block_size: int, rng: random.Random) -> None:
        self.name, self.block_size, self._rng = name, block_size, rng
        self._names, self._hash_of = count(rng.randrange(1 << 40)), dict[Path, int]()
        self.held: dict[str, set[Path]] = {"GPU": set(), "CPU_PINNED": set()}

    def store(self, index: KvIndex, medium: str, namespace: Namespace, tokens: list[int]) -> None:
        size = self.block_size
        paths = [
            (namespace, tuple(tokens[: at + size]))
            for at in range(0, len(tokens) // size * size, size)
        ]
        tiers = self.held.values() if medium != "GPU" else (self.held["GPU"],)
        known = [path for path in paths if any(path in held for held in tiers)]
        first = self._rng.randrange(len(known) + 1)  # blocks told of before may come again
        if first == len(paths):
            return
        for path in paths[first:]:
            self._hash_of.setdefault(path, next(self._names) - (1 << 39))
        names = [self._hash_of[path] for path in paths]
        taken = index.stored(
            self.name,
            names[first:],
            names[first - 1] if first else None,
            ids_of(tokens[first * size : len(paths) * size]),
            size,
            namespace,
            medium,
        )
        assert taken
        self.held[medium] |= set(paths[first:])

    def evict(self, index: KvIndex, medium: str) -> None:
        device, lower = self.held["GPU"], self.held["CPU_PINNED"]
        other = lower if medium == "GPU" else device
        parents = {(space, path[: -self.block_size]) for space, path in device | lower}
        above = {(space, path[: -self.block_size]) for space, path in device}
        kept = (parents - other) | (above if medium == "GPU" else set())
        leaves = sorted(self.held[medium] - kept, key=str)
        gone = self._rng.sample(leaves, min(len(leaves), 3))
        index.removed(self.name, [self._hash_of[path] for path in gone], medium)
        self.held[medium] -= set(gone)

    def clear(self, index: KvIndex) -> None:
        index.cleared(self.name)
        for held in self.held.values():
            held.clear()

    def match(self, namespace: Namespace, tokens: list[int]) -> Match:
        device, whole = self.held["GPU"], self.held["GPU"] | self.held["CPU_PINNED"]
        result = []
        for held in (device, whole):
            depth = 0
            for end in range(self.block_size, len(tokens), self.block_size):
                if (namespace, tuple(tokens[:end])) not in held:
                    break
                depth = end
            result.append(depth)
        return Match(*result)


def prompts(rng: random.Random) -> list[int]:
    """Prompts of few tokens, so that many share a prefix."""
    shared = [rng.randrange(2) * 7 for _ in range(rng.randrange(1, 4))]
    return [token for token in shared for _ in range(4)] + [
        rng.randrange(3) for _ in range(rng.randrange(20))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_random_events_give_what_a_plain_model_gives(seed: int) -> None:
    rng = random.Random(seed)
    index = KvIndex(hashes=HASHES)
    sizes = rng.choices((1, 2, 4, 8), k=5)
    workers = [Worker(f"w{i}", size, rng) for i, size in enumerate(sizes)]
    for _ in range(300):
        worker, space, tokens = rng.choice(workers), rng.choice(NAMESPACES), prompts(rng)
        medium = rng.choice(("GPU", "GPU", "CPU_PINNED"))
        action = rng.random()
        if action < 0.6:
            worker.store(index, medium, space, tokens)
        elif action < 0.95:
            worker.evict(index, medium)
        else:
            worker.clear(index)
        asked, space = prompts(rng), rng.choice(NAMESPACES)
        expected = {w.name: w.match(space, asked) for w in workers}
        found = index.matched(ids_of(asked), space)
        assert {n: m for n, m in found.items() if m.any} == {
            name: match for name, match in expected.items() if match.any
        }
    assert len(index) == sum(len(held) for w in workers for held in w.held.values())
    for worker in workers:
        index.left(worker.name)
    assert len(index) == 0 and not any(len(g.blocks) for g in index._groups)


def test_prefix_hashes_follow_their_definition_and_go_on_from_any_block() -> None:
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 3 * MAX_BLOCK + 5).astype(np.int32)
    start = HASHES.start(("a", None, None))
    single = HASHES.of(tokens, 1, start)
    mask, value = (1 << 64) - 1, start
    base = int(HASHES._up[1])
    for token, found in zip(tokens[:300].tolist(), single.tolist(), strict=False):
        mixed = (token + 1) * int(HASHES._factor) & mask
        value = (value + (mixed ^ mixed >> 31)) * base & mask
        assert value == found
    for size in (3, 16, MAX_BLOCK):
        assert (HASHES.of(tokens, size, start) == single[size - 1 :: size]).all()
    rest = HASHES.of(tokens[100:], 7, int(single[99]))
    assert (rest == single[106::7]).all()
    assert len({HASHES.start(space) for space in NAMESPACES}) == len(NAMESPACES)
    assert len(HASHES.of(tokens[:5], 16, start)) == 0


def test_a_table_gives_what_a_dict_gives() -> None:
    rng, table, plain = random.Random(3), BlockTable(), dict[int, int]()
    keys = [rng.getrandbits(64) for _ in range(3000)]
    for step in range(20_000):
        key, value = rng.choice(keys), rng.choice((0, rng.getrandbits(64)))
        assert table.set(key, value) == plain.get(key, 0)
        plain[key] = value
        if step % 5000 == 4999:
            table.mask(0xFF << 20)
            plain = {key: value & 0xFF << 20 for key, value in plain.items()}
        asked = rng.choice(keys)
        assert table.get(asked) == plain.get(asked, 0)
    held = {key: value for key, value in plain.items() if value}
    assert dict(table.items()) == held and len(table) == len(held)


def test_blocks_that_do_not_fit_are_not_taken() -> None:
    index = KvIndex(hashes=HASHES)
    assert not index.stored("w", [1], 99, ids_of(range(4)), 4)  # an unknown parent
    assert index.num_orphans == 1
    assert not index.stored("w", [1, 2], None, ids_of(range(4)), 4)  # too few tokens
    assert not index.stored("w", [1], None, ids_of([]), 0)
    assert index.stored("w", [1], None, ids_of(range(4)), 4)
    assert not index.stored("w", [2], 1, ids_of(range(8)), 8)  # not the worker's size
    index.removed("w", [7])
    index.cleared("w")
    assert index.stored("w", [2], None, ids_of(range(8)), 8)
    assert index.matched(ids_of(range(9))) == {"w": Match(8, 8)}


def test_more_workers_than_a_group_and_places_that_are_used_again() -> None:
    index = KvIndex(hashes=HASHES)
    names = [f"w{i}" for i in range(2 * GROUP + 3)]
    for number, name in enumerate(names):
        num_blocks = 1 + number % 5
        assert index.stored(name, range(num_blocks), None, ids_of(range(4 * num_blocks)), 4)
    assert index.matched(ids_of(range(100))) == {
        name: Match(*[4 * (1 + i % 5)] * 2) for i, name in enumerate(names)
    }
    index.left(names[3])
    assert names[3] not in index.matched(ids_of(range(100)))
    assert index.stored("new", [1], None, ids_of([5, 6]), 2)
    assert index.matched(ids_of([5, 6, 7])) == {"new": Match(2, 2)}


def test_memory_stays_bounded_under_a_million_distinct_prompts() -> None:
    limit = 4 << 20
    index, ids = KvIndex(limit, HASHES), np.zeros(16, np.int32)
    num_taken = 0
    for number in range(1_000_000):
        ids[0] = number
        num_taken += index.stored(f"w{number % 4}", [number], None, ids, 16)
        if index.num_refused == 1000:  # from here on each is refused in the same way
            break
    assert index.num_refused == 1000
    assert index.num_bytes <= limit + (3 << 20)
    assert num_taken == len(index) > limit // 90  # 90 bytes a block at most
    assert index.matched(np.r_[np.int32(0), np.zeros(16, np.int32)]) == {"w0": Match(16, 16)}
    for number in range(2):
        index.removed(f"w{number}", range(number, num_taken, 4))
    index._changes = 0
    ids[0] = -1
    assert index.stored("w0", [-1], None, ids, 16)
