"""One rank of a trainer's process group: receives weights into a file. It is a process of its own,
so that a trainer that dies, hangs or sends something else can neither stop nor harm an engine.

Reads commands as lines of JSON on its standard input, answers each with a line {ok, message}, and
ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from radixlm.base.addresses import url_host
from radixlm.weights.safetensors_file import DTYPES
from radixlm.wire.tensors import TensorInfo, make_header, tensor_info


class Receiver:
    """A rank of one group. Its methods raise what torch raises."""

    def __init__(self) -> None:
        self._group: Any = None
        self._device = torch.device("cpu")

    def join(self, args: dict[str, Any]) -> None:
        """Meet the other ranks at the store that rank 0 holds. torch.distributed's own functions,
        since their names of keys must be those of the trainer's group."""
        backend, name, timeout = args["backend"], args["group_name"], args["timeout_s"]
        if backend == "nccl":
            self._device = torch.device("cuda", args["device"])
            torch.cuda.set_device(self._device)
        limit, host = timedelta(seconds=timeout), args["master_address"]
        place = f"tcp://{url_host(host)}:{args['master_port']}"
        rank, size = args["rank"], args["world_size"]
        store, _, _ = next(rendezvous(place, rank, size, timeout=limit))
        store.set_timeout(limit)
        self._group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=name,
            timeout=limit,
        )

    def receive(self, args: dict[str, Any]) -> None:
        """Receive tensors in order from rank 0, or all in one (``is_bucket``), into the safetensors
        file ``path``; without one they are dropped."""
        infos = [tensor_info(*one) for one in args["tensors"]]
        if args["is_bucket"]:
            size = sum(info.num_bytes for info in infos)
            views = _views(args["path"], infos, [TensorInfo("", "U8", (size,))])
        else:
            views = _views(args["path"], infos, infos)
        for info, view in views:
            self._receive(info, view)

    def _receive(self, info: TensorInfo, bytes_: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        there = bytes_  # gloo moves bytes, whatever their dtype
        if self._device.type != "cpu":
            there = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=self._device)
        self._group.broadcast([there], options).wait()
        if there is not bytes_:
            bytes_.copy_(there.reshape(-1).view(torch.uint8))


def _views(
    path: str | None, infos: list[TensorInfo], parts: list[TensorInfo]
) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Memory for each of ``parts``, as bytes: the data of a new file with ``infos``, in order."""
    if path is None:
        scratch = torch.empty(max(one.num_bytes for one in parts), dtype=torch.uint8)
        yield from ((one, scratch[: one.num_bytes]) for one in parts)
        return
    head = make_header(infos)
    size = len(head) + sum(one.num_bytes for one in infos)
    with open(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
    ) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS
        file.write(head)
    data, at = torch.from_file(path, True, size, dtype=torch.uint8), len(head)
    for one in parts:
        yield one, data[at : at + one.num_bytes]
        at += one.num_bytes


def main() -> None:
    """Obey the process that started this one."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    commands: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)  # even in the middle of a collective

    threading.Thread(target=listen, name="commands", daemon=True).start()
    receiver = Receiver()
    while True:
        command = commands.get()
        message = ""
        try:
            (receiver.join if command["verb"] == "join" else receiver.receive)(command)
        except Exception as error:
            message = (str(error) or type(error).__name__).splitlines()[0][:400]
        answers.write(json.dumps({"ok": not message, "message": message}) + "\n")


if __name__ == "__main__":
    main()
