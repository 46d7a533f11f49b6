"""KvIndex: which worker holds which prefix, as its KV events tell.

Every known block has one entry, by the hash of the whole prefix that ends with it (so workers with
different block sizes share entries), and 64 bits: of 32 workers, whether the block is in device
memory (low half) or in a lower tier (high half). Of each worker and tier a second table maps the
hashes that the worker itself uses, which removals and parents name, to the prefix hashes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

from radixlm.router.block_table import BlockTable
from radixlm.router.prefix_hashes import MAX_BLOCK, PLAIN, Namespace, PrefixHashes, TokenIds, Words

log = logging.getLogger(__name__)

GROUP: Final = 32  # workers that share one table
_LOW: Final = (1 << GROUP) - 1
_ALL: Final = (1 << 64) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
DEVICE_TIERS: Final = frozenset({"GPU", "DEVICE", "G1", ""})


Known = dict[int, Words]
"""Block size -> the hashes of one prompt's prefixes, for callers that ask several indexes."""


class Match(NamedTuple):
    """Tokens of a prompt's start that a worker holds: in device memory, and in any tier."""

    device: int
    any: int


NOTHING: Final = Match(0, 0)


class _Tier:
    """What one worker holds in one tier."""

    __slots__ = ("bit", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names = BlockTable()  # the worker's own hash -> prefix hash


class _Group:
    """The table of up to GROUP workers."""

    def __init__(self) -> None:
        self.blocks = BlockTable()  # prefix hash -> bits
        self.members: list[_Member | None] = [None] * GROUP
        self.has_lower_tiers = False


class _Member:
    """A worker's place, its bit in a group, and its tiers by name."""

    def __init__(self, name: str, group: _Group, place: int) -> None:
        self.name, self.group, self.place = name, group, place
        self.tiers: dict[str, _Tier] = {}
        self.block_size = 0  # of all tiers, in tokens

    def tier(self, medium: str) -> _Tier:
        """The tier that events call ``medium``."""
        tier = self.tiers.get(medium)
        if tier is None:
            half = 0 if medium.upper() in DEVICE_TIERS else GROUP
            self.group.has_lower_tiers |= half > 0
            tier = self.tiers[medium] = _Tier(1 << (self.place + half))
        return tier


@cache
def shared_hashes() -> PrefixHashes:
    """The function of this process."""
    return PrefixHashes()


class KvIndex:
    """The blocks of all workers of one model. ``hashes``: the function of prefix hashes, which
    tests fix; ``max_bytes``: of memory, beyond which new blocks are not taken."""

    def __init__(self, max_bytes: int = 1 << 30, hashes: PrefixHashes | None = None) -> None:
        self.hashes = hashes or shared_hashes()
        self.on_cleared: Callable[[str], None] = lambda worker: None
        self.max_bytes = max_bytes
        self.num_refused = 0  # blocks beyond max_bytes
        self.num_orphans = 0  # blocks whose parent is not known
        self._groups: list[_Group] = []
        self._members: dict[str, _Member] = {}
        self._bytes = self._changes = 0

    def __len__(self) -> int:
        """Blocks known, each counted once for each worker and tier that holds it."""
        tiers = (tier for member in self._members.values() for tier in member.tiers.values())
        return sum(len(tier.names) for tier in tiers)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, nearly."""
        tables = [group.blocks for group in self._groups]
        tables += [t.names for member in self._members.values() for t in member.tiers.values()]
        return sum(table.num_bytes for table in tables)

    def stored(
        self,
        worker: str,
        hashes: Sequence[int],
        parent: int | None,
        ids: TokenIds,
        block_size: int,
        namespace: Namespace = PLAIN,
        medium: str = "GPU",
    ) -> bool:
        """``worker`` holds the blocks ``hashes``, which follow each other and the block ``parent``
        (None: they start a prompt). ``ids``: int32 [len(hashes) * block_size]. False if they were
        not taken: the parent is unknown, the sizes do not fit, or memory is full."""
        if not 0 < block_size <= MAX_BLOCK or len(ids) < len(hashes) * block_size or not hashes:
            return False
        member = self._member(worker)
        tier = member.tier(medium)
        start = self.hashes.start(namespace) if parent is None else self._known(member, parent)
        if not any(len(each.names) for each in member.tiers.values()):
            member.block_size = block_size
        if not start or block_size != member.block_size:
            self.num_orphans += len(hashes)
            return False
        if self._is_full(len(hashes)):
            self.num_refused += len(hashes)
            return False
        blocks, bit, name = member.group.blocks, tier.bit, tier.names.set
        for own, prefix in zip(
            hashes, self.hashes.of(ids, block_size, start).tolist(), strict=False
        ):
            old = name(_spread(own), prefix)
            if old != prefix:
                if old:
                    blocks.set(old, blocks.get(old) & ~bit)
                blocks.set(prefix, blocks.get(prefix) | bit)
        return True

    def held_tokens(self, worker: str) -> int:
        """Tokens in the device memory of ``worker``."""
        member = self._members.get(worker)
        tier = member and member.tiers.get("GPU")
        return len(tier.names) * member.block_size if member and tier else 0

    def removed(self, worker: str, hashes: Sequence[int], medium: str = "GPU") -> None:
        """``worker`` holds the blocks ``hashes`` no more in that tier."""
        member = self._member(worker)
        tier, blocks = member.tier(medium), member.group.blocks
        for own in hashes:
            prefix = tier.names.set(_spread(own), 0)
            if prefix:
                blocks.set(prefix, blocks.get(prefix) & ~tier.bit)

    def cleared(self, worker: str) -> None:
        """``worker`` holds nothing any more."""
        member = self._members.get(worker)
        if member is not None:
            bits = (1 << member.place) | (1 << (member.place + GROUP))
            if any(len(tier.names) for tier in member.tiers.values()):
                member.group.blocks.mask(_ALL & ~bits)
            member.tiers.clear()
        self.on_cleared(worker)

    def left(self, worker: str) -> None:
        """``worker`` is gone; its place is free for another."""
        self.cleared(worker)
        member = self._members.pop(worker, None)
        if member is not None:
            member.group.members[member.place] = None

    def matched(
        self, ids: TokenIds, namespace: Namespace = PLAIN, known: Known | None = None
    ) -> dict[str, Match]:
        """The prefix of ``ids``, int32 [n], that each worker holds; workers without any are left
        out. At most n - 1 tokens, since a worker always computes the last one."""
        result: dict[str, Match] = {}
        for size in {member.block_size for member in self._members.values()} - {0}:
            prefixes = prefixes_of(ids, size, namespace, known, self.hashes)
            for group in self._groups:
                _match(group, size, prefixes, result)
        return result

    def _known(self, member: _Member, own: int) -> int:
        """The prefix hash of a block in any tier, 0 if it is unknown."""
        key = _spread(own)
        return next((p for t in member.tiers.values() if (p := t.names.get(key))), 0)

    def _member(self, worker: str) -> _Member:
        member = self._members.get(worker)
        if member is None:
            group = next((g for g in self._groups if None in g.members), None)
            if group is None:
                group = _Group()
                self._groups.append(group)
            place = group.members.index(None)
            member = self._members[worker] = _Member(worker, group, place)
            group.members[place] = member
        return member

    def _is_full(self, num_new: int) -> bool:
        """Counted anew after every 16384 blocks, since that takes a while."""
        self._changes -= num_new
        if self._changes <= 0:
            self._changes, self._bytes = 16384, self.num_bytes
            if self._bytes > self.max_bytes:
                log.warning(
                    "the index of cached blocks is full at %d MB: blocks that workers report are "
                    "not taken; raise --index-max-mb",
                    self.max_bytes >> 20,
                )
        return self._bytes > self.max_bytes


def _spread(own: int) -> int:
    """A worker's hash, signed or not, as an evenly spread key."""
    return (own * _SPREAD) & _ALL


def _match(group: _Group, size: int, prefixes: Words, result: dict[str, Match]) -> None:
    """Add to ``result`` the members whose blocks have ``size`` tokens."""
    any_tier: dict[int, int] = {}
    for depth, lost in _losses(group, prefixes):  # the longest first
        match = Match(depth * size, depth * size)
        while lost:
            place = (lost & -lost).bit_length() - 1
            lost &= lost - 1
            if place >= GROUP:
                any_tier[place - GROUP] = depth
                continue
            member = group.members[place]
            if member is not None and member.block_size == size:
                result[member.name] = match
    for place, depth in any_tier.items():
        member = group.members[place]
        if member is not None and member.block_size == size:
            device = result.get(member.name, NOTHING).device
            result[member.name] = Match(device, depth * size)


def _losses(group: _Group, prefixes: Words) -> Iterator[tuple[int, int]]:
    """``losses`` of a group. Low half: in device memory; high half, where there are lower tiers: in
    any tier."""
    get, has_lower = group.blocks.get, group.has_lower_tiers

    def bits(at: int) -> int:
        value = get(int(prefixes[at]))
        return value | (value & _LOW) << GROUP if has_lower else value

    return losses(bits, len(prefixes))


def losses(bits: Callable[[int], int], count: int) -> Iterator[tuple[int, int]]:
    """(number of prefixes, bits of those that hold so many and no more), the longest first.
    ``bits``: of those that hold prefix 0, 1, ... Prefixes are evicted from their ends, so that each
    change is found by bisection."""
    first = bits(0) if count else 0
    # (first, bits at first, end, bits at end): what changes lies between
    spans = [(0, first, count, 0)] if first else []
    while spans:
        low, at_low, high, at_high = spans.pop()
        if high - low == 1:
            yield high, at_low & ~at_high
            continue
        middle = (low + high) // 2
        at_middle = bits(middle) & at_low | at_high
        if at_low != at_middle:
            spans.append((low, at_low, middle, at_middle))
        if at_middle != at_high:
            spans.append((middle, at_middle, high, at_high))


def prefixes_of(
    ids: TokenIds,
    size: int,
    namespace: Namespace,
    known: Known | None = None,
    hashes: PrefixHashes | None = None,
) -> Words:
    """Hashes of the prefixes of all but the last of ``ids``, kept in ``known``: also taken from
    those of shorter blocks there."""
    if known is None:
        known = {}
    found = known.get(size)
    if found is None:
        shorter = next((one for one in known if size % one == 0), 0)
        if shorter:
            step = size // shorter
            found = known[shorter][step - 1 :: step]
        else:
            hashes = hashes or shared_hashes()
            found = hashes.of(ids[:-1], size, hashes.start(namespace))
        known[size] = found
    return found
