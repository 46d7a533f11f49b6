"""WeightsChecker: digests of the tensors that an engine serves, for trainers that compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from radixlm.base.errors import InvalidRequest, RadixError
from radixlm.engine.live_weights import WeightUpdater
from radixlm.weights.source import TensorSource

ACTIONS = ("checksum", "snapshot", "compare")
MAX_LISTED = 10


class WeightsChecker:
    """Of one engine. It reads the files that the served layers were packed from: the checkpoint
    and what later updates have replaced."""

    def __init__(self, updater: WeightUpdater) -> None:
        self._updater = updater
        self._snapshot: dict[str, str] = {}
        self._thread = ThreadPoolExecutor(1, "check weights")

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What intake asks of it."""
        return {"check_weights": self._check}

    def _check(self, args: dict[str, Any]) -> Future[Callable[[], Any]]:
        """``action``: one of ACTIONS; ``skip``: parts of names to leave out."""
        action = str(args.get("action"))
        if action not in ACTIONS:
            known = ", ".join(ACTIONS)
            raise InvalidRequest(f"action: {action!r:.40} is none of {known}", "action")
        if action == "compare" and not self._snapshot:
            raise InvalidRequest("action: compare needs a snapshot first", "action")
        source = (
            self._updater.open_source()
        )  # here, between two steps: an update changes nothing of it
        return self._thread.submit(self._read, source, action, tuple(args.get("skip") or ()))

    def _read(self, source: TensorSource, action: str, skip: Sequence[str]) -> Callable[[], Any]:
        names = [one for one in sorted(source.sizes()) if not any(part in one for part in skip)]
        try:
            found = {name: _digest(source, name) for name in names}
        except (RadixError, OSError, ValueError) as error:
            return partial(_refuse, str(error))
        if action == "snapshot":
            self._snapshot = found
        if action == "compare":
            return partial(self._compare, found)
        whole = hashlib.sha256("".join(f"{name}{found[name]}" for name in names).encode())
        digest = whole.hexdigest()
        return lambda: {"checksums": found, "per_gpu_checksum": digest}

    def _compare(self, found: dict[str, str]) -> dict[str, Any]:
        before = self._snapshot
        differ = sorted(name for name, digest in found.items() if before.get(name, "") != digest)
        if differ:
            shown = ", ".join(differ[:MAX_LISTED])
            _refuse(f"compare: {len(differ)} tensors differ from the snapshot: {shown}")
        return {"num_equal": len(found)}


def _digest(source: TensorSource, name: str) -> str:
    """SHA-256 of a tensor's bytes in row-major order, in hex."""
    value = source.read(name).contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(value.numpy().data).hexdigest()
    source.release(name)
    return digest


def _refuse(why: str) -> None:
    raise InvalidRequest(why)
