"""RouterArgs: the gateway's options as sglang-router's dataclass, made from our table of flags."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.config.option import Option
from radixlm.config.parser import argument_settings, help_text
from radixlm.router.options import Options, read, read_environment, table

logger = logging.getLogger(__name__)

# flag -> field, where they differ
FIELDS = {
    "prefill": "prefill_urls",
    "decode": "decode_urls",
    "tls_cert_path": "server_cert_path",
    "tls_key_path": "server_key_path",
}
UNSET = (
    "log_level prometheus_port prometheus_host prometheus_duration_buckets request_id_headers"
).split()
"""Fields that are None in a RouterArgs that is made by hand."""
PAIRS = ("selector", "prefill_selector", "decode_selector", "jwt_role_mapping")


def _pairs(texts: Any) -> dict[str, str]:
    """["a=b", "c=d"] or ["a=b c=d"] -> {"a": "b", "c": "d"}."""
    split = [part.partition("=") for text in texts or () for part in text.split()]
    return {key: value for key, equals, value in split if equals}


def _prefill_urls(lists: Any) -> list[tuple[str, int | None]]:
    """[[url, port or "none"], [url]] -> [(url, port or None)]."""
    found: list[tuple[str, int | None]] = []
    for url, *rest in lists or ():
        port = rest[0] if rest else "none"
        if port.lower() != "none" and not port.isdigit():
            raise ValueError(f"Invalid bootstrap port: {port}. Must be a number or 'none'")
        found.append((url, int(port) if port.isdigit() else None))
    return found


def _decode_urls(lists: Any) -> list[str]:
    """[[url], [url]] -> [url, url]."""
    return [url for (url,) in lists or ()]


def _role(text: str) -> str:
    if text.lower() not in ("admin", "user"):
        raise ValueError(f"Invalid role: '{text}'. Must be 'admin' or 'user'")
    return text.lower()


def _api_keys(texts: Any) -> list[tuple[str, str, str, str]]:
    """["id:name:role:key"] -> [(id, name, key, role)]."""
    found = []
    for text in texts or ():
        parts = text.split(":", 3)
        if len(parts) != 4:
            raise ValueError(f"Invalid API key format: '{text}'. Expected 'id:name:role:key'")
        found.append((parts[0], parts[1], parts[3], _role(parts[2])))
    return found


def _role_mapping(texts: Any) -> dict[str, str]:
    """["theirs=admin"] -> {"theirs": "admin"}."""
    split = [text.partition("=") for text in texts or ()]
    for theirs, equals, _ in split:
        if not equals:
            raise ValueError(
                f"Invalid role mapping format: '{theirs}'. Expected 'idp_role=gateway_role'"
            )
    return {theirs: _role(ours) for theirs, _, ours in split}


class _Methods:
    """What RouterArgs does besides holding values."""

    _parse_selector = staticmethod(_pairs)
    _parse_prefill_urls = staticmethod(_prefill_urls)
    _parse_decode_urls = staticmethod(_decode_urls)
    _parse_control_plane_api_keys = staticmethod(_api_keys)
    _parse_jwt_role_mapping = staticmethod(_role_mapping)

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser,
        use_router_prefix: bool = False,
        exclude_host_port: bool = False,
    ) -> None:
        """Add all flags to ``parser``; with the prefix, all but --worker-urls begin with
        "--router-"."""
        groups: dict[str, Any] = {}
        environment = read_environment()
        for name, one in table().items():
            if exclude_host_port and name in ("host", "port"):
                continue
            if one.group not in groups:
                groups[one.group] = parser.add_argument_group(one.group.rstrip("."))
            prefix = "router-" * (use_router_prefix and name not in ("host", "port", "worker_urls"))
            words = [w.replace("--", "--" + prefix, 1) for w in (one.dashed, *one.flag.aliases)]
            dest = prefix.replace("-", "_") + name
            default = environment.get(name, _plain(one))
            groups[one.group].add_argument(
                *words, dest=dest, default=default, help=help_text(one), **_settings(one)
            )

    @classmethod
    def from_cli_args(cls, args: Any, use_router_prefix: bool = False) -> Any:
        """Of what a parser with these flags has read."""
        given, values = vars(args), {}
        prefix = "router_" if use_router_prefix else ""
        for name in table():
            key = prefix + name if prefix + name in given else name
            field = FIELDS.get(name, name)
            value = given.get(key)
            if field in _READERS:
                value = given.get(prefix + name)
                values[field] = value if isinstance(value, dict) else _READERS[field](value)
            elif key in given:
                values[field] = value
        return cls(**values)

    def _validate_router_args(self) -> None:
        """Say which policy counts where."""
        if not self.pd_disaggregation:  # type: ignore[attr-defined]
            return
        prefill, decode, policy = self.prefill_policy, self.decode_policy, self.policy  # type: ignore[attr-defined]
        if prefill and decode:
            logger.warning(
                "Both --prefill-policy and --decode-policy are specified. The main --policy flag "
                "will be ignored for PD mode."
            )
        elif prefill or decode:
            of_prefill = "--prefill-policy" if prefill else "--policy"
            of_decode = "--decode-policy" if decode else "--policy"
            logger.info(
                f"Using {of_prefill} '{prefill or policy}' for prefill nodes and "
                f"{of_decode} '{decode or policy}' for decode nodes."
            )


_READERS: dict[str, Callable[[Any], Any]] = {
    "prefill_urls": _prefill_urls,
    "decode_urls": _decode_urls,
    "selector": _pairs,
    "prefill_selector": _pairs,
    "decode_selector": _pairs,
    "control_plane_api_keys": _api_keys,
    "jwt_role_mapping": _role_mapping,
}


def _plain(one: Option) -> Any:
    """An option's default as a flag's: lists for tuples."""
    if one.flag.is_repeatable or one.name == "request_id_headers":
        return None
    return list(one.default) if one.is_many else one.default


def _settings(one: Option) -> dict[str, Any]:
    """The keywords of ``add_argument``, with types and choices that argparse itself checks."""
    settings = argument_settings(one)
    if one.kind is not bool:
        settings |= {"type": one.kind, "choices": one.flag.allowed or None}
    if one.is_many and not one.flag.is_repeatable:
        settings["action"] = "extend"
    if one.name in ("prefill", "decode", "encode"):
        settings |= {"nargs": "+" if one.name == "prefill" else 1}
    return settings


def _field(one: Option) -> tuple[str, Any, Any]:
    """(name, type, default) of the dataclass's field."""
    name = FIELDS.get(one.name, one.name)
    if name in UNSET:
        return name, Any, None
    if name in PAIRS:
        return name, dict, dataclasses.field(default_factory=dict)
    if one.is_many:
        return name, list, dataclasses.field(default_factory=lambda: list(one.default))
    return name, one.kind, one.default


