"""Router: a gateway that is made from RouterArgs, and started."""

from __future__ import annotations

import logging
from typing import Any

from sglang_router.parts import PyApiKeyEntry, PyControlPlaneAuthConfig, PyJwtConfig, PyRole
from sglang_router.router_args import RouterArgs
from sglang_router.sglang_router_rs import BackendType, HistoryBackendType, PolicyType
from sglang_router.sglang_router_rs import Router as _Router

logger = logging.getLogger(__name__)

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


def role_from_str(role_str: str) -> PyRole:
    """The role of a name; a user's where there is none."""
    return PyRole.Admin if role_str.lower() == "admin" else PyRole.User


def build_control_plane_auth_config(args_dict: dict[str, Any]) -> PyControlPlaneAuthConfig | None:
    """Who may use the control plane, of the fields of a RouterArgs; None if nothing is said."""
    given = {
        name: args_dict[f"jwt_{name}"]
        for name in ("issuer", "audience", "jwks_uri", "role_claim", "role_mapping")
        if args_dict.get(f"jwt_{name}")
    }
    jwt = PyJwtConfig(**given) if {"issuer", "audience"} <= given.keys() else None
    if jwt is None and given not in ({}, {"role_claim": "roles"}):
        logger.warning("jwt_issuer/jwt_audience missing: no JWT is taken")
    entries = args_dict.get("control_plane_api_keys") or ()
    keys = [
        PyApiKeyEntry(key_id, name, key, role_from_str(role)) for key_id, name, key, role in entries
    ]
    if jwt is None and not keys:
        return None
    return PyControlPlaneAuthConfig(jwt, keys, args_dict.get("control_plane_audit_enabled", False))


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
