"""Paths that clients may write in another way: with a proxy's path before theirs
(``--fastapi-root-path``), or OpenAI's routes without /v1, as llama.cpp's server has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the gateway's image has no starlette
    from starlette.types import ASGIApp, Receive, Scope, Send


def prefix_of(option: str) -> str:
    """The path as "/api"; "" where there is none."""
    path = option.strip("/")
    return f"/{path}" if path else ""


class WithoutPrefix:
    """ASGI middleware that takes ``prefix`` off paths, so that keys and routes see one form."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            raw: bytes = scope.get("raw_path") or b""
            scope = dict(scope)
            scope["path"] = path.removeprefix(self._prefix) or "/"
            if raw.startswith(self._prefix.encode()):
                scope["raw_path"] = raw.removeprefix(self._prefix.encode()) or b"/"
        await self._app(scope, receive, send)


VERSIONED = frozenset(("/chat/completions", "/completions", "/embeddings", "/models", "/responses"))


class WithVersion:
    """ASGI middleware that puts "/v1" before the paths of ``VERSIONED``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") in VERSIONED:
            path = f"/v1{scope['path']}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
