"""The dashboard's HTTP server, in a thread beside the command."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from muletrain.dashboard.gatekeeper import LOOPBACK, Gatekeeper
from muletrain.dashboard.publisher import Publisher
from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from muletrain.dashboard.page import RunPage

INSTALL = "pip install 'muletrain[dashboard]'"
PORT, TRIES = 8265, 32
"""The usual port, and how many further ones are tried if it is in use."""
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

        from muletrain.dashboard.site import Site

        listening = _bound(self.gate.host, self._wanted)
        self.gate.port = listening.getsockname()[1]
        config = uvicorn.Config(
            Site(self.gate, self.publisher),
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
        if not self._server.started:
            self.__exit__()
            raise MuletrainError(
                f"--dashboard: the page did not start within {START_S:.0f} s; leave --dashboard out, or try again"
            )
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
