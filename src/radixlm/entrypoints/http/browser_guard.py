"""What web pages may ask of the server.

A browser lets any page send requests to a server that its user can reach. Such requests carry no
API key, but they reach a server that needs none, so a page is told by what browsers add: the name
in ``Host``, which a page can point at any address, ``Origin`` and ``Sec-Fetch-Site``.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from radixlm.base.env import VERTEX_ROUTE
from radixlm.base.errors import Forbidden, InvalidRequest
from radixlm.config.serve import ServeConfig

Headers = Mapping[bytes, bytes]

# What computes an answer and keeps nothing that others could read: open to pages of any origin with
# --cors-allowed-origins *. Every path that is not here is closed to them.
INFERENCE_PATHS = frozenset(
    "/ /health /ready /health_generate /ping /v1/health /openapi.json "
    "/generate /generate_from_file /encode /classify /invocations "
    "/v1/fim/completions /v1/completions /v1/chat/completions "
    "/v1/responses /v1/responses/input_tokens "
    "/v1/responses/compact /chat/completions/input_tokens /v1/chat/completions/input_tokens "
    "/v1/embeddings /v1/classify /pooling /score /v1/score /v2/embed "
    "/v1/rerank /rerank /v2/rerank /reranking /v1/reranking "
    "/v1/messages /v1/messages/count_tokens /v1/audio/transcriptions /v1/audio/translations "
    "/tokenize /v1/tokenize /detokenize /v1/detokenize /parse_function_call /separate_reasoning "
    "/v1/models /get_model_info /model_info "
    "/api/chat /api/generate /api/tags /api/ps /api/show /api/pull /api/version /api/embed "
    "/api/embeddings /generate_stream /info /embed /similarity /completion /infill /apply-template "
    "/v1/chat/completions/batch /v1/chat/completions/render /v1/completions/render".split()
)
# not of administrators, but they change what other requests meet
SHARED_STATE_PATHS = frozenset(("/abort_request", "/open_session", "/close_session"))
LOOPBACK_NAMES = frozenset({"127.0.0.1", "::1", "localhost"})
# names that nobody can register, so that no page of the internet has one
_PRIVATE_ENDINGS = tuple(
    ".localhost .local .internal .lan .home.arpa .home .corp .intranet .localdomain .svc".split()
)
# operators' routes whose bodies, of these types, are written to files as they come: of any size
STREAMED = {"/update_weights_from_tensor": (b"application/octet-stream", b"multipart/form-data")}
_READS = ("GET", "HEAD")


class BrowserGuard:
    """Refuses what a page of another site may not ask."""

    def __init__(self, serve: ServeConfig, needs_key: bool, changing: frozenset[str]) -> None:
        """``needs_key``: requests without a key fail anyway, so the Host may be any (of a proxy).
        ``changing``: paths that change the server."""
        self._changing = changing | SHARED_STATE_PATHS
        self._origins = origins_of(serve.cors_allowed_origins)
        self._hosts = {name.lower() for name in _items(serve.allowed_hosts or "")}
        self._checks_host = not needs_key and "*" not in self._hosts
        self._hosts |= {serve.host.lower(), socket.gethostname().lower()}
        self._is_local = serve.host in LOOPBACK_NAMES
        if self._checks_host:  # DNS may take seconds
            threading.Thread(target=self._add_full_name, name="full host name", daemon=True).start()

    def _add_full_name(self) -> None:
        self._hosts.add(socket.getfqdn().lower())

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Forbidden or InvalidRequest for what is refused. ``path`` has no slash at its end."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._checks_host and not self._is_known(host):
            raise Forbidden(
                f"this server is not reached as {host[:200]!r}: "
                f"start with --allowed-hosts {host_name(host)[:200]}"
            )
        if not self._may_call(path, headers, host):
            raise Forbidden(
                "pages of other sites may not call this route: "
                "start with --cors-allowed-origins ORIGIN"
            )
        if path not in self._changing:
            return
        if method in _READS and _is_browser(headers):
            raise Forbidden("a browser's GET changes nothing here: send a POST")
        is_known = _is_json(headers) or is_streamed(path, headers)
        if method not in _READS and _has_body(headers) and not is_known:
            kind = headers.get(b"content-type", b"").decode("latin-1")
            raise InvalidRequest(
                f"Content-Type must be application/json, not {kind[:80]!r}", "Content-Type"
            )

    def _is_known(self, host: str) -> bool:
        """Whether ``Host`` names this server, and not a name that points at its address."""
        name = host_name(host)
        if not name or name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            is_private = "." not in name or name.endswith(_PRIVATE_ENDINGS)
            return is_private and not self._is_local
        # to call 0.0.0.0 is to call this machine
        return address.is_loopback or address.is_unspecified or not self._is_local

    def _may_call(self, path: str, headers: Headers, host: str) -> bool:
        origin = headers.get(b"origin", b"").decode("latin-1").lower().rstrip("/")
        if origin:
            if host and origin.partition("://")[2] == host:
                return True
        elif headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin"):
            return True
        if "*" in self._origins:
            return is_inference(path)
        return origin in self._origins


class InferenceCors:
    """CORS headers for any origin, on the routes of inference only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._cors = _cors(app, ["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and is_inference(scope["path"].rstrip("/") or "/")
        await (self._cors if is_open else self._app)(scope, receive, send)


def _cors(app: ASGIApp, origins: list[str]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-RadixLM-Ignored", "X-RadixLM-Warning", "Retry-After"],
    )


def with_cors(app: ASGIApp, option: str) -> ASGIApp:
    """``app`` with the CORS headers that --cors-allowed-origins asks for."""
    origins = origins_of(option)
    if "*" in origins:
        return InferenceCors(app)
    if not origins:
        return app
    return _cors(app, sorted(origins))


def origins_of(option: str) -> frozenset[str]:
    """The origins that --cors-allowed-origins lists; none for "none"."""
    return frozenset(item.lower().rstrip("/") for item in _items(option)) - {"none"}


def is_inference(path: str) -> bool:
    """Whether pages of any origin may call the path."""
    known = path in INFERENCE_PATHS or path.startswith("/v1/models/")
    return known or path == VERTEX_ROUTE.get()


def host_name(host: str) -> str:
    """``Host`` without its port and the dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host.rpartition(":")[0] if host.count(":") == 1 else host
    return name.rstrip(".")


def _items(option: str) -> list[str]:
    return [item.strip() for item in option.split(",") if item.strip()]


def _is_browser(headers: Headers) -> bool:
    has_mark = any(name in headers for name in (b"origin", b"sec-fetch-site", b"sec-fetch-mode"))
    return has_mark or headers.get(b"user-agent", b"").lower().startswith(b"mozilla/")


def is_streamed(path: str, headers: Headers) -> bool:
    """Whether the body is one of STREAMED. A page may not send it: it could send a form to any
    server."""
    kinds = STREAMED.get(path.rstrip("/"))
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kinds is not None and kind in kinds and not _is_browser(headers)


def _has_body(headers: Headers) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _is_json(headers: Headers) -> bool:
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
