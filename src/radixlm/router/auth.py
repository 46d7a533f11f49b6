"""Auth: the key of the data routes, keys and tokens of the admin routes, and the audit log."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from radixlm.base.errors import Forbidden, TransferError, Unauthorized
from radixlm.base.lazy import require
from radixlm.base.record import Record
from radixlm.router.answer import Access
from radixlm.router.call import Call
from radixlm.router.options import Options, Role

audit = logging.getLogger("radixlm.audit")
logger = logging.getLogger(__name__)

_ALGORITHMS = ["RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "PS384", "PS512"]
_LEEWAY_S = 30
_KEYS_TTL_S = 3600.0
_KEYS_MIN_S = 10.0  # between two fetches for key ids that are not known
_ROLE_CLAIMS = ("role", "roles", "groups", "group")
_TIMEOUT_S = 10.0
_OWN_SITES = (b"none", b"same-origin")  # values of Sec-Fetch-Site


class Principal(Record):
    """Who asks. ``method``: "api_key" or "jwt"."""

    name: str
    role: Role
    method: str


def bearer(call: Call) -> str:
    """The key of ``Authorization: Bearer``, or of ``x-api-key`` (Anthropic's clients); or ""."""
    return _key(call.header(b"authorization"), call.header(b"x-api-key"))


def _key(authorization: bytes | None, other: bytes | None) -> str:
    scheme, _, key = (authorization or b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else (other or b"").decode("latin-1")


@functools.lru_cache(1024)
def _holder(authorization: bytes | None, other: bytes | None) -> str:
    """A name for who sends these headers; clients send the same ones with each request."""
    key = _key(authorization, other)
    return f"key-{_digest(key.encode('latin-1'))[:16].hex()}" if key else ""


class Auth:
    """Called with each request that is not open to all: returns None (come in), or an awaitable
    that does; Unauthorized or Forbidden otherwise. The keys of the control plane guard the admin
    routes alone; without them --api-key guards both."""

    def __init__(self, options: Options, fetch: Callable[..., Awaitable[Any]]) -> None:
        """ConfigError: tokens are asked for and PyJWT is missing."""
        self._api_key = options.api_key.encode() if options.api_key else None
        self._admin_keys = [
            (_digest(one.key.encode()), Principal(one.id, one.role, "api_key"))
            for one in options.admin_keys
        ]
        self._tokens = Tokens(options, fetch) if options.jwt_issuer else None
        self._origins = options.cors_allowed_origins
        self._own_names = {options.host.lower(), socket.gethostname().lower()}
        self._is_audited = options.control_plane_audit_enabled

    def __call__(self, call: Call, access: Access) -> Awaitable[None] | None:
        if access == "admin" and (self._admin_keys or self._tokens):
            return self._admin(call)
        if self._api_key is None:
            named = call.named  # a worker may check the key
            call.principal = _holder(named.get(b"authorization"), named.get(b"x-api-key"))
            call.is_admin = access == "admin"
            if call.is_admin:
                self._refuse_other_sites(call)
            return None
        if not hmac.compare_digest(bearer(call).encode("latin-1"), self._api_key):
            raise Unauthorized("the key is missing or wrong: send Authorization: Bearer KEY")
        call.principal, call.is_admin = "api-key", not (self._admin_keys or self._tokens)
        if access == "admin":
            self._log(call, Principal("api-key", "admin", "api_key"), "success")
        return None

    def _refuse_other_sites(self, call: Call) -> None:
        """Without a key anybody's page could add workers by the browser of a user who reaches this
        address: only pages of this origin and of --cors-allowed-origins may."""
        origin = (call.header(b"origin") or b"").decode("latin-1")
        host = (call.header(b"host") or b"").decode("latin-1")
        site = call.header(b"sec-fetch-site") or b"none"
        is_own = origin.partition("://")[2] == host if origin else site in _OWN_SITES
        if is_own and (origin or site != b"none"):  # a browser's: its page may have any name
            is_own = self._is_own_name(host)
        if not is_own and origin not in self._origins:
            raise Forbidden(
                "pages of other sites may not call this route: start with --cors-allowed-origins "
                "ORIGIN, or with --api-key"
            )

    def _is_own_name(self, host: str) -> bool:
        """Whether no stranger can point the name in a Host header at this address: an address, a
        name without a domain, or this machine's (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        is_local = "." not in name or name.endswith((".localhost", ".local"))
        return is_local or name in self._own_names

    async def _admin(self, call: Call) -> None:
        token, principal = bearer(call), None
        if token and self._tokens is not None and token.count(".") == 2:
            principal = await self._tokens.principal(token)
        digest = _digest(token.encode("latin-1"))
        for known, owner in self._admin_keys:
            if hmac.compare_digest(known, digest):
                principal = owner
        if principal is None:
            self._log(call, Principal("-", "user", "none"), "unauthorized")
            raise Unauthorized("the admin key or token is missing or wrong")
        call.principal, call.is_admin = principal.name, principal.role == "admin"
        if not call.is_admin:
            self._log(call, principal, "denied")
            raise Forbidden("Admin role required for control plane access")
        self._log(call, principal, "success")

    def _log(self, call: Call, who: Principal, outcome: str) -> None:
        if self._is_audited:
            audit.info(
                "%s %s %s: %s by %s (%s, %s) id %s",
                outcome,
                call.method,
                call.path,
                call.client,
                who.name,
                who.role,
                who.method,
                call.request_id,
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Tokens:
    """JSON web tokens of an OIDC issuer."""

    def __init__(self, options: Options, fetch: Callable[..., Awaitable[Any]]) -> None:
        """ConfigError where PyJWT is missing."""
        self._jwt: Any = require("jwt", "jwt", "--jwt-issuer")
        self._options, self._fetch = options, fetch
        self._roles = options.roles
        self._keys: dict[str, Any] = {}  # key id -> key
        self._read_s = -_KEYS_TTL_S

    async def principal(self, token: str) -> Principal | None:
        """Who shows ``token``; None if it is not valid."""
        jwt, options = self._jwt, self._options
        try:
            head = jwt.get_unverified_header(token)
            key = await self._key(str(head.get("kid", "")))
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=options.jwt_audience,
                issuer=options.jwt_issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp"]},
            )
        except (jwt.PyJWTError, TypeError, ValueError) as error:
            logger.info("a token was refused: %s", error)
            return None
        name = claims.get("sub") or claims.get("email") or "-"
        return Principal(str(name), self._role(claims), "jwt")

    def _role(self, claims: Mapping[str, Any]) -> Role:
        """The first role that counts; "user" where none does."""
        first = self._options.jwt_role_claim
        names = (first,) if first in claims else _ROLE_CLAIMS
        found: list[str] = []
        for name in names:
            value = claims.get(name)
            values = value if isinstance(value, list) else [value]
            found += [one for one in values if isinstance(one, str)]
        if self._roles:
            return next((self._roles[one] for one in found if one in self._roles), "user")
        return "admin" if "admin" in (one.lower() for one in found) else "user"

    async def _key(self, key_id: str) -> Any:
        """The issuer's key; asked for anew when it is not known or an hour is over."""
        age_s = time.monotonic() - self._read_s
        if age_s > _KEYS_TTL_S or (key_id not in self._keys and age_s > _KEYS_MIN_S):
            try:
                await self._read_keys()
            except (TransferError, OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("the keys of %s cannot be read: %r", self._options.jwt_issuer, error)
        if not key_id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _read_keys(self) -> None:
        self._read_s = time.monotonic()
        uri = self._options.jwt_jwks_uri
        if uri is None:
            issuer = (self._options.jwt_issuer or "").rstrip("/")
            uri = str((await self._json(f"{issuer}/.well-known/openid-configuration"))["jwks_uri"])
        keys = {}
        for key in (await self._json(uri))["keys"]:
            if not isinstance(key, dict):
                continue
            try:
                keys[str(key.get("kid", ""))] = self._jwt.PyJWK(key).key
            except self._jwt.PyJWTError as error:
                logger.info("a key of the issuer is of no use: %s", error)
        self._keys = keys

    async def _json(self, uri: str) -> dict[str, Any]:
        scheme, _, rest = uri.partition("://")
        host, slash, path = rest.partition("/")
        url = f"{scheme}://{host}"
        response = await self._fetch(url, "GET", slash + path or "/", timeout_s=_TIMEOUT_S)
        value = orjson.loads(response.body) if response.status == 200 else None
        if not isinstance(value, dict):
            raise ValueError(f"{uri} answered {response.status} and no JSON object")
        return value
