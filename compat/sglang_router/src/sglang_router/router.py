"""Router: a gateway that is made from RouterArgs, and started."""

from __future__ import annotations

from typing import Any

from sglang_router.router_args import RouterArgs
from sglang_router.sglang_router_rs import BackendType, HistoryBackendType, PolicyType
from sglang_router.sglang_router_rs import Router as _Router

_POLICIES = {policy.value: policy for policy in PolicyType}


def policy_from_str(policy_str: str | None) -> PolicyType | None:
    """The policy of a name; KeyError where there is none."""
    return None if policy_str is None else _POLICIES[policy_str]


def backend_from_str(backend_str: str | BackendType | None) -> BackendType:
    """The kind of workers of a name."""
    if isinstance(backend_str, BackendType):
        return backend_str
    try:
        return BackendType((backend_str or "sglang").lower())
    except ValueError:
        known = ", ".join(one.value for one in BackendType)
        raise ValueError(f"Unknown backend: {backend_str}. Valid options: {known}") from None


def history_backend_from_str(backend_str: str | HistoryBackendType | None) -> HistoryBackendType:
    """The history backend of a name."""
    if isinstance(backend_str, HistoryBackendType):
        return backend_str
    try:
        return HistoryBackendType((backend_str or "memory").lower())
    except ValueError:
        raise ValueError(f"Unknown history backend: {backend_str}") from None


class Router:
    """A gateway. ``start`` serves until a signal."""

    def __init__(self, router: _Router) -> None:
        self._router = router

    @staticmethod
    def from_args(args: RouterArgs) -> Router:
        """A gateway with these options."""
        fields: dict[str, Any] = dict(vars(args))
        for name in ("policy", "prefill_policy", "decode_policy"):
            fields[name] = policy_from_str(fields[name])
        fields["backend"] = backend_from_str(fields.get("backend"))
        fields["history_backend"] = history_backend_from_str(fields.get("history_backend"))
        if fields["service_discovery"] or fields["pd_disaggregation"]:
            fields["worker_urls"] = []
        if not fields["pd_disaggregation"]:
            fields["prefill_urls"] = fields["decode_urls"] = None
        return Router(_Router(**fields))

    def start(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._router.start()
