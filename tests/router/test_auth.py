"""Keys, roles, tokens and the audit log."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import pytest

from radixlm.base.errors import Forbidden, Unauthorized
from radixlm.router.answer import Access
from radixlm.router.auth import Auth
from radixlm.router.call import Call
from radixlm.router.options import Options
from tests.router.fakes import Servers

KEYS = ("1:Root:admin:top", "2:Reader:user:low")


async def _ask(auth: Auth, access: Access, key: str = "", header: bytes = b"authorization") -> Call:
    value = key.encode() if header == b"x-api-key" else b"Bearer " + key.encode()
    call = Call("GET", "/workers", "", [(header, value)] if key else [], b"", "1.2.3.4")
    if check := auth(call, access):
        await check
    return call


async def test_without_keys_all_come_in() -> None:
    auth = Auth(Options(), Servers().fetch)
    assert (await _ask(auth, "key")).principal == ""
    assert (await _ask(auth, "admin")).is_admin


async def test_clients_of_workers_with_keys_are_told_apart() -> None:
    auth = Auth(Options(), Servers().fetch)
    names = [(await _ask(auth, "key", key)).principal for key in ("a", "b", "a")]
    assert names[0] == names[2] != names[1] and all(len(name) == 36 for name in names)


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, True),
        ({"origin": "http://gw:3"}, True),
        ({"origin": "http://panel"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://evil"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
async def test_pages_of_other_sites_may_not_administer(headers: dict[str, str], may: bool) -> None:
    auth = Auth(Options(cors_allowed_origins=("http://panel",)), Servers().fetch)
    stated = headers | {"host": "gw:3"}
    sent = [(name.encode(), value.encode()) for name, value in stated.items()]
    call = Call("POST", "/workers", "", sent, b"{}")
    assert auth(call, "key") is None
    if may:
        assert auth(call, "admin") is None
    else:
        with pytest.raises(Forbidden, match="--cors-allowed-origins"):
            auth(call, "admin")


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1:3", True),
        ("[::1]:3", True),
        ("localhost", True),
        ("gw.example.org", True),
        ("evil.example.com:3", False),
        ("[evil", False),
    ],
)
async def test_a_strangers_name_for_this_address_is_no_own_page(host: str, may: bool) -> None:
    auth = Auth(Options(host="gw.example.org"), Servers().fetch)
    for page in ((b"origin", f"http://{host}".encode()), (b"sec-fetch-site", b"same-origin")):
        call = Call("POST", "/workers", "", [(b"host", host.encode()), page], b"{}")
        with nullcontext() if may else pytest.raises(Forbidden):
            auth(call, "admin")


async def test_one_key_guards_both() -> None:
    auth = Auth(Options(api_key="k"), Servers().fetch)
    accesses: tuple[Access, ...] = ("key", "admin")
    for access in accesses:
        for wrong in ("", "K", "kk"):
            with pytest.raises(Unauthorized):
                await _ask(auth, access, wrong)
        assert (await _ask(auth, access, "k")).principal == "api-key"
    await _ask(auth, "key", "k", b"x-api-key")
    await _ask(Auth(Options(api_key="schlüssel"), Servers().fetch), "key", "schlüssel")


async def test_admin_keys_guard_the_admin_routes_alone(caplog: pytest.LogCaptureFixture) -> None:
    options = Options(control_plane_api_keys=KEYS, control_plane_audit_enabled=True, api_key="k")
    auth = Auth(options, Servers().fetch)
    assert not (await _ask(auth, "key", "k")).is_admin  # nor its priority "system"
    with caplog.at_level(logging.INFO, "radixlm.audit"):
        with pytest.raises(Unauthorized):
            await _ask(auth, "admin", "k")
        with pytest.raises(Forbidden, match="Admin role required"):
            await _ask(auth, "admin", "low")
        call = await _ask(auth, "admin", "top")
    assert (call.principal, call.is_admin) == ("1", True)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in said] == ["unauthorized", "denied", "success"]
    assert "by 2 (user, api_key)" in said[1] and "GET /workers" in said[2]
    assert not any(key in line for line in said for key in ("top", "low"))


async def test_with_admin_keys_alone_the_data_routes_are_open() -> None:
    await _ask(Auth(Options(control_plane_api_keys=KEYS), Servers().fetch), "key")


class Issuer:
    """An OIDC issuer with one key."""

    url = "https://id.example"

    def __init__(self) -> None:
        rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
        self.jwt = pytest.importorskip("jwt")
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.servers = Servers()
        self.servers.answers[self.url, "/.well-known/openid-configuration"] = {
            "jwks_uri": f"{self.url}/keys"
        }
        self.publish("one")

    def publish(self, key_id: str) -> None:
        public = self.jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        keys = {"keys": [public | {"kid": key_id, "alg": "RS256"}, {"kid": "odd", "kty": "x"}]}
        self.servers.answers[self.url, "/keys"] = keys

    def token(self, key_id: str = "one", **claims: Any) -> str:
        stated = {"iss": self.url, "aud": "gateway", "sub": "me", "exp": time.time() + 60}
        head = {"kid": key_id}
        return str(self.jwt.encode(stated | claims, self.key, algorithm="RS256", headers=head))

    def auth(self, **options: Any) -> Auth:
        stated = {"jwt_issuer": self.url, "jwt_audience": "gateway"} | options
        return Auth(Options(**stated), self.servers.fetch)


@pytest.mark.parametrize(
    ("claims", "options", "is_admin"),
    [
        ({"roles": ["reader", "Admin"]}, {}, True),
        ({"groups": "admin"}, {}, True),
        ({"roles": "user", "groups": "admin"}, {}, False),
        ({}, {}, False),
        ({"roles": "Boss"}, {"jwt_role_mapping": ("Boss=admin",)}, True),
        ({"roles": "admin"}, {"jwt_role_mapping": ("Boss=admin",)}, False),
        ({"scope": "admin"}, {"jwt_role_claim": "scope"}, True),
    ],
)
async def test_a_tokens_role_decides(
    claims: dict[str, Any], options: dict[str, Any], is_admin: bool
) -> None:
    issuer = Issuer()
    asking = _ask(issuer.auth(**options), "admin", issuer.token(**claims))
    if is_admin:
        assert (await asking).principal == "me"
    else:
        with pytest.raises(Forbidden):
            await asking


async def test_wrong_tokens_are_refused() -> None:
    issuer, other = Issuer(), Issuer()
    auth = issuer.auth()
    stale = time.time() - 3600
    for token in (
        issuer.token(roles="admin", exp=stale),
        issuer.token(roles="admin", aud="another"),
        issuer.token(roles="admin", iss="https://evil"),
        issuer.token("unknown", roles="admin"),
        other.token(roles="admin"),
        issuer.jwt.encode({"roles": "admin"}, "s" * 64, algorithm="HS256", headers={"kid": "one"}),
        "a.b.c",
    ):
        with pytest.raises(Unauthorized):
            await _ask(auth, "admin", token)
    await _ask(auth, "admin", issuer.token(roles="admin"))


async def test_new_keys_of_the_issuer_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer()
    auth = issuer.auth()
    await _ask(auth, "admin", issuer.token(roles="admin"))
    issuer.publish("two")
    now_s = time.monotonic()
    monkeypatch.setattr("radixlm.router.auth.time.monotonic", lambda: now_s + 11)
    await _ask(auth, "admin", issuer.token("two", roles="admin"))
    asked = len(issuer.servers.asked)
    for _ in range(5):  # an unknown key id makes no flood of fetches
        with pytest.raises(Unauthorized):
            await _ask(auth, "admin", issuer.token("three", roles="admin"))
    assert len(issuer.servers.asked) == asked


@pytest.mark.parametrize("odd", [{}, {"keys": None}, {"keys": [3]}, {"keys": 3}])
@pytest.mark.parametrize("path", ["/keys", "/.well-known/openid-configuration"])
async def test_odd_answers_of_the_issuer_refuse(path: str, odd: object) -> None:
    issuer = Issuer()
    issuer.servers.answers[issuer.url, path] = odd
    with pytest.raises(Unauthorized):
        await _ask(issuer.auth(), "admin", issuer.token(roles="admin"))
