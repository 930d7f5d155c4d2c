"""`--root-path`: the server behind a proxy that hands on paths with a prefix of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Answers below a prefix what it answers without, as a server does that uvicorn is told `--root-path` for.

    prefix: such as /llm, without a slash at its end.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on (ASGI)."""
        if scope["type"] == "http":
            whole = scope.get("root_path", "") + self._prefix
            if scope["path"].startswith(f"{whole}/"):
                scope["root_path"] = whole
        await self._app(scope, receive, send)
