"""``muletrain join``: serve a run with this machine, within the owner's limits."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING

from muletrain.cli.actions.asked import BY_SIGNAL
from muletrain.cli.actions.own_peers import OwnPeers, check_name, host_name
from muletrain.cli.actions.session import POLL_S, Session
from muletrain.cli.show.console import make_console
from muletrain.config.model_sections import DataConfig
from muletrain.data.corpus import Corpus, absolute
from muletrain.errors import ConfigError, DataError
from muletrain.events import ClientBegan, ClientFinished, PeerJoined, PeerLeft
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import held, new_run_folder
from muletrain.runs.join.ticket import Ticket

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.cli.actions.own_peers import Listening
    from muletrain.events import Event
    from muletrain.runs.spec import WorkerSpec


def join_run(
    ticket: str,
    *,
    listening: Listening,
    data: str | None = None,
    tokens: float = 1.0,
    place: str | None = None,
    stage: int | None = None,
    memory: float | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: bool,
    name: str | None = None,
    private: bool = False,
    limits: Limits | None = None,
    reliable: bool = False,
) -> None:
    """Serve until the run ends, or as long as ``limits`` allow. ``reliable``: as a server if the run has servers and
    clients. Raises MuletrainError with the reason if the run does
    not admit this machine."""
    Ticket.parse(ticket)
    check_name(name)
    if private and (listening.port or listening.announce):
        raise ConfigError("--private opens no port; leave out --port and --announce, or --private")
    where = "none" if data is None else _own_data(data)
    limits = limits or Limits()
    # two machines may have one host name
    peers = OwnPeers.on(name or f"{host_name()}-{secrets.token_hex(2)}", device, threads)
    specs = peers.specs(
        listening,
        ticket=ticket,
        folder="",
        data=where,
        tokens_gib=tokens,
        place=place,
        stage=stage,
        memory_gib=memory,
        bandwidth_bytes_per_s=limits.share(len(peers.names)),
        private=private,
        client=not reliable,
        keeps_ticket=True,
    )
    hint = "; --name chooses another name" if name is None else ""
    while limits.wait_until_free() and _serve(specs, limits, hint, json=json):
        pass


def _serve(specs: list[WorkerSpec], limits: Limits, hint: str, *, json: bool) -> bool:
    """Serve until the run ends or we leave. Returns whether we left for a pause, so that we should rejoin. ``hint``:
    follows the machine's name."""
    folder = new_run_folder("join")
    with held(folder), LocalFleet(folder, specs[0].threads) as fleet:
        fleet.spawn([spec.name for spec in specs])
        session = JoinSession(folder, fleet, limits, json=json)
        try:
            with session.interruptible(), session.console:
                session.say(f"this machine is {', '.join(spec.name for spec in specs)}{hint}")
                for spec in specs:
                    fleet.begin(spec.model_copy(update={"folder": str(folder)}))
                session.watch()
            session.say(session.ended())
            if (on := session.goes_on()) is not None:
                session.say(on)
            session.check_learned()
        finally:
            session.close()
    if session.interrupted:
        raise SystemExit(BY_SIGNAL + session.asked.number)
    return session.comes_back


class Limits:
    """The limits of a machine's owner."""

    def __init__(
        self, hours: float | None = None, bandwidth_mbps: float | None = None, pause_file: Path | None = None
    ) -> None:
        self.bandwidth_bytes_per_s = None if bandwidth_mbps is None else bandwidth_mbps * 1e6 / 8
        self._end = None if hours is None else time.monotonic() + hours * 3600
        self._hours, self._pause_file = hours, pause_file

    def share(self, processes: int) -> float | None:
        """The bandwidth of each of ``processes`` on this machine [bytes/s]."""
        return None if self.bandwidth_bytes_per_s is None else self.bandwidth_bytes_per_s / processes

    @property
    def paused(self) -> bool:
        return self._pause_file is not None and self._pause_file.exists()

    def exceeded(self) -> str | None:
        """Why this machine should not train now."""
        if self._end is not None and time.monotonic() >= self._end:
            return f"the {self._hours:g} hours are over"
        return f"{self._pause_file} exists" if self.paused else None

    def wait_until_free(self) -> bool:
        """Wait while the pause file exists. Returns False when the hours are over, or on Ctrl-C."""
        if self.paused:
            make_console(sys.stderr).print(f"paused: joins when {self._pause_file} is gone", soft_wrap=True)
        try:
            while self.paused and (self._end is None or time.monotonic() < self._end):
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return False
        return self.exceeded() is None


def _own_data(path: str) -> str:
    """``--data`` for any working directory. Raises DataError if there is no such corpus."""
    try:
        Corpus(absolute(path), DataConfig().field)
    except DataError as e:
        raise DataError(f"--data {path}: {str(e).removeprefix('data.path: ')}") from e
    return absolute(path)


class JoinSession(Session):
    """A session that ends with the run, or leaves in order: on Ctrl-C, or when a limit is reached."""

    hears_all = False

    def __init__(self, folder: Path, fleet: LocalFleet, limits: Limits, *, json: bool) -> None:
        super().__init__(folder, fleet, json=json)
        self.paused = False
        """Whether the session leaves because of the pause file."""
        self._limits = limits
        self._training = self._leaving = False
        self._left: int | None = None
        self._helped = False
        """Is this machine a client?"""
        self._reasons_given: list[str] = []

    def show(self, event: Event) -> None:
        super().show(event)
        if isinstance(event, PeerJoined):  # the first event of a peer that trains
            self._training, self._asked = True, None  # a step takes the time it takes
            self._left = None  # the peer may have left one stage for another
        if isinstance(event, PeerLeft):
            self._left = event.step
        if isinstance(event, ClientBegan):
            self._training, self._helped = True, True
        if isinstance(event, ClientFinished):
            self._reasons_given.append(event.reason)

    def poll(self) -> None:
        super().poll()
        if not self._leaving and (reason := self._limits.exceeded()) is not None:
            self.paused = self._limits.paused
            self.end_in_order(f"{reason}: ")

    def end_in_order(self, why: str = "\n") -> None:
        self._leaving = True
        self._asked = None if self._training else time.monotonic()
        when = "after this step" if self._training else "before the run begins"
        when = "at once" if self._helped else when
        self.say(f"{why}leaving {when}; Ctrl-C leaves at once")
        self.fleet.stop()

    @property
    def comes_back(self) -> bool:
        """Whether the session left for a pause; the run may continue meanwhile."""
        left = self._left is not None or self._helped or not self._training
        return self.paused and left

    def ended_at_once(self) -> str:
        return "left at once: the other members will notice that this machine is gone"

    def goes_on(self) -> str | None:
        """How a run that ended early can go on from here; None: the newest checkpoint is on another machine."""
        if self.checkpoint is None or not self.checkpoint.is_dir() or self.view.step >= self.view.steps:
            return None
        return f"muletrain start --resume {self.folder}   # go on after step {int(self.checkpoint.name[5:13])}, with your own data.path"

    def ended(self) -> str:
        if self._reasons_given:
            return "; ".join(dict.fromkeys(self._reasons_given))
        if self._left is not None:
            return f"left the run in order after step {self._left}"
        return "left before the run began" if self._leaving and not self._training else "the run has ended"
