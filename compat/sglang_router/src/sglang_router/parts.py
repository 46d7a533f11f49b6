"""Groups of the gateway's options, which programs make for sglang-router's native Router."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PyRole(Enum):
    """What a key or a JWT may do."""

    Admin = "admin"
    User = "user"


@dataclass
class PyApiKeyEntry:
    """A key of the control plane."""

    id: str
    name: str
    key: str
    role: PyRole = PyRole.User


@dataclass
class PyJwtConfig:
    """Who issues JWTs, and which of their roles are ours."""

    issuer: str
    audience: str
    jwks_uri: str | None = None
    role_claim: str = "roles"
    role_mapping: dict[str, str] = field(default_factory=dict)


@dataclass
class PyControlPlaneAuthConfig:
    """Who may use the control plane."""

    jwt: PyJwtConfig | None = None
    api_keys: list[PyApiKeyEntry] = field(default_factory=list)
    audit_enabled: bool = True

    def flat(self) -> dict[str, Any]:
        """As fields of RouterArgs."""
        keys = [(one.id, one.name, one.key, one.role.value) for one in self.api_keys]
        jwt = {f"jwt_{name}": value for name, value in vars(self.jwt).items()} if self.jwt else {}
        own = {"control_plane_api_keys": keys, "control_plane_audit_enabled": self.audit_enabled}
        return own | jwt


@dataclass
class PyOracleConfig:
    """Where Oracle keeps the history. ValueError for a pool that cannot be."""

    password: str | None = None
    username: str | None = None
    connect_descriptor: str | None = None
    wallet_path: str | None = None
    pool_min: int = 1
    pool_max: int = 16
    pool_timeout_secs: int = 30

    def __post_init__(self) -> None:
        if self.pool_min < 1:
            raise ValueError("pool_min must be at least 1")
        if self.pool_max < self.pool_min:
            raise ValueError("pool_max must be >= pool_min")

    def flat(self) -> dict[str, Any]:
        """As fields of RouterArgs."""
        return {f"oracle_{name}": value for name, value in vars(self).items()}


@dataclass
class PyPostgresConfig:
    """Where PostgreSQL keeps the history."""

    db_url: str | None = None
    pool_max: int = 16

    def flat(self) -> dict[str, Any]:
        """As fields of RouterArgs."""
        return {f"postgres_{name}": value for name, value in vars(self).items()}


@dataclass
class PyRedisConfig:
    """Where Redis keeps the history; ``retention_days`` None keeps it for ever."""

    url: str
    pool_max: int = 16
    retention_days: int | None = 30

    def flat(self) -> dict[str, Any]:
        """As fields of RouterArgs, where -1 keeps for ever."""
        days = -1 if self.retention_days is None else self.retention_days
        flat = {f"redis_{name}": value for name, value in vars(self).items()}
        return flat | {"redis_retention_days": days}


GROUPS = ("control_plane_auth", "oracle_config", "postgres_config", "redis_config")
"""Arguments of the native Router that hold a group."""
