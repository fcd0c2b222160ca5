"""The addresses of the dashboard. Imported only where starlette is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from muletrain.dashboard.gatekeeper import HEADERS
from muletrain.dashboard.steering import steer

if TYPE_CHECKING:
    from muletrain.dashboard.gatekeeper import Gatekeeper
    from muletrain.dashboard.publisher import Publisher

STATIC = Path(__file__).parent / "static"
MONTH_S = 30 * 86400
LINK = "open the link that the command printed"
LONGEST = 4096
"""Most bytes of a command."""


class Site:
    """The ASGI application: pages of ``publisher``, behind ``gate``."""

    def __init__(self, gate: Gatekeeper, publisher: Publisher) -> None:
        self._gate, self._publisher = gate, publisher
        routes = [
            Route("/", self._home),
            Route("/api/state", self._state),
            Route("/api/events", self._events),
            Route("/api/at", self._at),
            Route("/api/act", self._act, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        zipped = Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
        self._app = Starlette(routes=routes, middleware=[zipped])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. Every answer has ``HEADERS``."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(Request(scope)) or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self._gate.knows_host(request.headers.get("host", "")):
            return PlainTextResponse("not a name of this machine: use its address\n", 421)
        enters = request.url.path == "/" and "token" in request.query_params
        if not enters and not self._gate.may_look(self._cookie(request)):
            return PlainTextResponse(f"no token: {LINK}\n", 403)
        return None

    def _cookie(self, request: Request) -> str | None:
        found: str | None = request.cookies.get(self._gate.cookie)
        return found

    async def _home(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is None:
            return FileResponse(STATIC / "index.html")
        if not self._gate.has_token(given):
            return PlainTextResponse(f"wrong token: {LINK}\n", 403)
        answer = RedirectResponse("/", 303)  # the address bar and the history do without the token
        answer.set_cookie(self._gate.cookie, given, httponly=True, samesite="strict", max_age=MONTH_S)
        return answer

    async def _state(self, request: Request) -> Response:
        text = self._publisher.full()
        steers = json.dumps(self._gate.has_token(self._cookie(request)))
        return Response(f'{{"steers":{steers},{text[1:]}', media_type="application/json")

    async def _events(self, request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return StreamingResponse(self._publisher.stream(after), media_type="text/event-stream")

    async def _at(self, request: Request) -> Response:
        asked = request.query_params
        try:
            page, t = self._publisher.pages[int(asked["run"])], float(asked["t"])
        except (KeyError, ValueError, IndexError):
            return JSONResponse({"error": "no such run"}, 404)
        found = await run_in_threadpool(page.frames.at, t, after="after" in asked)
        if found is None:
            return JSONResponse({"error": "no such state"}, 404)
        return Response(f'{{"t":{found[0]},"state":{found[1].decode()}}}', media_type="application/json")

    async def _act(self, request: Request) -> Response:
        if not self._gate.may_steer(self._cookie(request), request.headers):
            return JSONResponse({"ok": False, "text": f"{LINK}: it has the token"}, 403)
        try:
            asked = json.loads(await self._body(request))
            page = self._publisher.pages[int(asked["run"])]
            done = await steer(Path(page.folder), str(asked["action"]), str(asked.get("peer", "")))
        except (ValueError, KeyError, IndexError, TypeError):
            return JSONResponse({"ok": False, "text": "no such run"}, 400)
        return JSONResponse(done._asdict())

    async def _body(self, request: Request) -> bytes:
        """Raises ValueError for a body of more than ``LONGEST`` bytes, whose rest is not read."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST:
                raise ValueError("too long")
        return body
