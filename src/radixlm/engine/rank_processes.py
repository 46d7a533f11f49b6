"""The other ranks of a replica as rank 0 sees them: processes that it starts, watches and ends.

All ranks live and die together: a replica that has lost a rank cannot compute a step. So the first
end of one of them ends all, rank 0 included, and the server starts another replica. Needs nothing
but Python's standard library, so that the ranks start while rank 0 imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
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


class RankProcesses(threading.Thread):
    """Starts the ranks ``startup["local_ranks"]``. The kernel kills them when this thread ends,
    which it does with the process."""

    def __init__(self, startup: dict[str, Any]) -> None:
        super().__init__(name="ranks", daemon=True)
        self._startup = startup
        self.ranks: list[int] = startup["local_ranks"]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.on_loss: Callable[[str], None] = lambda reason: None
        self._error: OSError | None = None
        self._is_started, self.is_stopping = threading.Event(), False
        self.start()

    def run(self) -> None:
        """Start the ranks, then wait for the first that ends."""
        try:
            for rank in self.ranks:
                self._spawn(rank)
        except OSError as error:
            self._error = error
            return
        finally:
            self._is_started.set()
        self._watch()

    def wait(self) -> None:
        """Wait until all have been started; OSError if the system has no room for them."""
        self._is_started.wait()
        if self._error is not None:
            raise self._error

    def _spawn(self, rank: int) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                env={**OPENMP_ENVIRONMENT, **os.environ},
                process_group=0,
                pass_fds=(theirs.fileno(),),
            )
            ranks, parent = [0, *self.ranks], os.getpid()
            own = {"rank": rank, "ranks": ranks, "socket": theirs.fileno(), "parent": parent}
        self.processes[rank], self.sockets[rank] = process, mine
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(json.dumps({**self._startup, "local_ranks": None, **own}).encode())

    def _watch(self) -> None:
        poll, rank_of = select.poll(), {}
        for rank, process in self.processes.items():
            descriptor = os.pidfd_open(process.pid)
            rank_of[descriptor] = rank
            poll.register(descriptor, select.POLLIN)
        while rank_of:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                os.close(descriptor)
                rank = rank_of.pop(descriptor)
                code = self.processes[rank].wait()
                # a rank that refuses to start has told why, and rank 0 raises it as its own error
                if not self.is_stopping and code != REFUSED:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    self.end(f"rank {rank} ended with {how}", code)

    def end(self, reason: str, code: int = 1) -> NoReturn:
        """End all ranks, this one too, as the first of them ended: by SIGKILL where that was the
        signal, which usually comes from outside and is then blamed on no request."""
        log.error("%s; the replica ends", reason)
        self.on_loss(reason)
        self._kill()
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def _kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def stop(self) -> None:
        """Wait for the end of the ranks, which were told to stop, and kill those that do not.
        ``is_stopping`` was set before: their ends are no loss."""
        for process in self.processes.values():
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for link in self.sockets.values():
            link.close()
