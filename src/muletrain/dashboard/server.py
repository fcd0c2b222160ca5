"""The dashboard's HTTP server, in a thread beside the command."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from muletrain.dashboard.gatekeeper import HEADERS, LOOPBACK, Gatekeeper
from muletrain.dashboard.publisher import Publisher
from muletrain.dashboard.steering import steer
from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from muletrain.dashboard.page import RunPage

INSTALL = "pip install 'muletrain[dashboard]'"
PORT, TRIES = 8265, 32
"""The usual port, and how many further ones are tried if it is in use."""
STATIC = Path(__file__).parent / "static"
START_S, END_S = 10.0, 3.0
"""Longest wait for the server's start and end [s]."""


class Dashboard:
    """Serves pages while the context lasts."""

    def __init__(self, port: int | None = None, host: str = LOOPBACK) -> None:
        """``port``: None tries ``PORT`` and the next ones; 0 takes any free one. Raises MuletrainError: an extra is missing."""
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as e:
            raise MuletrainError(f"--dashboard needs starlette and uvicorn: {INSTALL}, or leave it out") from e
        self.gate = Gatekeeper(host)
        self.pages: list[RunPage] = []
        self.publisher = Publisher(self.pages)
        self._wanted = port
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Raises MuletrainError if the port cannot be had."""
        import uvicorn

        listening = _bound(self.gate.host, self._wanted)
        self.gate.port = listening.getsockname()[1]
        config = uvicorn.Config(
            application(self),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http="h11",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="dashboard", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def _serve(self, listening: socket.socket) -> None:
        with suppress(asyncio.CancelledError), listening, asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[listening]))

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self.publisher.dismiss)
        self._server.should_exit = True
        assert self._thread is not None
        self._thread.join(END_S)

    def show(self, page: RunPage) -> None:
        """Show ``page`` from now on, in the place of an earlier one of this command."""
        self.pages[:] = [page]

    @property
    def url(self) -> str:
        """The address for a browser. The token lets the browser's user stop the run."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.gate.host, self.gate.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.gate.port}/?token={self.gate.token}"


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket on the wanted port. Raises MuletrainError."""
    tries = range(PORT, PORT + TRIES) if port is None else (port,)
    for number in (*tries, *((0,) if port is None else ())):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family, backlog=64)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise MuletrainError(f"--dashboard: cannot serve on {host}:{number}: {e.strerror or e}") from None
    raise MuletrainError(
        f"--dashboard: another program uses port {port} of {host}; choose another one, or leave the port out: the next free one is taken"
    )


def application(board: Dashboard) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    gate, publisher = board.gate, board.publisher

    async def home(request: Request) -> Response:
        if (given := request.query_params.get("token")) is not None:
            if not gate.has_token(given):
                return PlainTextResponse("wrong token: open the link that the command printed\n", 403)
            answer = RedirectResponse("/", 303)
            answer.set_cookie(gate.cookie, gate.token, httponly=True, samesite="strict", max_age=30 * 86400)
            return answer
        return FileResponse(STATIC / "index.html")

    async def state(request: Request) -> Response:
        text = publisher.full()
        steers = gate.has_token(request.cookies.get(gate.cookie))
        return Response(f'{{"steers":{json.dumps(steers)},{text[1:]}', media_type="application/json")

    async def stream(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return StreamingResponse(publisher.stream(after), media_type="text/event-stream")

    async def past(request: Request) -> Response:
        try:
            page, t = board.pages[int(request.query_params["run"])], float(request.query_params["t"])
        except (KeyError, ValueError, IndexError):
            return JSONResponse({"error": "no such run"}, 404)
        found = await run_in_threadpool(page.frames.at, t, after="after" in request.query_params)
        if found is None:
            return JSONResponse({"error": "no earlier state"}, 404)
        return Response(f'{{"t":{found[0]},"state":{found[1].decode()}}}', media_type="application/json")

    async def act(request: Request) -> Response:
        if not gate.may_steer(request.cookies.get(gate.cookie), request.headers):
            return JSONResponse({"ok": False, "text": "open the link that the command printed: it has the token"}, 403)
        try:
            asked = json.loads((await request.body())[:4096])
            page = board.pages[int(asked["run"])]
            done = await steer(Path(page.folder), str(asked["action"]), str(asked.get("peer", "")))
        except (ValueError, KeyError, IndexError, TypeError):
            return JSONResponse({"ok": False, "text": "no such run"}, 400)
        return JSONResponse(done._asdict())

    routes = [
        Route("/", home),
        Route("/api/state", state),
        Route("/api/events", stream),
        Route("/api/at", past),
        Route("/api/act", act, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)])
    return _guarded(app, gate)


def _guarded(app: Any, gate: Gatekeeper) -> Any:
    """``app`` behind the gatekeeper; every answer gets our headers."""
    from starlette.datastructures import MutableHeaders
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    def refusal(request: Request) -> Any:
        if not gate.knows_host(request.headers.get("host", "")):
            return PlainTextResponse("not a name of this machine: use its address\n", 421)
        if request.url.path != "/" or "token" not in request.query_params:
            if not gate.may_look(request.cookies.get(gate.cookie)):
                return PlainTextResponse("no token: open the link that the command printed\n", 403)
        return None

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            return
        answer = refusal(Request(scope)) or app
        await answer(scope, receive, with_headers)

    return guarded
