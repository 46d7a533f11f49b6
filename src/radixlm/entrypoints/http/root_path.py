"""``--fastapi-root-path``: requests come with the path of a proxy before theirs, or without."""

from __future__ import annotations

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
