"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.router.policies.base import Policy
from radixlm.router.policies.bucket import Bucket
from radixlm.router.policies.cache_aware import CacheAware
from radixlm.router.policies.manual import Manual
from radixlm.router.policies.plain import LeastLoad, Passthrough, PowerOfTwo, Random, RoundRobin
from radixlm.router.policies.ring import ConsistentHashing, PrefixHash

# name -> maker from the options of the command line, by their names there
POLICIES: dict[str, Callable[[Any], Policy]] = {
    "random": lambda options: Random(),
    "round_robin": lambda options: RoundRobin(),
    "power_of_two": lambda options: PowerOfTwo(),
    "passthrough": lambda options: Passthrough(),
    "least_load": lambda options: LeastLoad(
        options.least_load_kv_pressure_weight, options.least_load_default_throughput
    ),
    "least_work": lambda options: load("radixlm.router.policies.least_work:LeastWork")(),
    "prefix_hash": lambda options: PrefixHash(
        options.prefix_token_count, options.prefix_hash_load_factor
    ),
    "cache_aware": lambda options: CacheAware(
        options.cache_threshold,
        options.balance_abs_threshold,
        options.balance_rel_threshold,
        options.max_tree_size,
        options.overload_token_usage_threshold,
        options.balance_token_usage_threshold,
    ),
    "bucket": lambda options: Bucket(
        options.balance_abs_threshold,
        options.balance_rel_threshold,
        options.bucket_adjust_interval_secs,
    ),
    "manual": lambda options: Manual(options.assignment_mode, options.max_idle_secs),
    "consistent_hashing": lambda options: ConsistentHashing(
        # with one key for all, it tells nobody apart
        (b"x-forwarded-for", b"cookie")
        if options.api_key
        else (b"authorization", b"x-forwarded-for", b"cookie")
    ),
}


def make(name: str, options: Any) -> Policy:
    """A policy for one pool. ``options``: has the options of policies, and api_key. ConfigError for
    an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"--policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](options)
