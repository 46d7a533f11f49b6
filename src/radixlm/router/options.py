"""The gateway's options: command line -> checked ``Options``. No flag is written twice."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion
from radixlm.base.record import Record
from radixlm.config.option import Option, option
from radixlm.config.parser import OptionParser, argument_error, argument_settings, help_text
from radixlm.config.states import is_set, unbuilt_reason
from radixlm.config.values import coerce
from radixlm.router.flags import Flags

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "oracle_wallet_path": "ATP_WALLET_PATH",
    "oracle_tns_alias": "ATP_TNS_ALIAS",
    "oracle_connect_descriptor": "ATP_DSN",
    "oracle_username": "ATP_USER",
    "oracle_password": "ATP_PASSWORD",
    "oracle_pool_min": "ATP_POOL_MIN",
    "oracle_pool_max": "ATP_POOL_MAX",
    "oracle_pool_timeout_secs": "ATP_POOL_TIMEOUT_SECS",
    "postgres_db_url": "POSTGRES_DB_URL",
    "postgres_pool_max": "POSTGRES_POOL_MAX",
    "redis_url": "REDIS_URL",
    "redis_pool_max": "REDIS_POOL_MAX",
    "redis_retention_days": "REDIS_RETENTION_DAYS",
    "jwt_issuer": "JWT_ISSUER",
    "jwt_audience": "JWT_AUDIENCE",
    "jwt_jwks_uri": "JWT_JWKS_URI",
}
"""Option -> environment variable that sets it where its flag is not given."""

Role = Literal["admin", "user"]


class AdminKey(Record):
    """A key of the admin routes."""

    id: str
    name: str
    role: Role
    key: str


class Options(Flags):
    """All options, checked; flat: ``options.policy``."""

    @property
    def prefill_urls(self) -> tuple[tuple[str, int | None], ...]:
        """(URL, bootstrap port) of each --prefill."""
        return tuple(_prefill(text) for text in self.prefill)

    @property
    def admin_keys(self) -> tuple[AdminKey, ...]:
        """--control-plane-api-keys, read."""
        return tuple(_admin_key(text) for text in self.control_plane_api_keys)

    @property
    def roles(self) -> dict[str, Role]:
        """--jwt-role-mapping, read: a role of the issuer -> ours."""
        split = (text.partition("=") for text in self.jwt_role_mapping)
        return {theirs: _role("--jwt-role-mapping", ours) for theirs, _, ours in split}

    @property
    def aliases(self) -> dict[str, str]:
        """--model-alias, read: a further name -> the model's."""
        split = (text.partition("=") for text in self.model_alias)
        return {alias: model for alias, _, model in split}

    @property
    def num_tries(self) -> int:
        """Tries of a request in all."""
        return 1 if self.disable_retries else self.retry_max_retries

    def pairs(self, name: str) -> dict[str, str]:
        """The "key=value" texts of an option; one text may hold several, with spaces between."""
        split = [part.partition("=") for text in getattr(self, name) for part in text.split()]
        return {key: value for key, equals, value in split if equals}


@cache
def table() -> Mapping[str, Option]:
    """Name -> option, in the order of the groups."""
    defaults, known = Flags(), {}
    for group in reversed(Flags.__mro__[: Flags.__mro__.index(Record)]):
        for name, annotated in group.__annotations__.items():
            known[name] = option(group.__doc__ or "", name, annotated, getattr(defaults, name))
    return known