RouterArgs: Any = dataclasses.make_dataclass(
    "RouterArgs",
    [_field(one) for one in table().values()],
    bases=(_Methods,),
    namespace={"__module__": __name__},
)


def to_options(fields: dict[str, Any]) -> Options:
    """The gateway's options of a RouterArgs' fields; ConfigError names the flag."""
    flags = {field: flag for flag, field in FIELDS.items()}
    raw: dict[str, Any] = {}
    for field, value in fields.items():
        name = flags.get(field, field)
        if value is None or name not in table():
            continue
        if field == "prefill_urls":
            value = [url if port is None else f"{url} {port}" for url, port in value]
        elif field == "control_plane_api_keys":
            value = [f"{key_id}:{label}:{role}:{key}" for key_id, label, key, role in value]
        elif isinstance(value, dict):
            value = [f"{key}={text}" for key, text in value.items()]
        if value != []:
            raw[name] = value
    return read(raw)


def parse_args(argv: Sequence[str], parser: argparse.ArgumentParser) -> Any:
    """``argv`` as a RouterArgs; SystemExit for flags that cannot be."""
    RouterArgs.add_cli_args(parser)
    try:
        return RouterArgs.from_cli_args(parser.parse_args(argv))
    except ConfigError as error:
        parser.error(str(error))
