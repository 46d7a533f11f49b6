"""What operators ask of the tiers of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixlm.base.errors import InvalidRequest
from radixlm.tiers.base import Admin

if TYPE_CHECKING:
    from radixlm.tiers.worker import PageWorker


def administer(worker: PageWorker, command: Admin) -> Any:
    """The verbs "stats": of each tier; "layout": of pages; "clear": all, or those named ``tier``;
    "attach" a storage, ``backend`` with ``extra``; "detach" it; "recent": keys of the ``count``
    pages that were used last. InvalidRequest."""
    name = command.args.get("tier")
    chosen = [tier for tier in worker.tiers if name in (None, tier.name)]
    if command.verb == "clear":
        for tier in chosen:
            worker.guarded(tier, tier.clear, None)
        return {"cleared": [tier.name for tier in chosen]}
    if command.verb == "stats":
        return {
            "tiers": [
                {
                    "name": t.name,
                    "medium": t.medium,
                    "backend": getattr(t, "backend", None),
                    **worker.guarded(t, t.stats, {}),
                }
                for t in chosen
            ],
            "errors": dict(worker.errors),
        }
    if command.verb == "layout":
        return worker.facts
    if command.verb in ("attach", "detach"):
        return _change_storage(worker, command)
    if command.verb == "recent":
        keys = (key for t in worker.lasting() for key in t.recent(command.args["count"]))
        return list(dict.fromkeys(keys))
    known = "clear, stats, layout, attach, detach"
    raise InvalidRequest(f"verb: {command.verb!r} is none of {known}", param="verb")


def _change_storage(worker: PageWorker, command: Admin) -> Any:
    storages = [tier for tier in worker.tiers if tier.name == "storage"]
    if command.verb == "detach":
        worker.tiers = [tier for tier in worker.tiers if tier not in storages]
        for tier in storages:
            worker.guarded(tier, tier.close, None)
        return {"detached": len(storages)}
    if storages or worker.attach is None:
        why = "a storage is attached; detach it first" if storages else "there is no host tier"
        raise InvalidRequest(f"hicache_storage_backend: {why}", "hicache_storage_backend")
    made = worker.attach(command.args["backend"], command.args.get("extra"))
    number = sum(tier.name == "host" for tier in worker.tiers)
    worker.tiers = [*worker.tiers[:number], made, *worker.tiers[number:]]
    return {"attached": command.args["backend"]}
