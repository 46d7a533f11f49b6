"""A flat mapping (command line, YAML, keyword arguments) to checked option values by name."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion
from radixlm.config.deprecated import DEPRECATED, DeprecatedFlag
from radixlm.config.foreign import of_others
from radixlm.config.newer import newer_flags, read_newer
from radixlm.config.option import names, options
from radixlm.config.values import coerce

logger = logging.getLogger(__name__)


def dashed(key: str) -> str:
    """ "page_size" -> "--page-size"."""
    return "--" + key.replace("_", "-")


def unknown(key: str, source: str, known: Iterable[str] = ()) -> ConfigError:
    """The error for an unknown option: what it is here if another engine has it, else the nearest
    name as ``key`` is spelled: a flag with dashes, or a key of YAML. ``known``: flags to choose
    from, all of a server's unless given."""
    if theirs := of_others(key):
        return ConfigError(f"{source}{key} is {theirs}")
    flags = list(known) or [
        dashed(one) for one in (*names(), *DEPRECATED, *newer_flags(), "config")
    ]
    if key.startswith("-") or "-" in key:
        word = key.replace("_", "-")
    else:
        word, flags = key, [one.replace("-", "_").removeprefix("__") for one in flags]
    if not key.startswith("-"):
        flags = [one.removeprefix("--") for one in flags]
    return ConfigError(f"{source}{key} is unknown{suggestion(word, flags)}")


def _underscored(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def read_values(raw: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Option name -> checked value of every key in ``raw`` (dashes, aliases, deprecated and newer
    names).

    ``source`` begins the message about an unknown key. ConfigError if a key is unknown, given
    twice under two names, or has a value that does not work.
    """
    values: dict[str, Any] = {}
    deprecated: list[tuple[str, Any]] = []
    newer: dict[str, tuple[str, Any]] = {}
    for key, value in raw.items():
        name = names().get(_underscored(key))
        if name is None and _underscored(key) in DEPRECATED:
            deprecated.append((_underscored(key), value))
            continue
        if name is None and _underscored(key) in newer_flags():
            newer |= {to: (key, new) for to, new in read_newer(_underscored(key), value).items()}
            continue
        if name is None:
            raise unknown(key, source)
        if name in values:
            raise ConfigError(f"{source}{dashed(name)} is given twice, once as {key}")
        values[name] = coerce(options()[name], value)
    for key, value in deprecated:
        _map_deprecated(key, DEPRECATED[key], value, values)
    for to, (key, value) in newer.items():
        value = coerce(options()[to], value)
        if values.setdefault(to, value) != value:
            raise ConfigError(f"{source}{dashed(to)} is given twice, once as {key}")
    return values


def _map_deprecated(key: str, flag: DeprecatedFlag, value: Any, values: dict[str, Any]) -> None:
    """Set the option that replaces a deprecated flag, with one warning."""
    if value is False:
        return
    if not flag.to:
        logger.warning("%s was removed: %s", dashed(key), flag.note)
        return
    if flag.like:
        value = values.get(flag.like, options()[flag.like].default)
    elif flag.value is not None:
        value = flag.value
    if flag.to in values:
        logger.warning("%s is deprecated and overridden by %s", dashed(key), dashed(flag.to))
        return
    logger.warning("%s is deprecated: use %s %s", dashed(key), dashed(flag.to), value)
    values[flag.to] = coerce(options()[flag.to], value)