def add_arguments(
    parser: argparse.ArgumentParser, prefix: str = "", *, without: Sequence[str] = ()
) -> None:
    """Add every flag but those in ``without`` to ``parser``; values stay text. ``prefix``:
    "router-" where a server's flags stand beside them."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, one in table().items():
        if name in without:
            continue
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group.rstrip("."))
        words = (one.dashed, *one.flag.aliases)
        groups[one.group].add_argument(
            *(word.replace("--", "--" + prefix, 1) for word in words),
            dest=prefix.replace("-", "_") + name,
            default=argparse.SUPPRESS,
            help=help_text(one),
            **_settings(one),
        )


def _settings(one: Option) -> dict[str, Any]:
    """As a server's options, but --prefill takes a port besides, and a list that is given again
    adds to what it has."""
    settings = argument_settings(one)
    if one.is_many and not one.flag.is_repeatable:
        settings["action"] = "extend"
    return settings | ({"nargs": "+"} if one.name == "prefill" else {})


def read_environment() -> dict[str, Any]:
    """Values of the options that environment variables set."""
    return {
        name: coerce(table()[name], os.environ[variable])
        for name, variable in ENVIRONMENT.items()
        if os.environ.get(variable)
    }


def read(raw: Mapping[str, Any]) -> Options:
    """Raw values by name -> checked options, with those of the environment; ConfigError with the
    flag and a value that works."""
    values = read_environment()
    for name, value in raw.items():
        if name not in table():
            near = suggestion(name, table())
            raise ConfigError(f"the gateway has no option {name!r}{near}")
        if name in ("prefill", "encode"):
            value = [one if isinstance(one, str) else " ".join(map(str, one)) for one in value]
        values[name] = coerce(table()[name], value)
    options = Options(**values)
    check(options)
    return options


def parse(argv: Sequence[str], prog: str = "radixlm router") -> Options:
    """The options of a command line. ``-h`` prints the help and exits with 0."""
    parser = OptionParser(prog=prog, usage=f"{prog} [--worker-urls URL ...] [options]")
    add_arguments(parser)
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise argument_error(error, table()) from error
    for word in rest:
        flag = word.partition("=")[0]
        flags = [name for one in table().values() for name in (one.dashed, *one.flag.aliases)]
        what = "the flag " if word.startswith("-") else "the argument "
        raise ConfigError(f"{what}{flag} is unknown{suggestion(flag, flags)}")
    return read(vars(known))


def check(options: Options) -> None:
    """ConfigError for options that do not fit together or are not built; a log line for each
    that has no effect."""
    problems = [
        reason
        for name, one in table().items()
        if not _is_idle(one, options) and (reason := unbuilt_reason(one, getattr(options, name)))
    ]
    problems += _problems(options)
    if problems:
        raise ConfigError("\n".join(problems))
    for name, one in table().items():
        if one.flag.state == "no-op" and is_set(one, getattr(options, name)):
            logger.warning("%s has no effect: %s", one.dashed, one.flag.why)


def _is_idle(one: Option, options: Options) -> bool:
    parents = one.flag.part_of
    return bool(parents) and not any(getattr(options, name) for name in parents)


def _problems(options: Options) -> Iterator[str]:
    """What does not fit together."""
    yield from _worker_problems(options)
    for one, other in (
        ("tls_cert_path", "tls_key_path"),
        ("client_cert_path", "client_key_path"),
        ("jwt_issuer", "jwt_audience"),
    ):
        if (getattr(options, one) is None) != (getattr(options, other) is None):
            yield f"{table()[one].dashed} and {table()[other].dashed} belong together: give both"
    if options.retry_max_backoff_ms < options.retry_initial_backoff_ms:
        yield (
            f"--retry-max-backoff-ms {options.retry_max_backoff_ms} is below "
            f"--retry-initial-backoff-ms {options.retry_initial_backoff_ms}; 30000 works"
        )
    if options.queue_size and not options.queue_timeout_secs:
        yield "--queue-timeout-secs 0 fits --queue-size 0 only; 60 works"
    if not options.health_check_endpoint.startswith("/"):
        yield "--health-check-endpoint begins with a slash: /health works"
    if options.launch_servers:
        yield "--launch-servers stands in the command line of radixlm router only"
    if (options.prefill or options.decode) and not options.pd_disaggregation:
        yield "--prefill and --decode need --pd-disaggregation"
    if options.api_key == "":
        yield "--api-key is empty; leave it out, or give --api-key KEY"
    yield from _discovery_problems(options)
    yield from _history_problems(options)
    _ = options.admin_keys, options.roles  # both raise for what does not fit


def _worker_problems(options: Options) -> Iterator[str]:
    flags = {"--worker-urls": options.worker_urls, "--decode": options.decode}
    flags["--prefill"] = tuple(url for url, _ in options.prefill_urls)
    for flag, urls in flags.items():
        for url in urls:
            if problem := url_problem(re.sub(r"@\d+$", "", url)):  # a rank may be named
                yield f"{flag}: {problem}"
    for text in options.model_alias:
        alias, _, model = text.partition("=")
        if not alias or not model or alias == model:
            yield f"--model-alias: {text!r} is none; gpt-4=radix-tiny works"


def _discovery_problems(options: Options) -> Iterator[str]:
    if not options.service_discovery:
        return
    if options.backend == "openai":
        yield "--service-discovery finds no OpenAI endpoints: leave out --backend openai"
    if options.pd_disaggregation and not (options.prefill_selector or options.decode_selector):
        yield "--service-discovery with --pd-disaggregation needs --prefill-selector app=prefill"
    if not options.pd_disaggregation and not options.selector:
        yield "--service-discovery needs --selector, such as app=worker"


def _history_problems(options: Options) -> Iterator[str]:
    needs = {
        "redis": ("redis_url",),
        "postgres": ("postgres_db_url",),
        "oracle": ("oracle_username", "oracle_password"),
    }
    for name in needs.get(options.history_backend, ()):
        if not getattr(options, name):
            variable = ENVIRONMENT[name]
            yield (
                f"--history-backend {options.history_backend} needs {table()[name].dashed} "
                f"(or the environment variable {variable})"
            )
    is_oracle = options.history_backend == "oracle"
    if is_oracle and not (options.oracle_tns_alias or options.oracle_connect_descriptor):
        yield "--history-backend oracle needs --oracle-connect-descriptor or --oracle-tns-alias"
    if options.oracle_pool_max < options.oracle_pool_min:
        yield "--oracle-pool-max is below --oracle-pool-min; 16 works"


def url_problem(url: str) -> str:
    """Why ``url`` is none of a worker, or ""."""
    works = "http://127.0.0.1:30001 works"
    if url.startswith("grpc://"):
        return f"{url!r}: workers speak HTTP; {works}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        (parts.hostname or "").encode("idna")  # what is looked up; UnicodeError is a ValueError
    except ValueError:
        is_good = False
    if not is_good or any(c <= " " for c in url):
        return f"{url!r} is no URL of a worker; {works}"
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        return f"{url!r}: a worker's URL is scheme, host and port alone; {works}"
    return ""


def _prefill(text: str) -> tuple[str, int | None]:
    """ "http://host:port 8998" -> (URL, port)."""
    url, *rest = text.split()
    if not rest or rest[0].lower() == "none":
        return url, None
    if len(rest) > 1 or not rest[0].isdigit() or not 0 < int(rest[0]) < 65536:
        wrong = " ".join(rest)
        raise ConfigError(f"--prefill: {wrong!r} is no bootstrap port; 8998 or none works")
    return url, int(rest[0])


def _role(flag: str, text: str) -> Role:
    if text.lower() not in ("admin", "user"):
        raise ConfigError(f"{flag}: {text!r} is no role; admin and user are")
    return cast(Role, text.lower())


def _admin_key(text: str) -> AdminKey:
    parts = text.split(":", 3)
    if len(parts) != 4 or not parts[3]:
        raise ConfigError("--control-plane-api-keys: a key has the form id:name:role:key")
    return AdminKey(parts[0], parts[1], _role("--control-plane-api-keys", parts[2]), parts[3])
