"""A flat mapping (command line, YAML, keyword arguments) -> values of options by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion
from radixlm.config.deprecated import DEPRECATED, DeprecatedFlag
from radixlm.config.option import names, options
from radixlm.config.values import coerce

logger = logging.getLogger(__name__)


def dashed(key: str) -> str:
    """ "page_size" -> "--page-size"."""
    return "--" + key.replace("_", "-")


def unknown(key: str, source: str) -> ConfigError:
    """The error for an option that nobody knows, with the nearest name."""
    known = [dashed(name) for name in (*names(), *DEPRECATED, "config")]
    return ConfigError(f"{source}{key} is unknown{suggestion(dashed(_plain(key)), known)}")


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def read_values(raw: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Name -> checked value of every key in ``raw`` (dashes or underscores, aliases, old names).

    ``source`` begins the message about an unknown key. ConfigError if a key is unknown, given
    twice under two names, or has a value that does not work.
    """
    values: dict[str, Any] = {}
    old: list[tuple[str, Any]] = []
    for key, value in raw.items():
        name = names().get(_plain(key))
        if name is None and _plain(key) in DEPRECATED:
            old.append((_plain(key), value))
            continue
        if name is None:
            raise unknown(key, source)
        if name in values:
            raise ConfigError(f"{source}{dashed(name)} is given twice, once as {key}")
        values[name] = coerce(options()[name], value)
    for key, value in old:
        _map_old(key, DEPRECATED[key], value, values)
    return values


def _map_old(key: str, renamed: DeprecatedFlag, value: Any, values: dict[str, Any]) -> None:
    """Set the option that the old flag stands for, with one warning line."""
    if value is False:
        return
    if not renamed.to:
        logger.warning("%s is gone: %s", dashed(key), renamed.note)
        return
    if renamed.like:
        value = values.get(renamed.like, options()[renamed.like].default)
    elif renamed.value is not None:
        value = renamed.value
    if renamed.to in values:
        logger.warning("%s is old and yields to %s", dashed(key), dashed(renamed.to))
        return
    logger.warning("%s is old: use %s %s", dashed(key), dashed(renamed.to), value)
    values[renamed.to] = coerce(options()[renamed.to], value)
