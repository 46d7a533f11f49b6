"""The engine process: scheduler and executor. ``python -m radixlm.engine.worker`` reads its
options as JSON from standard input and talks to its intakes over the addresses given there."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from radixlm.engine.parent import check_parent, die_with_parent
from radixlm.engine.startup import StartupReader

if __name__ == "__main__":
    die_with_parent()  # importing torch takes seconds: whoever leaves meanwhile takes us along
    gc.disable()  # imports and weights leave no garbage worth the looking, until it serves
    early = StartupReader()  # it is read, and its memory made ready, meanwhile

# torch before anything that links OpenMP: there must be one runtime in the process
import torch  # noqa: F401

from radixlm.base.errors import RadixError
from radixlm.base.log import set_up_logging
from radixlm.config.server_config import ServerConfig
from radixlm.engine.assemble import assemble
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.engine.model_info import resolved
from radixlm.engine.multi_channel import MultiChannel
from radixlm.engine.scheduler_supervisor import SchedulerSupervisor
from radixlm.engine.supervisor import STOP_SIGNAL
from radixlm.kernels.cpu.extension import available, native
from radixlm.observe.gcwatch import GcWatch
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import scheduler_codec
from radixlm.wire.replies import Failed, Ready

log = logging.getLogger(__name__)


@contextmanager
def lent_pages(early: StartupReader) -> Iterator[None]:
    """Weights are packed into the pages that were made ahead, as far as they go."""
    if early.pages is None or not available:
        early.drop()
        yield
        return
    native().lend_memory(early.pages.address, early.pages.num_bytes)
    try:
        yield
    finally:
        early.finish()
        native().end_lending()


def main(early: StartupReader) -> int:
    """0 after an orderly end, 2 if the model or the options cannot be served."""
    order = early.wait()
    if order is None:  # started early by a server that did not come to be
        return 0
    check_parent(int(order["parent"]))
    # these reach the whole group or unit: the server decides what becomes of its engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    config = ServerConfig.from_kwargs(**order["options"])
    is_alone = config.parallel.dp_size == 1
    set_up_logging("engine" if is_alone else f"engine{order['index']}", config.observe.log_level)
    codec = scheduler_codec()
    channel = MultiChannel([ZmqChannel(a, codec, bind=False) for a in order["addresses"]])
    try:
        config, info = resolved(config, frozenset(order["given"]))
        channel.vocab, channel.embed_dim = info.decoder.vocab, info.decoder.dim
        flight = InflightLog(Path(order["inflight_log_path"]))
        with lent_pages(early):
            replica = assemble(config, info, channel, extra_features=(flight,))
    except RadixError as error:
        channel.send(Failed(type(error).__name__, str(error)))
        time.sleep(0.2)  # zmq sends in the background; LINGER is 0
        return 2
    serving = SchedulerSupervisor(replica.scheduler, replica.renew, channel, replica.facts, flight)

    def stop(signum: int, frame: FrameType | None) -> None:
        serving.stop()

    signal.signal(STOP_SIGNAL, stop)
    GcWatch(config.observe.gc_warning_threshold_secs).install()
    gc.freeze()
    gc.enable()
    channel.send(Ready(replica.facts))
    serving.run()
    channel.close()
    return 0


if __name__ == "__main__":
    code = main(early)
    logging.shutdown()
    sys.stdout.flush()
    # torch's teardown takes a while and nothing is left to save
    os._exit(code)
