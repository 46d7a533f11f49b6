"""Messages between node 0 and the agents and ranks of the other nodes of a replica.

Node 0 is the process of rank 0. It listens at --dist-init-addr. An agent joins with what its node
has, starts the ranks that node 0 asks for, passes messages on and reports their ends. Ranks find
each other through node 0's key-value store.
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
    """A rank's process ended with ``code``: its exit status, or minus the signal."""

    generation: str
    rank: int
    code: int


class RankMessage(msgspec.Struct, tag="message"):
    """What rank 0 and rank ``rank`` of another node say to each other, in order."""

    generation: str
    rank: int
    data: bytes


class ToNode(msgspec.Struct, tag="node"):
    """What rank 0 tells all ranks. On another node the lowest rank gets it and hands it on."""

    generation: str
    data: bytes


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


ToNode0 = Join | Beat | RankEnded | RankMessage | StoreSet | StoreGet
FromNode0 = Welcome | Refused | StartRanks | Beat | Leave | RankMessage | ToNode | StoreSet
