"""The names of sglang-router's native module that programs import."""

from __future__ import annotations

from enum import Enum
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from sglang_router.parts import (
    GROUPS,
    PyApiKeyEntry,
    PyControlPlaneAuthConfig,
    PyJwtConfig,
    PyOracleConfig,
    PyPostgresConfig,
    PyRedisConfig,
    PyRole,
)
from sglang_router.router_args import to_options
from sglang_router.version import __version__

__all__ = [
    "BackendType",
    "HistoryBackendType",
    "PolicyType",
    "PyApiKeyEntry",
    "PyControlPlaneAuthConfig",
    "PyJwtConfig",
    "PyOracleConfig",
    "PyPostgresConfig",
    "PyRedisConfig",
    "PyRole",
    "Router",
    "get_available_tool_call_parsers",
    "get_verbose_version_string",
    "get_version_string",
]


class PolicyType(Enum):
    """Policies."""

    Random = "random"
    RoundRobin = "round_robin"
    CacheAware = "cache_aware"
    PowerOfTwo = "power_of_two"
    Bucket = "bucket"
    Manual = "manual"
    ConsistentHashing = "consistent_hashing"
    PrefixHash = "prefix_hash"
    Passthrough = "passthrough"
    LeastLoad = "least_load"
    LeastWork = "least_work"


class BackendType(Enum):
    """Kinds of workers."""

    Sglang = "sglang"
    Vllm = "vllm"
    Openai = "openai"


HistoryBackendType = Enum(  # type: ignore[misc]  # one member is called None
    "HistoryBackendType",
    {name.title(): name for name in ("memory", "none", "oracle", "postgres", "redis")},
)


class Router:
    """The gateway: ``Router(**fields).start()``, with the fields of RouterArgs or groups."""

    def __init__(self, **fields: Any) -> None:
        """ValueError for options that do not fit."""
        groups = [fields.pop(name, None) for name in GROUPS]
        plain = {k: v.value if isinstance(v, Enum) else v for k, v in fields.items()}
        for group in groups:
            plain |= group.flat() if group is not None else {}
        try:
            self.options = to_options(plain)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def start(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        set_up_logging("router", self.options.log_level)
        load("radixlm.router.logs:set_up")(self.options)
        try:
            load("radixlm.router.launch:run")(self.options)
        except ConfigError as error:
            raise RuntimeError(str(error)) from error


def get_available_tool_call_parsers() -> list[str]:
    """Names of the parsers of tool calls."""
    return list(load("radixlm.text.tools.registry:NAMES"))


def get_version_string() -> str:
    """One line."""
    return f"sglang-router {__version__}"


def get_verbose_version_string() -> str:
    """With the engine's version."""
    return f"{get_version_string()} (RadixLM {load('radixlm:__version__')})"
