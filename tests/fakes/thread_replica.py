"""A replica whose ranks are threads of this process, behind the offline API: the scheduler, relay,
rank loops and cut layers of a real one, without processes and shared memory."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from radixlm import Engine
from radixlm.base.errors import RankLost
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.groups import Ranks
from radixlm.engine import launch
from radixlm.engine.assemble import assemble, assemble_rank
from radixlm.engine.kept import FIRST_BOOT, Boot
from radixlm.engine.launch import ThreadEngine
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.rank_processes import topology_of
from radixlm.engine.ranks import Peers
from radixlm.executor.runner import Runner
from radixlm.parallel.rank import RankLoop
from radixlm.parallel.relay import RENEW, STOP, Answer, Relay
from radixlm.scheduler.loop import Executor
from tests.fakes.cut_model import shared_ranks
from tests.fakes.thread_groups import ThreadGroup, thread_ranks

log = logging.getLogger(__name__)


class Hub:
    """What the threads share: messages to each rank, and the answers to each call."""

    def __init__(self, num_ranks: int) -> None:
        self.mail: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(num_ranks - 1)]
        self.calls: dict[int, Future[list[Any]]] = defaultdict(Future)
        self.by_call: dict[int, list[Any]] = defaultdict(list)
        self.num_others = num_ranks - 1


class ThreadPeers(Peers):
    def __init__(self, ranks: Ranks, hub: Hub) -> None:
        self.ranks, self._hub, self._relays = ranks, hub, False
        self.limit_s = 60.0
        self._num_calls = 0

    def agree(self, numbers: Sequence[int]) -> list[int]:
        mine = torch.tensor([list(numbers)], dtype=torch.int64)
        whole = self.ranks.world.all_gather_rows(mine, (1,) * self.ranks.world.size)
        return [int(column.min()) for column in whole.T]

    def tell(self, kind: int, data: bytes = b"") -> None:
        for mail in self._hub.mail:
            mail.put(bytes((kind,)) + data)

    def expect(self) -> tuple[int, Future[list[Any]]]:
        self._num_calls += 1
        return self._num_calls, self._hub.calls[self._num_calls]

    def executor(self, make: Callable[[], Runner]) -> Executor:
        if not self._hub.num_others:
            return make()
        if self._relays:
            self.tell(RENEW)
        self._relays = True
        return Relay(make(), self)

    def read(self) -> bytes:
        return self._hub.mail[self.ranks.place.rank - 1].get()

    def answer(self, answer: Answer) -> None:
        found = self._hub.by_call[answer.call]
        found.append(answer.data)
        if len(found) == self._hub.num_others:
            self._hub.calls[answer.call].set_result(found)

    def fail(self, error: BaseException) -> None:
        """Nobody waits for answers that this rank will not give."""
        for call in list(self._hub.calls.values()):
            if not call.done():
                call.set_exception(RankLost(f"a rank is lost: {error}"))


class ThreadReplica(ThreadEngine):
    """Assembles rank 0 in the engine's thread, the others in threads of their own."""

    errors: list[BaseException]
    shared = False
    boot = FIRST_BOOT

    def _serve(self) -> None:
        make = shared_ranks if self.shared else thread_ranks
        ranks = make(topology_of(self._config))
        hub = Hub(len(ranks))
        peers, *others = [ThreadPeers(one, hub) for one in ranks]
        self.errors = []
        threads = [
            threading.Thread(target=self._follow, args=(other,), daemon=True) for other in others
        ]
        for thread in threads:
            thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "load", lambda name: self._loaded(name, peers))
            super()._serve()
        peers.tell(STOP)
        for thread in threads:
            thread.join(10)

    def _loaded(self, name: str, peers: ThreadPeers) -> Any:
        if name.endswith(":assemble"):
            return lambda *args, **given: assemble(*args, peers, self.boot, **given)
        module, attribute = name.split(":")
        return getattr(__import__(module, fromlist=[attribute]), attribute)

    def _follow(self, peers: ThreadPeers) -> None:
        try:
            make = assemble_rank(self._config, self._info, peers, self.boot)
            loop = RankLoop(peers.ranks.place.rank, peers, make)
            peers.agree(())
            loop.run()
        except BaseException as error:
            log.exception("rank %d failed", peers.ranks.place.rank)
            self.errors.append(error)
            for name in ("world", "tp", "attn", "experts", "expert_tp", "stages"):
                if isinstance(group := getattr(peers.ranks, name), ThreadGroup):
                    group.poison()
            peers.fail(error)


def thread_engine(
    monkeypatch: pytest.MonkeyPatch, shared: bool = False, boot: Boot = FIRST_BOOT, **options: Any
) -> Engine:
    """``Engine(**options)``, whose ranks are threads; ``shared``: they exchange through shared
    memory, so that steps are programs."""

    def make(
        config: ServerConfig, given: frozenset[str], info: ModelInfo, tokenizer: Any
    ) -> ThreadReplica:
        replica = ThreadReplica(config, info, tokenizer)
        replica.shared, replica.boot = shared, boot
        return replica

    monkeypatch.setattr("radixlm.entrypoints.offline.engine_for_program", make)
    return Engine(**options)
