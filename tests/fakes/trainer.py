"""A trainer of its own process: rank 0 of a group in which weights are broadcast.

As trainers for SGLang do, by torch.distributed's own functions. Reads commands as lines of JSON:
{"verb": "join", port, world_size, group}, {"verb": "send", path, names} (tensors of a safetensors
file), {"verb": "part", ...} (the first tensor only, then it hangs). Answers each with a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import IO, Any

TIMEOUT_S = 60.0


class Trainer:
    """The process. A context manager that kills it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, verb: str, **args: Any) -> None:
        """Begin something; ``answer`` waits for its end."""
        assert self.process.stdin is not None
        print(json.dumps({"verb": verb, **args}), file=self.process.stdin, flush=True)

    def answer(self) -> str:
        """What became of the oldest command: "ok" or an error."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.kill()


def main() -> None:
    import torch
    from safetensors.torch import load_file
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    group: Any = None
    for line in sys.stdin:
        args = json.loads(line)
        said = "ok"
        try:
            if args["verb"] == "join":
                limit, size = timedelta(seconds=TIMEOUT_S), args["world_size"]
                place = f"tcp://127.0.0.1:{args['port']}"
                store, _, _ = next(rendezvous(place, 0, size, timeout=limit))
                store.set_timeout(limit)
                name = args["group"]
                store = c10d.PrefixStore(name, store)
                backend = c10d.Backend("gloo")
                group, _ = c10d._new_process_group_helper(
                    size, 0, [], backend, store, group_name=name, timeout=limit
                )
                c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
            else:
                tensors = load_file(args["path"])
                chosen = [tensors[name] for name in args["names"]]
                if args["verb"] == "bucket":
                    flat = [one.reshape(-1).view(torch.uint8) for one in chosen]
                    chosen = [torch.cat(flat)]
                handles = [
                    distributed.broadcast(one, src=0, group=group, async_op=True)
                    for one in (chosen[:1] if args["verb"] == "part" else chosen)
                ]
                for handle in handles:
                    handle.wait()
        except Exception as error:
            said = str(error).splitlines()[0]
        print(said, flush=True)


if __name__ == "__main__":
    main()
