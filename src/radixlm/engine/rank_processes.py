"""The other ranks of a replica as rank 0 sees them: processes that it starts, watches and ends.

All ranks live and die together: a replica that has lost a rank cannot compute a step. So the first
end of one of them ends all, rank 0 included, and the server starts another replica. Ranks are
forked from rank 0 when it has imported torch: importing takes most of a start, and memory.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from radixlm.distributed.topology import Topology

if TYPE_CHECKING:
    from radixlm.config.server_config import ServerConfig

log = logging.getLogger(__name__)

# OpenMP reads these when it is loaded: its threads spin shortly between two kernels, then sleep, so
# that an idle server uses no core and does not slow down other processes
OPENMP_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
COMMAND = (sys.executable, "-m", "radixlm.engine.worker")
REFUSED = 2  # exit status of a process whose options or checkpoint cannot be served
STOP_WAIT_S = 1.0


def topology_of(config: ServerConfig) -> Topology:
    """The ranks of a replica."""
    p = config.parallel
    attn_dp = p.dp_size if p.enable_dp_attention else 1
    return Topology(p.tp_size, p.pp_size, attn_dp, p.ep_size, p.moe_dense_tp_size or 0, p.nnodes)


class RankProcesses:
    """Forks the ranks ``startup["local_ranks"]``, each of which calls ``run`` with its own startup
    config and ends with the status that it returns. To be made by the main thread: the kernel kills
    the ranks when that ends. Before OpenMP has threads, which a fork lacks. OSError if the system
    has no room for a rank."""

    def __init__(self, startup: dict[str, Any], run: Callable[[dict[str, Any]], int]) -> None:
        self._startup, self._run = startup, run
        self.ranks: list[int] = startup["local_ranks"]
        self.sockets: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self.on_loss: Callable[[str], None] = lambda reason: None
        self.is_stopping = False
        for rank in self.ranks:
            self._fork(rank)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _fork(self, rank: int) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"rank": rank, "ranks": [0, *self.ranks], "parent": os.getpid(), "local_ranks": None}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what they hold would be written twice
        self.sockets[rank] = mine
        self._pids[rank] = os.fork()
        if not self._pids[rank]:
            for link in self.sockets.values():
                link.close()
            self._become({**self._startup, **own, "socket": theirs.detach()})
        theirs.close()
        self._descriptors[rank] = os.pidfd_open(self._pids[rank])

    def _become(self, startup: dict[str, Any]) -> NoReturn:
        """Be a rank, then end without what the process would do that this was forked from."""
        code = 1
        try:
            os.setpgid(0, 0)
            code = self._run(startup)
            logging.shutdown()
            if sys.stdout is not None:  # it was closed before the start
                sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _watch(self) -> None:
        """Wait for the ends of all ranks."""
        poll, running = select.poll(), {number: rank for rank, number in self._descriptors.items()}
        for number in running:
            poll.register(number, select.POLLIN)
        while running:
            for number, _ in poll.poll():
                poll.unregister(number)
                rank = running.pop(number)
                code = os.waitstatus_to_exitcode(os.waitpid(self._pids[rank], 0)[1])
                # a rank that refuses to start has told why, and rank 0 raises it as its own error
                if not self.is_stopping and code != REFUSED:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    self.end(f"rank {rank} ended with {how}", code)

    def end(self, reason: str, code: int = 1) -> NoReturn:
        """End all ranks, this one too, as the first of them ended: by SIGKILL where that was the
        signal, which usually comes from outside and is then blamed on no request; else with the
        status of a shell, so that the memory of a rank that broke down is not trusted."""
        log.error("%s; the replica ends", reason)
        self.on_loss(reason)
        self._kill()
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 - code if code < 0 else 1)

    def _kill(self) -> None:
        for number in self._descriptors.values():
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(number, signal.SIGKILL)

    def stop(self) -> None:
        """Wait for the end of the ranks, which were told to stop, and kill those that do not.
        ``is_stopping`` was set before: their ends are no loss."""
        self._watcher.join(STOP_WAIT_S)
        self._kill()
        self._watcher.join()
        for link in self.sockets.values():
            link.close()
        for number in self._descriptors.values():
            os.close(number)
