"""The page at /ui: static files with an ETag, gzip, and headers that forbid all but its own origin.

``answer`` knows no framework, so that the gateway serves the same files.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

import radixlm
from radixlm import __version__
from radixlm.base.record import Record
from radixlm.config.serve import ServeConfig
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.root_path import prefix_of
from radixlm.entrypoints.http.state import state_of

router = APIRouter(tags=["info"], include_in_schema=False)
FOLDER = Path(radixlm.__file__).parent / "assets" / "ui"
FAVICON = "/favicon.ico"
_VIEWS = {"/ui": "ui/", "/docs": "ui/#/docs"}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".txt": "text/plain"}
_TYPES |= {".svg": "image/svg+xml", ".json": "application/json", ".woff2": "font/woff2"}
_MIN_GZIP = 512
# media are data and blob URLs; a model's answer cannot make the browser ask another origin
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Asset(Record):
    """A file of the page; ``packed``: its bytes by gzip, None where that saves nothing."""

    content: bytes
    packed: bytes | None
    etag: str
    media_type: str


Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


def asset(name: str) -> Asset | None:
    """The file ``name`` below assets/ui; None where there is none."""
    return _read(name) if name in _names() else None  # names of requests are not kept


@cache
def _read(name: str) -> Asset:
    content = (FOLDER / name).read_bytes()
    suffix = PurePosixPath(name).suffix
    kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    if kind.startswith(("text/", "application/json", "image/svg")):
        packed = gzip.compress(content, 6, mtime=0) if len(content) >= _MIN_GZIP else None
        kind += "; charset=utf-8"
    else:
        packed = None
    return Asset(content, packed, f'"{hashlib.sha256(content).hexdigest()[:20]}"', kind)


@cache
def _names() -> frozenset[str]:
    """All files of the page, so that no path of a request is ever joined to a folder."""
    paths = (path for path in FOLDER.rglob("*") if path.is_file())
    return frozenset(path.relative_to(FOLDER).as_posix() for path in paths)


def answer(path: str, headers: Mapping[str, str], root: str = "") -> Answer:
    """The response to a GET of ``path`` (/, /ui, /ui/..., /docs, /favicon.ico). ``headers``:
    names in lower case. ``root``: the path before all routes (--fastapi-root-path), as "/api"."""
    if path == "/":
        return 307, {"Location": f"{root}/ui/" if root else "ui/", "Vary": "Accept"}, b""
    if path in _VIEWS:
        return 307, {"Location": f"{root}/{_VIEWS[path]}" if root else _VIEWS[path]}, b""
    name = "icons/favicon.svg" if path == FAVICON else path.removeprefix("/ui/") or "index.html"
    found = asset(name)
    if found is None:
        text = f"the page has no file {name[:100]!r}: open /ui/\n"
        return 404, {**SECURITY_HEADERS, "Content-Type": "text/plain; charset=utf-8"}, text.encode()
    # no-cache: the browser asks each time, and a 304 has no body
    sent = {**SECURITY_HEADERS, "ETag": found.etag, "Cache-Control": "no-cache"}
    sent["Vary"] = "Accept-Encoding"
    known = headers.get("if-none-match", "")
    if found.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return 304, sent, b""
    sent["Content-Type"] = found.media_type
    if found.packed is not None and "gzip" in headers.get("accept-encoding", ""):
        return 200, {**sent, "Content-Encoding": "gzip"}, found.packed
    return 200, sent, found.content


def wants_page(path: str, accept: str) -> bool:
    """Whether a GET of ``path`` is answered by a static file, which needs no key."""
    if path == "/":
        return "text/html" in accept
    return path in (*_VIEWS, FAVICON) or (path.startswith("/ui/") and path != "/ui/info")


def info(model: str, serve: ServeConfig, is_gateway: bool = False) -> dict[str, object]:
    """What the page must know before it has a key; ``model`` is told only where none is needed."""
    has_key = bool(serve.api_key or serve.api_key_file)
    return {
        "version": __version__,
        "model": None if has_key else model,
        "is_gateway": is_gateway,
        "has_key": has_key or bool(serve.admin_api_key),
        "needs_key": has_key,
        "show_text": bool(getattr(serve, "ui_show_text", False)),
    }


@router.get("/ui/info")
async def ui_info(request: Request) -> Response:
    """Facts for the page."""
    state = state_of(request)
    if state.config.serve.disable_ui:
        return _disabled()
    return json_response(info(state.model_name, state.config.serve))


@router.api_route("/ui", methods=["GET", "HEAD"])
@router.api_route("/docs", methods=["GET", "HEAD"])
@router.api_route("/ui/{name:path}", methods=["GET", "HEAD"])
@router.api_route(FAVICON, methods=["GET", "HEAD"])
async def ui(request: Request) -> Response:
    """The page and its files."""
    serve = state_of(request).config.serve
    return _disabled() if serve.disable_ui else page(request, serve)


def page(request: Request, serve: ServeConfig) -> Response:
    """The response to a request for which ``wants_page`` is true."""
    path = request.url.path
    status, headers, body = answer(path, request.headers, prefix_of(serve.fastapi_root_path))
    return Response(body, status, headers)


def _disabled() -> Response:
    return PlainTextResponse("the page is off (--disable-ui)\n", 404)
