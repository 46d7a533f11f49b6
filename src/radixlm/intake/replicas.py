"""The engines behind one intake (--dp-size): which of them computes which request.

A request belongs to one replica at a time. When that dies, intake gives the request to another, and
ignores what the dead one still sends about it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.observe.loads import total_load
from radixlm.wire.link import Link
from radixlm.wire.replies import LoadReport
from radixlm.wire.requests import AbortRequest, Control


class Replica:
    """One engine as intake sees it."""

    __slots__ = (
        "beat_s",
        "facts",
        "index",
        "is_gone",
        "is_ready",
        "link",
        "load",
        "rids",
        "version",
    )

    def __init__(self, index: int, link: Link) -> None:
        self.index, self.link = index, link
        self.is_ready = False
        self.is_gone = False  # there will be no engine here any more
        self.load = LoadReport()
        self.facts: dict[str, Any] = {}
        self.version = ""  # the label of the weights that it computes with
        self.beat_s = 0.0
        self.rids: dict[str, int] = {}  # what it computes for this intake, and its tokens

    @property
    def num_requests(self) -> int:
        """What it holds: ours is known at once, that of other intakes by its last report."""
        return max(len(self.rids), self.load.num_running + self.load.num_waiting)

    @property
    def num_tokens(self) -> int:
        """What it holds, in tokens: ours from the start, what they grow to by its last report."""
        return max(sum(self.rids.values()), self.load.num_used_tokens)


class Replicas:
    """All engines of one intake. ``send`` finds the way of a message."""

    def __init__(self, links: Sequence[Link], method: str = "round_robin") -> None:
        """``method``: round_robin; shortest_queue or minimum_tokens: the replica that holds the
        fewest requests or tokens."""
        self._all = tuple(Replica(index, link) for index, link in enumerate(links))
        of = {"shortest_queue": "num_requests", "minimum_tokens": "num_tokens"}.get(method)
        self._burden = of and attrgetter(of)
        self._owner: dict[str, Replica] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    def start(self, handler: Callable[[Replica, Any], None]) -> None:
        """Listen to all of them; inside the event loop."""
        for replica in self._all:
            replica.link.start(partial(handler, replica))

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self._all if replica.is_ready]

    def assign(self, rid: str, wanted: int | None = None, num_tokens: int = 0) -> Replica | None:
        """The replica that computes ``rid`` of ``num_tokens`` from now on; None while there is
        none. ``wanted``: the index of the one that a client asks for; while it is gone another
        serves."""
        ready = self.ready
        if not ready:
            return None
        asked = next((replica for replica in ready if replica.index == wanted), None)
        if asked is not None:
            chosen = asked
        elif self._burden:
            chosen = min(ready, key=self._burden)
        else:
            chosen = ready[self._turn % len(ready)]
            self._turn += 1
        self.forget(rid)
        chosen.rids[rid] = num_tokens
        self._owner[rid] = chosen
        return chosen

    def check(self, index: int | None) -> None:
        """InvalidRequest for the index of a replica that there is not."""
        if index is not None and not 0 <= index < len(self._all):
            raise InvalidRequest(
                f"data_parallel_rank: {index} is none of the ranks of this server, 0 to "
                f"{len(self._all) - 1} (--dp-size {len(self._all)})",
                param="data_parallel_rank",
            )

    def is_of(self, rid: str, replica: Replica) -> bool:
        """Whether what ``replica`` says of ``rid`` counts. A single one is always believed."""
        return len(self._all) == 1 or self._owner.get(rid) is replica

    def forget(self, rid: str) -> None:
        """The request is over, or goes elsewhere."""
        replica = self._owner.pop(rid, None)
        if replica is not None:
            replica.rids.pop(rid, None)

    def orphans(self, replica: Replica) -> set[str]:
        """Take its requests from a dead replica; their ids."""
        left, replica.rids = set(replica.rids), {}
        for rid in left:
            self._owner.pop(rid, None)
        return left

    def is_computed(self, rid: str) -> bool:
        """Whether a living replica has the request."""
        return rid in self._owner

    def send(self, message: Any) -> None:
        """To the replica that has the request; what concerns all of them to all."""
        if len(self._all) == 1:
            self._all[0].link.send(message)
        elif isinstance(message, AbortRequest) and not message.all:
            self._send_abort(message)
        else:
            to = self.ready if isinstance(message, Control) else self._all
            for replica in to:
                replica.link.send(message)

    def _send_abort(self, message: AbortRequest) -> None:
        """What has no owner may still be known to any of them."""
        for replica in self.ready:
            rids = tuple(r for r in message.rids if self._owner.get(r, replica) is replica)
            if rids:
                replica.link.send(msgspec.structs.replace(message, rids=rids))

    def close(self) -> None:
        for replica in self._all:
            replica.link.close()

    def load(self) -> LoadReport:
        """The load of all together."""
        if len(self._all) == 1:
            return self._all[0].load
        return total_load([replica.load for replica in self.ready])
