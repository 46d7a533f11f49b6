"""Messages between node 0 and the agents and ranks of the other nodes of a replica.

Node 0 is the process of rank 0. It listens at --dist-init-addr. An agent joins with what its node
has, starts the ranks that node 0 asks for and reports their ends. A rank gets its plans from node 0
and meets the other ranks through node 0's key-value store.
"""

from __future__ import annotations

from typing import Any

import msgspec


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node has. ``checkpoint``: digest of the files at ``path``; ``sizes``: options that all
    nodes must share; ``address``: where other nodes reach its ranks."""

    host: str
    version: str
    checkpoint: str
    path: str
    address: str = ""
    sizes: dict[str, int] = {}
    num_cpus: int = 0
    memory_bytes: int = 0
    num_numa_nodes: int = 0
    num_gpus: int = 0


class Join(msgspec.Struct, tag="join"):
    """An agent asks to be node ``node_rank``; -1 takes any that is free."""

    node_rank: int
    facts: NodeFacts


class Welcome(msgspec.Struct, tag="welcome"):
    """The agent is a node of the replica's ``generation``: another after each start of rank 0."""

    node_rank: int
    generation: str


class Refused(msgspec.Struct, tag="refused"):
    """The agent cannot join. ``may_retry``: its predecessor may not have been missed yet."""

    reason: str
    may_retry: bool = False


class StartRanks(msgspec.Struct, tag="start"):
    """Start one process for each startup config, in place of any that run."""

    generation: str
    startups: list[dict[str, Any]]


class Beat(msgspec.Struct, tag="beat"):
    """The sender is alive; both ends send one a second."""

    generation: str


class RankEnded(msgspec.Struct, tag="ended"):
    """A rank's process ended with ``code``, minus the signal."""

    generation: str
    rank: int
    code: int


class RankHello(msgspec.Struct, tag="rank"):
    """A rank is here and takes plans."""

    generation: str
    rank: int


class RankFailed(msgspec.Struct, tag="rank_failed"):
    """A rank met an error and stops."""

    generation: str
    rank: int
    reason: str


class Plan(msgspec.Struct, tag="plan"):
    """Message ``index`` of rank 0 to all ranks, without a gap."""

    index: int
    payload: bytes


class StoreSet(msgspec.Struct, tag="set"):
    """Set a key of the store in which ranks find each other."""

    key: str
    value: bytes


class StoreGet(msgspec.Struct, tag="get"):
    """Ask for a key; the answer comes as soon as it is set."""

    key: str


class Leave(msgspec.Struct, tag="leave"):
    """Node 0 ends this generation; ``is_final``: the server stops, and the agent with it."""

    generation: str
    is_final: bool = False


ToNode0 = Join | Beat | RankEnded | RankHello | RankFailed | StoreSet | StoreGet
FromNode0 = Welcome | Refused | StartRanks | Beat | Leave | Plan | StoreSet
